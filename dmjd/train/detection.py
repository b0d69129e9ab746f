"""Object detection as a task of the loop: an encoder with Mask R-CNN, validated by the AP of boxes and masks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dmjd.builders.detect import DetectStep, build_detect_step
from dmjd.builders.tasks import classes_of
from dmjd.config import DetectConfig
from dmjd.data.dense.coco import Coco
from dmjd.evaluate.detection import validate_detection
from dmjd.parallel.world import World
from dmjd.runs.classes import CATEGORY_IDS, pack_category_ids
from dmjd.train.dense import Dense


class Detecting(Dense[DetectConfig]):
    """Detection; see :class:`~dmjd.train.task.Task`. ``config`` comes from :func:`~dmjd.train.dense.resolve`.

    Args:
        initial: weights of the encoder to begin with.
    """

    score, score_title, evaluation = "box_ap", "box AP", "ap"
    _advice = "dmjd ap RUN, dmjd report RUN, dmjd predict RUN IMAGES, dmjd export RUN"

    def __init__(self, config: DetectConfig, world: World, initial: Path | None = None) -> None:
        initial = None if config.weights == "untrained" else initial
        super().__init__(config, world, build_detect_step(config, classes_of(config), world, initial))

    def files(self) -> Mapping[str, bytes]:
        assert isinstance(self._train, Coco)
        return {**super().files(), CATEGORY_IDS: pack_category_ids(self._train.category_ids)}

    def _validate(self, step: int) -> dict[str, float | None]:
        assert isinstance(self.step, DetectStep)
        return validate_detection(self.step, self._test, self._config, self._world, self._run, step)

    def _testing(self) -> str:
        head = self._config.head
        return f"up to {head.detections} detections above a score of {head.min_score:g}"
