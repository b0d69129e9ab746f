"""Base of segmentation and detection as tasks of the loop: checks of the first start, data and records."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from dmjd.builders import check_data, token_grid
from dmjd.builders.tasks import builders_of, classes_of
from dmjd.config import DenseDataConfig, DetectConfig, SegmentConfig, check_batch
from dmjd.data.build import build_dataset, training_transform
from dmjd.data.dataset import ImageDataset
from dmjd.data.dense.annotated import AnnotatedImages
from dmjd.errors import ConfigError, DataError, NoSplit
from dmjd.evaluate import EVALUATIONS
from dmjd.evaluate.validate import record_training
from dmjd.evaluate.validation import check_same_classes, class_names
from dmjd.models.flops import count_flops
from dmjd.parallel.world import World
from dmjd.runs.folder import RunFolder
from dmjd.train.downstream import Downstream, complete
from dmjd.train.initial import with_init

logger = logging.getLogger("dmjd")

C = TypeVar("C", SegmentConfig, DetectConfig)


def resolve(config: C, run: RunFolder, world: World) -> C:
    """``config`` with the backbone of ``config.init`` and the number of classes of the data.

    Raises:
        UserError: for settings that do not fit each other, and weights or images that cannot be used; before any model
            is built.
    """
    initial = run.initial_weights(config.init)
    if initial:
        config = with_init(config, Path(initial["init_path"]))
    check_data(config.data)
    training_transform(config.data)
    grid, window = token_grid(config), config.attention.window
    if window is not None and window > max(grid):
        raise ConfigError(
            f"attention.window={window} exceeds the {grid[0]}x{grid[1]} tokens of an image; set a smaller one, or null "
            "for attention over the whole image"
        )
    check_batch(config.batch_size, config.engine.grad_accum_steps, world.size)
    train = build_dataset(replace(config.data, check="none"), "train")  # files are checked when the run opens them
    assert isinstance(train, AnnotatedImages)
    train.require_annotations()
    if config.batch_size > len(train):
        raise ConfigError(
            f"batch_size={config.batch_size} exceeds the {len(train)} training images of "
            f"data.root={config.data.root}; set a smaller one"
        )
    test_images(replace(config.data, check="none"), train)
    if isinstance(config, DetectConfig) and config.data.val == config.data.train:
        logger.warning("data.val=%s equals data.train: validations use the training images", config.data.val)
    if isinstance(config, SegmentConfig) and config.test.mode == "whole" and "test.stride" in (config.typed or ()):
        logger.warning("test.stride is ignored with test.mode=whole")
    if window is None and "attention.global_blocks" in (config.typed or ()):
        logger.warning("attention.global_blocks is ignored without attention.window: all blocks are global")
    classes = config.head.num_classes
    if classes is not None and classes < train.num_classes:
        raise ConfigError(
            f"head.num_classes={classes} is less than the {train.num_classes} classes of the data; set it to null"
        )
    return replace(config, head=replace(config.head, num_classes=classes or train.num_classes))


def test_images(data: DenseDataConfig, train: ImageDataset) -> ImageDataset:
    """The validation images of ``data``. Raises DataError if there are none, none of them is annotated, or they have
    other classes than ``train``."""
    try:
        test = build_dataset(replace(data, max_bad_percent=0.0), "test")
    except NoSplit as error:
        raise DataError(f"{error}; a run validates, so data.root needs validation images") from error
    check_same_classes(test, class_names(train), "the training images")
    assert isinstance(test, AnnotatedImages)
    test.require_annotations()
    return test


class Dense(Downstream[C]):
    """Segmentation or detection; see :class:`~dmjd.train.task.Task`. Its configuration comes from ``resolve``.

    Attributes:
        evaluation: the name of the evaluation that has the scores of a validation as columns.
    """

    evaluation: ClassVar[str]

    def flops_per_image(self) -> int:
        config = self._config
        with torch.device("meta"):
            objective, inputs = builders_of(config).objective_and_inputs(config, classes_of(config), 1)
            return count_flops(objective, inputs.inputs)

    def _test_images(self, train: ImageDataset) -> ImageDataset:
        return test_images(self._config.data, train)

    def _record(self, run: RunFolder, step: int, scores: Mapping[str, float | None]) -> dict[str, Any]:
        config = self._config
        settings = {"test": self._testing(), "max_bad_percent": config.data.max_bad_percent}
        values = {"test_images": len(self._test), "classes": self._test.num_classes}
        # The log has no empty columns.
        scores = complete(scores, *EVALUATIONS[self.evaluation].columns)
        return record_training(config, run, step, scores, self.score, values, settings, self.best.history[-1])

    @abstractmethod
    def _testing(self) -> str:
        """How images are tested, for the settings of the record."""
