"""Histograms of oriented gradients per image patch, the regression target of MaskFeat and DMJD.

The descriptor of one cell is Dalal and Triggs' (CVPR'05) without blocks: central differences, hard binning of the
unsigned orientation, mean magnitude. Each colour channel has its own histogram. It reads raw 0..255 values: the eps of
the norms is absolute, so an image scaled to 0..1 gives another target.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.ops._lib import define

FLAVOURS = ("dmjd",)
"""Conventions of gradient, border and layout that :func:`hog` knows."""

NORMS = ("none", "l2", "layernorm")
"""Normalisations over the bins of one (channel, cell)."""

LAYOUTS = ("nhwc", "nchw")
"""Axis orders of the images."""

_EPS = 1e-5


def _image_sizes(images: Tensor, layout: str) -> tuple[int, int, int]:
    """Channels, height and width."""
    _, *sizes = images.shape
    height, width, channels = sizes if layout == "nhwc" else (*sizes[1:], sizes[0])
    return channels, height, width


def _fake(
    images: Tensor, cell: int, bins: int, patch: int, flavour: str, norm: str, layout: str, out_dtype: torch.dtype
) -> Tensor:
    channels, height, width = _image_sizes(images, layout)
    tokens = (height // patch) * (width // patch)
    return images.new_empty((images.shape[0], tokens, (patch // cell) ** 2 * bins * channels), dtype=out_dtype)


def _normalise(histograms: Tensor, norm: str) -> Tensor:
    if norm == "l2":
        return histograms / (histograms.square().sum(-1, keepdim=True) + _EPS**2).sqrt()
    if norm == "layernorm":
        return F.layer_norm(histograms, histograms.shape[-1:], eps=_EPS)
    return histograms


@define(
    "hog(Tensor images, SymInt cell, SymInt bins, SymInt patch, str flavour, str norm, str layout, "
    "ScalarType out_dtype) -> Tensor",
    fake=_fake,
)
def _reference(
    images: Tensor, cell: int, bins: int, patch: int, flavour: str, norm: str, layout: str, out_dtype: torch.dtype
) -> Tensor:
    batch = images.shape[0]
    channels, height, width = _image_sizes(images, layout)
    x = images.permute(0, 3, 1, 2) if layout == "nhwc" else images
    x = x.to(torch.float64 if images.dtype == torch.float64 else torch.float32)

    g_row, g_col = torch.zeros_like(x), torch.zeros_like(x)
    g_row[..., 1:-1, :] = x[..., 2:, :] - x[..., :-2, :]
    g_col[..., 1:-1] = x[..., 2:] - x[..., :-2]
    magnitude = torch.hypot(g_row, g_col)
    angle = torch.rad2deg(torch.atan2(g_row, g_col)).remainder(180)
    index = (angle / (180 / bins)).floor()
    # A tiny negative angle is 180 after the rounding of `remainder`: the same orientation as 0.
    index = torch.where(index < bins, index, 0)

    # One masked mean per bin instead of a scatter_add: float atomics would make the order of the sums, and so the
    # target, differ from run to run on a GPU.
    rows, columns = height // cell, width // cell
    pixels = (batch, channels, rows, cell, columns, cell)
    histograms = torch.stack(
        [torch.where(index == b, magnitude, 0).reshape(pixels).mean((3, 5)) for b in range(bins)], dim=-1
    )
    histograms = _normalise(histograms, norm).to(out_dtype)

    per_patch = patch // cell
    h, w = height // patch, width // patch
    tokens = histograms.reshape(batch, channels, h, per_patch, w, per_patch, bins).permute(0, 2, 4, 3, 5, 6, 1)
    return tokens.reshape(batch, h * w, per_patch**2 * bins * channels)


def hog(
    images: Tensor,
    cell: int = 8,
    bins: int = 9,
    patch: int = 16,
    flavour: str = "dmjd",
    norm: str = "layernorm",
    layout: str = "nhwc",
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Histogram of oriented gradients of every patch; not differentiable.

    Flavour ``"dmjd"``: per channel ``[-1, 0, 1]`` differences along rows and columns, zero on the border rows and
    columns respectively; magnitude ``hypot``; orientation ``degrees(atan2(g_row, g_col)) mod 180``, hard bin
    ``floor(orientation / (180 / bins))``; mean of the magnitudes over the pixels of a cell. With ``norm="l2"`` a cell
    equals ``skimage.feature.hog(channel, bins, (cell, cell), (1, 1), "L2")`` up to that function's float32 sums.

    Args:
        images: uint8 or floating, values 0..255; ``[B, H, W, C]`` or, with ``layout="nchw"``, ``[B, C, H, W]``.
        cell: side of a cell in pixels, a divisor of ``patch``.
        bins: orientations in 180 degrees.
        patch: side of a patch in pixels, a divisor of H and W.
        flavour: one of :data:`FLAVOURS`.
        norm: over the bins of each (channel, cell): ``"none"``; ``"l2"``, ``h / sqrt(sum(h**2) + 1e-5**2)``;
            ``"layernorm"``, zero mean and unit (biased) variance with eps 1e-5, no affine (DMJD, "non-parametric LN").
        layout: one of :data:`LAYOUTS`.
        out_dtype: of the result. The arithmetic is float64 for float64 images and float32 for all others.

    Returns:
        ``[B, N, (patch // cell)**2 * bins * C]``, patches in raster order, values of a patch in the order
        (cell row, cell column, bin, channel).

    Raises:
        TypeError: if ``images`` is not uint8 or floating, or ``out_dtype`` not floating.
        ValueError: on any other shape, size or name.
    """
    if images.dtype != torch.uint8 and not images.dtype.is_floating_point:
        raise TypeError(f"hog: images must be uint8 or floating, got {images.dtype}")
    if not out_dtype.is_floating_point:
        raise TypeError(f"hog: out_dtype must be floating, got {out_dtype}")
    for name, value, allowed in (("flavour", flavour, FLAVOURS), ("norm", norm, NORMS), ("layout", layout, LAYOUTS)):
        if value not in allowed:
            raise ValueError(f"hog: {name} must be one of {', '.join(allowed)}, got {value!r}")
    if images.ndim != 4:
        axes = "[B, H, W, C]" if layout == "nhwc" else "[B, C, H, W]"
        raise ValueError(f"hog: images must be {axes} for layout {layout}, got shape {tuple(images.shape)}")
    if bins < 1:
        raise ValueError(f"hog: bins must be at least 1, got {bins}")
    if patch < 1:
        raise ValueError(f"hog: patch must be at least 1 pixel, got {patch}")
    if cell < 1 or patch % cell:
        raise ValueError(f"hog: cell must be a divisor of patch {patch}, got {cell}")
    channels, height, width = _image_sizes(images, layout)
    if height < patch or width < patch or height % patch or width % patch:
        raise ValueError(f"hog: image height and width must be multiples of patch {patch}, got {height} x {width}")
    if channels < 1:
        raise ValueError("hog: images must have at least 1 channel, got 0")
    tokens: Tensor = torch.ops.dmjd.hog(images.detach(), cell, bins, patch, flavour, norm, layout, out_dtype)
    return tokens
