"""Histograms of oriented gradients as the target: MaskFeat and DMJD."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dmjd.config import PretrainConfig
from dmjd.ops.hog import MAX_BINS, VALUE_ORDER, Flavour, Norm, hog
from dmjd.targets.tokenizer import TargetSpec, register

_SHORTEST_CELL = 12  # pixels; below it nine orientations are not told apart by eye


@dataclass(frozen=True)
class HogTarget:
    """HOG of the raw 0..255 image. MaskFeat's own target is flavour maskfeat with norm l2, which raw pixels serve too.

    patch: side of a patch in pixels.
    channels: of the images.
    cell: side of a cell in pixels, a divisor of ``patch``; None is half of ``patch``.
    bins: orientations in 180 degrees.
    flavour, norm: as :func:`dmjd.ops.hog.hog` has them.
    """

    patch: int
    channels: int
    cell: int | None = None
    bins: int = 9
    flavour: str = "dmjd"
    norm: str = "layernorm"

    codes = False

    def __post_init__(self) -> None:
        if self.bins > MAX_BINS:
            raise ValueError(f"HogTarget: bins must be at most {MAX_BINS}, got {self.bins}")
        if self.cell_size < 1 or self.patch % self.cell_size:
            raise ValueError(f"HogTarget: cell must be a divisor of patch {self.patch}, got {self.cell_size}")

    @property
    def cell_size(self) -> int:
        """Side of a cell in pixels."""
        return self.patch // 2 if self.cell is None else self.cell

    @property
    def dim(self) -> int:
        """Values per patch."""
        return (self.patch // self.cell_size) ** 2 * self.bins * self.channels

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 ``[B, H, W, C]`` -> float32 ``[B, N, dim]``.

        Raises:
            ValueError: if the channels or the size of ``images`` do not fit this target.
        """
        flavour, norm = cast(Flavour, self.flavour), cast(Norm, self.norm)  # choices of the configuration
        return hog(images, self.cell_size, self.bins, self.patch, flavour, norm)

    def render(self, values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        """A glyph per cell of ``values`` ``[N, dim]``, white on black, as uint8 RGB.

        A stroke runs along the edge, perpendicular to the gradient at the centre of its bin: a vertical edge is drawn
        by (nearly) vertical strokes. Brightness is the positive part of the mean over channels, relative to the
        strongest stroke of the picture. The picture is the image's size times the smallest integer that makes cells at
        least 12 pixels wide.
        """
        h, w = grid
        per_patch = self.patch // self.cell_size
        sizes = {"row": per_patch, "column": per_patch, "bin": self.bins, "channel": self.channels}
        order = VALUE_ORDER[self.flavour]
        tokens = values.detach().float().cpu().nan_to_num().numpy().reshape(h, w, *(sizes[name] for name in order))
        row, column, bins, channel = (2 + order.index(name) for name in sizes)
        cells = tokens.transpose(0, row, 1, column, bins, channel).mean(-1)
        strength = np.maximum(cells.reshape(h * per_patch, w * per_patch, self.bins), 0)
        strength = strength / max(float(strength.max(initial=0)), np.finfo(np.float32).tiny)

        side = self.cell_size * math.ceil(_SHORTEST_CELL / self.cell_size)
        picture = np.zeros((h * per_patch, side, w * per_patch, side), np.float32)
        strokes = _strokes(self.bins, side)
        if self.flavour.startswith("maskfeat"):  # orientations from the row axis to the column axis
            strokes = strokes.transpose(0, 2, 1)
        for index, glyph in enumerate(strokes):
            # The brighter stroke wins where two cross; a sum would draw a bright dot in every cell centre.
            np.maximum(picture, strength[:, None, :, None, index] * glyph[None, :, None, :], out=picture)
        grey = np.rint(255 * picture).astype(np.uint8).reshape(h * per_patch * side, w * per_patch * side)
        return np.repeat(grey[..., None], 3, axis=-1)


def _strokes(bins: int, side: int) -> NDArray[np.float32]:
    """``[bins, side, side]`` in 0..1: an anti-aliased line, two pixels wide, along the edge of each orientation."""
    angle = np.pi / bins * (np.arange(bins)[:, None, None] + 0.5)
    offset = np.arange(side) - (side - 1) / 2
    row, column = offset[:, None], offset[None, :]
    across = np.abs(row * np.sin(angle) + column * np.cos(angle))  # along the gradient, whose direction is `angle`
    along = np.abs(row * np.cos(angle) - column * np.sin(angle))
    strokes: NDArray[np.float32] = (np.clip(1.5 - across, 0, 1) * np.clip(side / 2 - along, 0, 1)).astype(np.float32)
    return strokes


def _build(config: PretrainConfig) -> HogTarget:
    target = config.target
    channels = config.data.channels
    return HogTarget(config.backbone.patch_size, channels, target.cell, target.bins, target.flavour, target.norm)


register("hog", TargetSpec(_build, norms=("layernorm", "l2", "none")))
