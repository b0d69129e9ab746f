"""One step of ``dmjd detect``: engine, preparation, Mask R-CNN and average."""

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
from dmjd.builders.preparation import draw_branch_scales
from dmjd.builders.step import DownstreamStep, checked_world, downstream_parts
from dmjd.builders.weights import load_encoder_part
from dmjd.config import DetectConfig
from dmjd.data.batch import Batch
from dmjd.errors import ConfigError, config_section
from dmjd.models.dense.detection import Detection, Limits, MaskRCNN
from dmjd.models.dense.grid_attention import attend_on_grid
from dmjd.ops import make_key
from dmjd.ops.images import normalise
from dmjd.parallel.world import World

OBJECTS = 32
"""Objects of an image in :func:`detection_and_inputs`. Memory and FLOPs of a step hardly depend on it."""


class DetectionInputs(NamedTuple):
    """Arguments of :class:`~dmjd.models.dense.detection.Detection`, in order."""

    images: Tensor
    boxes: Tensor
    labels: Tensor
    masks: Tensor
    key: Tensor
    sample_ids: Tensor
    branch_scales: Tensor | None

    @property
    def inputs(self) -> DetectionInputs:
        """The same tuple."""
        return self


@dataclass(frozen=True)
class DetectionPreparation:
    """Normalisation and drop path: a pure function of (seed, epoch, batch).

    depth, drop_path: as for :class:`~dmjd.builders.preparation.Preparation`.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    seed: int
    depth: int
    drop_path: float

    def __call__(self, batch: Batch, epoch: int) -> DetectionInputs:
        key, ids = make_key(self.seed, epoch), batch.sample_ids
        scales = (
            draw_branch_scales(ids, key, views=1, depth=self.depth, rate=self.drop_path) if self.drop_path else None
        )
        images = normalise(batch.images, self.mean, self.std)
        return DetectionInputs(images, batch.boxes, batch.labels, batch.masks, key, ids, scales)


@dataclass(frozen=True, kw_only=True)
class DetectStep(DownstreamStep[DetectConfig]):
    """A step of detection."""

    prepare: DetectionPreparation

    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """Detections of images, in evaluation mode and without gradients. Collective where the engine is.

        Args:
            images: uint8 ``[B, H, W, C]`` on the engine's device, padded at the bottom and the right.
            sizes: their (height, width) without padding, ``[B, 2]`` on the device.

        Returns:
            As :meth:`~dmjd.models.dense.detection.Detection.detect`.
        """
        objective = self.engine.objective
        assert isinstance(objective, Detection)
        with self.engine.inference():
            return objective.detect(normalise(images, self.prepare.mean, self.prepare.std), sizes)


def build_detect_step(
    config: DetectConfig, num_classes: int, world: World | None = None, initial: Path | None = None
) -> DetectStep:
    """Mask R-CNN, engine and average of ``config``. Collective where the engine is.

    Args:
        num_classes: of the data; ``config.head.num_classes`` may be more.
        world: one process on ``engine.device`` if left out.
        initial: weights of the encoder to begin with, as :func:`~dmjd.builders.weights.load_encoder_part` takes them.

    Raises:
        UserError: for parts that do not fit each other, and for weights that do not fit the encoder.
    """
    world = checked_world(config, world)
    objective = build_detection(config, num_classes)
    set_layers(objective, config.optim.layer_decay, config.freeze)
    load = None if initial is None else partial(load_encoder_part, objective, initial, config.weights)
    data = config.data
    return DetectStep(
        prepare=DetectionPreparation(
            tuple(data.mean),
            tuple(data.std),
            config.seed,
            len(objective.model.encoder.blocks),
            config.backbone.drop_path,
        ),
        **downstream_parts(objective, config, world, load),
    )


def build_detection(config: DetectConfig, num_classes: int, *, suppress: bool = True) -> Detection:
    """Mask R-CNN with its losses, initialised from ``config.seed`` alone.

    Args:
        num_classes: of the data; ``config.head.num_classes`` may be more.
        suppress: as for :class:`~dmjd.models.dense.detection.Limits`.

    Raises:
        ConfigError: for parts that do not fit each other.
    """
    check_data(config.data)
    grid, head, attention = token_grid(config), config.head, config.attention
    classes = num_classes if head.num_classes is None else head.num_classes
    if classes < num_classes:
        raise ConfigError(f"head.num_classes={classes} is less than the {num_classes} of the data; set it to null")
    if min(grid) < 2:
        height, width = image_size(config)
        raise ConfigError(
            f"data.image_size={height}x{width} is too small for a feature pyramid; set at least two patches per side"
        )
    if config.engine.cuda_graphs:
        raise ConfigError("engine.cuda_graphs=true is not available in dmjd detect; set it to false")
    torch.manual_seed(config.seed)
    with config_section("backbone, attention, head"):
        encoder = build_encoder(config)
        attend_on_grid(encoder, attention.window, attention.global_blocks, attention.relative_positions, grid)
        stages = len(encoder.map_widths) > 1
        model = MaskRCNN(
            encoder,
            classes,
            pyramid=("fpn" if stages else "simple") if head.pyramid == "auto" else head.pyramid,
            channels=head.channels,
            rpn_convs=head.rpn_convs,
            box_convs=head.box_convs,
            box_width=head.box_width,
            mask_convs=head.mask_convs,
        )
    limits = Limits(
        head.proposals_before, head.proposals, head.samples, head.detections, head.min_score, suppress=suppress
    )
    return Detection(model, limits)


def detection_and_inputs(config: DetectConfig, num_classes: int, images: int) -> tuple[Detection, DetectionInputs]:
    """As :func:`dmjd.builders.step.objective_and_inputs`, of detection, with :data:`OBJECTS` objects for each image.

    Non-maximum suppression, whose result has no fixed shape, is left out; all other shapes are those of any step.
    """
    objective = materialised(lambda: build_detection(config, num_classes, suppress=False))
    set_layers(objective, config.optim.layer_decay, config.freeze)
    height, width = image_size(config)
    return objective, DetectionInputs(
        torch.zeros(images, config.data.channels, height, width),
        torch.zeros(images, OBJECTS, 4),
        torch.zeros(images, OBJECTS, dtype=torch.int64),
        torch.zeros(images, OBJECTS, height, -(-width // 8), dtype=torch.uint8),
        make_key(config.seed, 0),
        torch.zeros(images, dtype=torch.int64),
        torch.ones(len(objective.model.encoder.blocks), 2, images) if config.backbone.drop_path else None,
    )
