"""Fine-tuning as a task of the loop: a classifier, validated on the test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dmjd.builders.finetune import FinetuneStep, build_finetune_step, classification_and_inputs, head_classes
from dmjd.builders.recipe import apply_recipe, training_images
from dmjd.config import FinetuneConfig
from dmjd.data.build import build_dataset, resolve_auto
from dmjd.data.dataset import ImageDataset
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import seen_notes
from dmjd.evaluate.validate import record_finetune
from dmjd.evaluate.validation import class_names, validate, validation_dataset
from dmjd.models.flops import count_flops
from dmjd.parallel.world import World
from dmjd.runs.classes import read_classes
from dmjd.runs.folder import RunFolder
from dmjd.train.downstream import Downstream, complete
from dmjd.train.initial import with_init


def resolve(config: FinetuneConfig, run: RunFolder, world: World) -> FinetuneConfig:
    """``config`` with backbone and data of the run ``config.init``, its recipe, and the number of classes.

    Raises:
        UserError: for weights or images that cannot be fine-tuned; before any model is built.
    """
    initial = run.initial_weights(config.init)
    if initial:
        config = with_init(config, Path(initial["init_path"]))
    config = replace(config, data=resolve_auto(config.data))
    config = apply_recipe(config, world.device, world.size)
    train = training_images(config)  # the files are checked when the run opens them
    validation_dataset(replace(config.data, check="none"), train)
    if config.batch_size > len(train):
        raise ConfigError(
            f"batch_size={config.batch_size} exceeds the {len(train)} training images; set a smaller one, or "
            "preset=own_photos, which follows the number of images"
        )
    return replace(config, head=replace(config.head, num_classes=head_classes(config, train.num_classes)))


class Finetuning(Downstream[FinetuneConfig]):
    """Fine-tuning; see :class:`~dmjd.train.task.Task`. ``config`` comes from :func:`resolve`.

    Args:
        initial: weights to begin with.
    """

    score, score_title = "top1", "top-1"
    _advice = "dmjd validate RUN, dmjd report RUN, dmjd export RUN"

    def __init__(self, config: FinetuneConfig, world: World, initial: Path | None = None) -> None:
        assert config.head.num_classes is not None, "resolve has set it"
        self._classes = config.head.num_classes
        initial = None if config.weights == "untrained" else initial
        names = world.on_main(lambda: _names(config, initial))
        super().__init__(config, world, build_finetune_step(config, self._classes, world, initial, names))
        self.augment = config.augment

    def flops_per_image(self) -> int:
        with torch.device("meta"):
            objective, inputs = classification_and_inputs(self._config, self._classes, images=2)  # a pair is mixed
            return count_flops(objective, inputs.inputs) // 2

    def _test_images(self, train: ImageDataset) -> ImageDataset:
        return validation_dataset(self._config.data, train)

    def _validate(self, step: int) -> dict[str, float | None]:
        assert isinstance(self.step, FinetuneStep)
        return validate(self.step, self._test, self._config, self._world)

    def _record(self, run: RunFolder, step: int, scores: Mapping[str, float | None]) -> dict[str, Any]:
        every = complete(scores, "top5")  # the log has no empty columns
        return record_finetune(self._config, run, step, every, self._train, self._test, self.best.history[-1])

    def _notes(self, record: Mapping[str, Any]) -> Sequence[str]:
        return seen_notes(record["settings"])


def _names(config: FinetuneConfig, initial: Path | None) -> list[str] | None:
    """Names of the data's classes, if ``initial`` is a checkpoint of a fine-tuning, with which they are compared."""
    if initial is None or not initial.is_dir() or not read_classes(initial):
        return None
    return class_names(build_dataset(replace(config.data, check="none"), "train"))
