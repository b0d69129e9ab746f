"""One step of ``dmjd segment``: engine, preparation, encoder with UPerNet and average."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmjd.builders.data import check_data, image_size, token_grid
from dmjd.builders.layer_decay import set_layers
from dmjd.builders.model import build_encoder, materialised
from dmjd.builders.preparation import draw_branch_scales, draw_dropout
from dmjd.builders.step import DownstreamStep, checked_world, downstream_parts
from dmjd.builders.weights import load_encoder_part
from dmjd.config import SegmentConfig
from dmjd.data.batch import Batch
from dmjd.errors import ConfigError, config_section
from dmjd.models.dense.grid_attention import attend_on_grid
from dmjd.models.dense.segmentation import Segmentation, Segmenter
from dmjd.ops import make_key
from dmjd.ops.images import normalise
from dmjd.parallel.world import World


class SegmentationInputs(NamedTuple):
    """Arguments of :class:`~dmjd.models.dense.segmentation.Segmentation`, in order."""

    images: Tensor
    maps: Tensor
    branch_scales: Tensor | None
    dropout: Tensor | None

    @property
    def inputs(self) -> SegmentationInputs:
        """The same tuple."""
        return self


@dataclass(frozen=True)
class SegmentationPreparation:
    """Normalisation, drop path and dropout: a pure function of (seed, epoch, batch).

    depth, drop_path: as for :class:`~dmjd.builders.preparation.Preparation`. width, dropout: channels before the
    classifiers, and their dropout rate.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    seed: int
    depth: int
    drop_path: float
    width: int
    dropout: float

    def __call__(self, batch: Batch, epoch: int) -> SegmentationInputs:
        key, ids = make_key(self.seed, epoch), batch.sample_ids
        scales = (
            draw_branch_scales(ids, key, views=1, depth=self.depth, rate=self.drop_path) if self.drop_path else None
        )
        kept = draw_dropout(ids, key, width=self.width, rate=self.dropout) if self.dropout else None
        return SegmentationInputs(normalise(batch.images, self.mean, self.std), batch.maps, scales, kept)


@dataclass(frozen=True, kw_only=True)
class SegmentStep(DownstreamStep[SegmentConfig]):
    """A step of segmentation."""

    prepare: SegmentationPreparation

    def logits(self, images: Tensor) -> Tensor:
        """uint8 ``[B, H, W, C]`` on the engine's device -> float32 ``[B, classes, H, W]``, in evaluation mode and
        without gradients. Collective where the engine is."""
        with self.engine.inference():
            # A copy: the outputs of a CUDA graph are overwritten by its next run.
            logits: Tensor = self.engine.objective(normalise(images, self.prepare.mean, self.prepare.std)).clone()
        return logits


def build_segment_step(
    config: SegmentConfig, num_classes: int, world: World | None = None, initial: Path | None = None
) -> SegmentStep:
    """Encoder with UPerNet, engine and average of ``config``. Collective where the engine is.

    Args:
        num_classes: of the data; ``config.head.num_classes`` may be more.
        world: one process on ``engine.device`` if left out.
        initial: weights of the encoder to begin with, as :func:`~dmjd.builders.weights.load_encoder_part` takes them.

    Raises:
        UserError: for parts that do not fit each other, and for weights that do not fit the encoder.
    """
    world = checked_world(config, world)
    objective = build_segmentation(config, num_classes)
    set_layers(objective, config.optim.layer_decay, config.freeze)
    load = None if initial is None else partial(load_encoder_part, objective, initial, config.weights)
    data = config.data
    return SegmentStep(
        prepare=SegmentationPreparation(
            tuple(data.mean),
            tuple(data.std),
            config.seed,
            len(objective.model.encoder.blocks),
            config.backbone.drop_path,
            sum(objective.model.dropout_widths),
            config.head.dropout,
        ),
        **downstream_parts(objective, config, world, load),
    )


def build_segmentation(config: SegmentConfig, num_classes: int) -> Segmentation:
    """Encoder, UPerNet and losses, initialised from ``config.seed`` alone.

    Raises:
        ConfigError: for parts that do not fit each other.
    """
    check_data(config.data)
    grid, head, attention = token_grid(config), config.head, config.attention
    classes = num_classes if head.num_classes is None else head.num_classes
    if classes < num_classes:
        raise ConfigError(f"head.num_classes={classes} is less than the {num_classes} of the data; set it to null")
    if config.engine.cuda_graphs:
        raise ConfigError("engine.cuda_graphs=true is not available in dmjd segment; set it to false")
    check_test(config)
    torch.manual_seed(config.seed)
    with config_section("backbone, attention, head"):
        encoder = build_encoder(config)
        attend_on_grid(encoder, attention.window, attention.global_blocks, attention.relative_positions, grid)
        model = Segmenter(
            encoder,
            classes,
            maps=head.maps,
            channels=head.channels,
            pool_scales=head.pool_scales,
            auxiliary_channels=head.auxiliary_channels if head.auxiliary_weight else None,
        )
    return Segmentation(model, head.auxiliary_weight)


def check_test(config: SegmentConfig) -> None:
    """Raise ConfigError unless the model can be tested as ``config.test`` sets."""
    test, window = config.test, config.data.image_size
    if not test.scales:
        raise ConfigError("test.scales must hold at least one number, got []")
    if test.mode == "slide" and test.stride and (test.stride[0] > window[0] or test.stride[1] > window[1]):
        raise ConfigError(
            f"test.stride={test.stride} exceeds data.image_size={window}, the window size, so pixels between "
            "windows would have no class; set a smaller one"
        )
    if test.mode == "whole" and config.backbone.positions in ("relative", "learned_relative"):
        raise ConfigError(
            f"test.mode=whole needs an encoder for any image size, and backbone.positions={config.backbone.positions} "
            "works for data.image_size only; set test.mode=slide"
        )


def segmentation_and_inputs(
    config: SegmentConfig, num_classes: int, images: int
) -> tuple[Segmentation, SegmentationInputs]:
    """As :func:`dmjd.builders.step.objective_and_inputs`, of segmentation."""
    objective = materialised(lambda: build_segmentation(config, num_classes))
    set_layers(objective, config.optim.layer_decay, config.freeze)
    height, width = image_size(config)
    return objective, SegmentationInputs(
        torch.zeros(images, config.data.channels, height, width),
        torch.zeros(images, height, width, dtype=torch.uint8),
        torch.ones(len(objective.model.encoder.blocks), 2, images) if config.backbone.drop_path else None,
        torch.ones(images, sum(objective.model.dropout_widths)) if config.head.dropout else None,
    )
