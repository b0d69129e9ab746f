"""One fine-tuning step of a configuration: engine, preparation, classifier and average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmjd.builders.data import check_data, image_size, token_grid
from dmjd.builders.layer_decay import set_layers
from dmjd.builders.mixing import Mixing, check_augment
from dmjd.builders.model import build_classification, materialised
from dmjd.builders.preparation import draw_branch_scales, draw_dropout
from dmjd.builders.step import DownstreamStep, checked_world, compiles, downstream_parts
from dmjd.builders.weights import load_classifier
from dmjd.config import FinetuneConfig
from dmjd.data.batch import Batch
from dmjd.errors import ConfigError
from dmjd.models.classifier import Classification
from dmjd.ops import make_key
from dmjd.ops.images import normalise
from dmjd.parallel.world import World


class ClassifierInputs(NamedTuple):
    """Arguments of :class:`~dmjd.models.classifier.Classification`, in order."""

    images: Tensor
    targets: Tensor
    branch_scales: Tensor | None
    dropout: Tensor | None

    @property
    def inputs(self) -> ClassifierInputs:
        """The same tuple."""
        return self


@dataclass(frozen=True)
class ClassifierPreparation:
    """Mixing, drop path and dropout: a pure function of (seed, epoch, batch).

    depth, drop_path: as for :class:`~dmjd.builders.preparation.Preparation`. width, dropout: size of the features
    before the head, and their dropout rate.
    """

    mixing: Mixing
    seed: int
    depth: int
    drop_path: float
    width: int
    dropout: float

    def __call__(self, batch: Batch, epoch: int) -> ClassifierInputs:
        images, targets = self.mixing(batch, epoch)
        key, ids = make_key(self.seed, epoch), batch.sample_ids
        scales = (
            draw_branch_scales(ids, key, views=1, depth=self.depth, rate=self.drop_path) if self.drop_path else None
        )
        kept = draw_dropout(ids, key, width=self.width, rate=self.dropout) if self.dropout else None
        return ClassifierInputs(images, targets, scales, kept)


@dataclass(frozen=True, kw_only=True)
class FinetuneStep(DownstreamStep[FinetuneConfig]):
    """A step of fine-tuning."""

    prepare: ClassifierPreparation

    def logits(self, images: Tensor) -> Tensor:
        """uint8 ``[B, H, W, C]`` on the engine's device -> float32 ``[B, classes]``, without augmentation, in
        evaluation mode and without gradients. Collective where the engine is."""
        data = self.config.data
        with self.engine.inference():
            # A copy: the outputs of a CUDA graph are overwritten by its next run.
            return self.engine.objective(normalise(images, tuple(data.mean), tuple(data.std))).float().clone()


def build_finetune_step(
    config: FinetuneConfig,
    num_classes: int,
    world: World | None = None,
    initial: Path | None = None,
    classes: Sequence[str] | None = None,
) -> FinetuneStep:
    """Classifier, engine and average of ``config``. Collective where the engine is.

    Args:
        num_classes: of the data; ``config.head.num_classes`` may be more.
        world: one process on ``engine.device`` if left out.
        initial: weights to begin with, as :func:`~dmjd.builders.weights.load_classifier` takes them.
        classes: names of the data's classes, for the head of a fine-tuned model.

    Raises:
        UserError: for parts that do not fit each other, and for weights that do not fit the model.
    """
    world = checked_world(config, world)
    check_augment(config, world.size)
    outputs = head_classes(config, num_classes)
    objective = _objective(config, outputs)
    load = None if initial is None else partial(load_classifier, objective, initial, config.weights, classes)
    parts = downstream_parts(objective, config, world, load)
    compiled = compiles(config.engine, parts["engine"].device)
    return FinetuneStep(prepare=_preparation(config, outputs, objective, compiled), **parts)


def head_classes(config: FinetuneConfig, found: int) -> int:
    """Classes of the head, for data with ``found`` of them. Raises ConfigError for fewer than two, or too few."""
    classes = found if config.head.num_classes is None else config.head.num_classes
    if found < 2:
        raise ConfigError(f"fine-tuning needs at least 2 classes, and data.name={config.data.name} has {found}")
    if classes < found:
        raise ConfigError(f"head.num_classes={classes} is less than the {found} classes of the data; set it to null")
    return classes


def classification_and_inputs(
    config: FinetuneConfig, num_classes: int, images: int
) -> tuple[Classification, ClassifierInputs]:
    """As :func:`dmjd.builders.step.objective_and_inputs`, of fine-tuning; inputs have the shapes of augmented ones."""
    objective = materialised(lambda: _objective(config, num_classes))
    encoder, head = objective.model.encoder, config.head
    return objective, ClassifierInputs(
        torch.zeros(images, config.data.channels, *image_size(config)),
        torch.zeros(images, num_classes),
        torch.ones(len(encoder.blocks), 2, images) if config.backbone.drop_path else None,
        torch.ones(images, encoder.embed_dim) if head.dropout else None,
    )


def _objective(config: FinetuneConfig, classes: int) -> Classification:
    check_data(config.data)
    token_grid(config)
    objective = build_classification(config, classes)
    set_layers(objective, config.optim.layer_decay, config.freeze)
    return objective


def _preparation(
    config: FinetuneConfig, classes: int, objective: Classification, compiled: bool
) -> ClassifierPreparation:
    encoder = objective.model.encoder
    return ClassifierPreparation(
        Mixing(config.augment, config.data, classes, config.seed, compiled),
        config.seed,
        len(encoder.blocks),
        config.backbone.drop_path,
        encoder.embed_dim,
        config.head.dropout,
    )
