"""How the model and the step of each training command are built: one record per command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dmjd.builders import build_objective, target_dim
from dmjd.builders.finetune import build_finetune_step, classification_and_inputs
from dmjd.builders.model import build_classification
from dmjd.builders.step import TrainStep, build_step, objective_and_inputs
from dmjd.config import DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig, TrainConfig
from dmjd.models.objective import Trainable
from dmjd.parallel.world import World


class Inputs(Protocol):
    """Inputs of an objective for black images, to be counted."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Arguments of the objective, in order."""
        ...


class Builders(NamedTuple):
    """The functions that build a training.

    objective: (configuration, classes) -> the model with its losses, initialised from the seed alone.
    objective_and_inputs: (configuration, classes, images) -> the objective before any engine transforms it, and its
        inputs; as :func:`dmjd.builders.step.objective_and_inputs`.
    step: (configuration, classes, world) -> the step, without initial weights. Collective where the engine is.
    pair: images of the smallest micro-batch.
    """

    objective: Callable[[Any, int], Trainable]
    objective_and_inputs: Callable[[Any, int, int], tuple[Trainable, Inputs]]
    step: Callable[[Any, int, World], TrainStep[Any]]
    pair: int = 1


def _segmentation(config: SegmentConfig, classes: int) -> Trainable:
    from dmjd.builders.segment import build_segmentation  # imports transformers

    return build_segmentation(config, classes)


def _segmentation_and_inputs(config: SegmentConfig, classes: int, images: int) -> tuple[Trainable, Inputs]:
    from dmjd.builders.segment import segmentation_and_inputs

    return segmentation_and_inputs(config, classes, images)


def _segment_step(config: SegmentConfig, classes: int, world: World) -> TrainStep[Any]:
    from dmjd.builders.segment import build_segment_step

    return build_segment_step(config, classes, world)


def _detection(config: DetectConfig, classes: int) -> Trainable:
    from dmjd.builders.detect import build_detection  # imports torchvision

    return build_detection(config, classes)


def _detection_and_inputs(config: DetectConfig, classes: int, images: int) -> tuple[Trainable, Inputs]:
    from dmjd.builders.detect import detection_and_inputs

    return detection_and_inputs(config, classes, images)


def _detect_step(config: DetectConfig, classes: int, world: World) -> TrainStep[Any]:
    from dmjd.builders.detect import build_detect_step

    return build_detect_step(config, classes, world)


BUILDERS: dict[type[TrainConfig], Builders] = {
    PretrainConfig: Builders(
        lambda config, classes: build_objective(config, target_dim(config)),
        lambda config, classes, images: objective_and_inputs(config, images),
        lambda config, classes, world: build_step(config, world),
    ),
    # Images are mixed in pairs.
    FinetuneConfig: Builders(build_classification, classification_and_inputs, build_finetune_step, pair=2),
    SegmentConfig: Builders(_segmentation, _segmentation_and_inputs, _segment_step),
    DetectConfig: Builders(_detection, _detection_and_inputs, _detect_step),
}


def classes_of(config: Any) -> int:
    """Classes of the head of a resolved configuration."""
    classes: int | None = config.head.num_classes
    assert classes is not None, "the first start has set it"
    return classes


def builders_of(config: TrainConfig) -> Builders:
    """The record for the class of ``config``, or of its plan."""
    return next(record for schema, record in BUILDERS.items() if isinstance(config, schema))
