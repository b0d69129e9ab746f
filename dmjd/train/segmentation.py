"""Semantic segmentation as a task of the loop: an encoder with UPerNet, validated by mIoU."""

from __future__ import annotations

from pathlib import Path

from dmjd.builders.segment import SegmentStep, build_segment_step
from dmjd.builders.tasks import classes_of
from dmjd.config import SegmentConfig
from dmjd.evaluate.segmentation import validate_segmentation
from dmjd.parallel.world import World
from dmjd.train.dense import Dense


class Segmenting(Dense[SegmentConfig]):
    """Segmentation; see :class:`~dmjd.train.task.Task`. ``config`` comes from :func:`~dmjd.train.dense.resolve`.

    Args:
        initial: weights of the encoder to begin with.
    """

    score, score_title, evaluation = "miou", "mIoU", "miou"
    _advice = "dmjd miou RUN, dmjd report RUN, dmjd predict RUN IMAGES, dmjd export RUN"

    def __init__(self, config: SegmentConfig, world: World, initial: Path | None = None) -> None:
        initial = None if config.weights == "untrained" else initial
        super().__init__(config, world, build_segment_step(config, classes_of(config), world, initial))

    def _validate(self, step: int) -> dict[str, float | None]:
        assert isinstance(self.step, SegmentStep)
        return validate_segmentation(self.step, self._test, self._config, self._world, self._run, step)

    def _testing(self) -> str:
        test = self._config.test
        stride = " with steps of {}x{}".format(*test.stride) if test.mode == "slide" and test.stride else ""
        flip = ", flipped too" if test.flip else ""
        return f"{test.mode}{stride}, scales {', '.join(f'{scale:g}' for scale in test.scales)}{flip}"
