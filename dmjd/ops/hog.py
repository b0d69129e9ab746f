"""Histograms of oriented gradients per image patch, the regression target of MaskFeat and DMJD.

The descriptor of a cell is that of Dalal and Triggs (CVPR'05) without blocks: gradients, hard binning of the unsigned
orientation, sums of the magnitudes of a cell's pixels per bin. Each colour channel has its own histogram. The flavours
are the conventions of the code bases that published results with it.

The bin of a gradient (rise, run), whose orientation is atan2(rise, run) in [0, 180), is found without an arc tangent:
it is the number of bin edges at or below the orientation. An edge below 90 degrees is passed when |rise| is at least
|run| times its tangent. The other half is the mirror image, in which an orientation that lies on an edge falls on its
other side, hence the strict comparison. Each product is rounded once and compared, so no fused multiply-add can change
a bin: reference and kernels agree on every float, and all are exact for the integer gradients of uint8 images.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.ops._lib import define
from dmjd.ops.arguments import choice, integer, require_tensors

Flavour = Literal["dmjd", "maskfeat", "maskfeat_gauss", "skimage"]
Norm = Literal["none", "l2", "layernorm"]
Layout = Literal["nhwc", "nchw"]

FLAVOURS: tuple[Flavour, ...] = get_args(Flavour)
"""Conventions of gradient, sum and order of values."""

NORMS: tuple[Norm, ...] = get_args(Norm)
"""Normalisations over the bins of one (channel, cell)."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
"""Axis orders of the images."""

VALUE_ORDER = {
    "dmjd": ("row", "column", "bin", "channel"),
    "maskfeat": ("channel", "bin", "row", "column"),
    "maskfeat_gauss": ("channel", "bin", "row", "column"),
    "skimage": ("channel", "row", "column", "bin"),
}
"""The axes of a patch's values, slowest first; row and column are those of a cell in its patch."""

MAX_BINS = 180
"""Greatest number of bins: one per degree."""

GAUSS_WINDOW = 16
"""Side of the window of maskfeat_gauss in pixels; the standard deviation is half of it."""

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EPS = 1e-5
_TINY_NORM = 1e-12  # eps of F.normalize in MaskFeat


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


def _tangents(bins: int) -> list[float]:
    """Tangents of the bin edges between 0 and 90 degrees, both excluded."""
    # tan(45 degrees) is the only exact one, but tan(pi / 4) is not in floating point.
    return [1.0 if 4 * k == bins else math.tan(math.pi * k / bins) for k in range(1, (bins + 1) // 2)]


def _bin(rise: Tensor, run: Tensor, bins: int) -> Tensor:
    """int32 index of the bin of atan2(rise, run) modulo 180 degrees."""
    steep, flat = rise.abs(), run.abs()
    mirrored = (run == 0) | ((rise < 0) != (run < 0))
    passed = torch.zeros_like(rise, dtype=torch.int32)
    for tangent in _tangents(bins):
        edge = flat * tangent
        passed += torch.where(mirrored, steep > edge, steep >= edge)
    return torch.where(rise == 0, 0, torch.where(mirrored, bins - 1 - passed, passed))


def _central(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rise and run: differences [-1, 0, 1] along rows and columns, 0 at the border."""
    g_row, g_col = torch.zeros_like(x), torch.zeros_like(x)
    g_row[..., 1:-1, :] = x[..., 2:, :] - x[..., :-2, :]
    g_col[..., 1:-1] = x[..., 2:] - x[..., :-2]
    return g_row, g_col


def _sobel(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rise and run: MaskFeat's Sobel filters on the reflected image, [1, 0, -1] along columns first.

    Sums are written out, since the order of their terms changes the last bit, which can change the bin.
    """
    x = F.pad(x, (1, 1, 1, 1), mode="reflect")
    above, here, below = x[..., :-2, :], x[..., 1:-1, :], x[..., 2:, :]
    smooth, difference = above + 2 * here + below, above - below
    g_col = smooth[..., :-2] - smooth[..., 2:]
    g_row = difference[..., :-2] + 2 * difference[..., 1:-1] + difference[..., 2:]
    return g_col, g_row


def _gauss_window(size: int, like: Tensor) -> Tensor:
    """``[size]`` of MaskFeat's window, with unit sum, tiled along an axis; the two-dimensional window is a product."""
    position = torch.arange(GAUSS_WINDOW, device=like.device, dtype=torch.float64) - (GAUSS_WINDOW - 1) / 2
    window = torch.exp(-0.5 * (position / (GAUSS_WINDOW // 2)).square())
    return (window / window.sum()).to(like.dtype)[torch.arange(size, device=like.device) % GAUSS_WINDOW]


def _normalise(histograms: Tensor, flavour: str, norm: str) -> Tensor:
    if norm == "l2" and flavour.startswith("maskfeat"):
        return F.normalize(histograms, dim=-1, eps=_TINY_NORM)
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

    rise, run = _sobel(x) if flavour.startswith("maskfeat") else _central(x)
    magnitude = (rise * rise + run * run).sqrt()
    if flavour == "maskfeat_gauss":
        magnitude = magnitude * (_gauss_window(height, x)[:, None] * _gauss_window(width, x))
    index = _bin(rise, run, bins)

    # One masked sum per bin instead of scatter_add, whose atomics would make the result differ between runs on a GPU.
    rows, columns = height // cell, width // cell
    pixels = (batch, channels, rows, cell, columns, cell)
    histograms = torch.stack(
        [torch.where(index == b, magnitude, 0).reshape(pixels).sum((3, 5)) for b in range(bins)], dim=-1
    )
    if not flavour.startswith("maskfeat"):
        histograms = histograms / cell**2
    histograms = _normalise(histograms, flavour, norm).to(out_dtype)

    per_patch = patch // cell
    h, w = height // patch, width // patch
    axis = {"channel": 1, "row": 3, "column": 5, "bin": 6}
    cells = histograms.reshape(batch, channels, h, per_patch, w, per_patch, bins)
    tokens = cells.permute(0, 2, 4, *(axis[name] for name in VALUE_ORDER[flavour]))
    return tokens.reshape(batch, h * w, per_patch**2 * bins * channels)


def hog(
    images: Tensor,
    cell: int = 8,
    bins: int = 9,
    patch: int = 16,
    flavour: Flavour = "dmjd",
    norm: Norm = "layernorm",
    layout: Layout = "nhwc",
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Histogram of oriented gradients of every patch; not differentiable.

    The magnitude is ``sqrt(g_row**2 + g_col**2)`` per channel; binning is hard. Flavours:

    - ``"dmjd"`` (Ma et al.'s DMJD): ``[-1, 0, 1]`` differences along rows and columns, zero on the border rows and
      columns respectively; orientation ``degrees(atan2(g_row, g_col)) mod 180``, bin ``floor(orientation / (180 /
      bins))``; mean of the magnitudes over a cell.
    - ``"skimage"``: the same values in scikit-image's order, channel by channel. With ``norm="l2"`` they equal
      ``skimage.feature.hog(channel, bins, (cell, cell), (1, 1), "L2")`` for the cells of the patch, up to that
      function's float32 sums; its other blocks and norms are not supported.
    - ``"maskfeat"`` (Wei et al., CVPR'22, SlowFast's code): Sobel on the image reflected by a pixel, orientation
      ``atan2(g_col, g_row) mod pi``, so measured from the other axis; sum of the magnitudes over a cell. MaskFeat uses
      images normalised by mean and std, and ``norm="l2"``, which is invariant to a factor and an offset per channel, so
      raw 0..255 images give the same result. They are more exact where ``g_col`` is 0: the normalised image has a
      rounding error there, whose sign selects the first or last bin.
    - ``"maskfeat_gauss"`` (MaskFeat in MMPreTrain): magnitudes are weighted by a Gaussian window of 16 pixels, standard
      deviation 8, unit sum, tiled over the image from its top left corner.

    The eps of ``"layernorm"``, and of ``"l2"`` outside MaskFeat, is absolute, so an image scaled to 0..1
    gives another target than one in 0..255.

    Args:
        images: ``[B, H, W, C]`` or, with ``layout="nchw"``, ``[B, C, H, W]``; uint8, float64, float32, float16 or
            bfloat16, of any strides.
        cell: side of a cell in pixels, a divisor of ``patch``.
        bins: orientations in 180 degrees, at most :data:`MAX_BINS`.
        patch: side of a patch in pixels, a divisor of H and W.
        flavour: one of :data:`FLAVOURS`.
        norm: over the bins of each (channel, cell): ``"none"``; ``"l2"``, ``h / sqrt(sum(h**2) + 1e-5**2)``, for
            MaskFeat ``h / max(sqrt(sum(h**2)), 1e-12)``; ``"layernorm"``, zero mean and unit (biased) variance with
            eps 1e-5, no affine (DMJD, "non-parametric LN").
        layout: one of :data:`LAYOUTS`.
        out_dtype: floating dtype of the result, one of these. The arithmetic is float64 for float64 images and float32
            for all others.

    Returns:
        ``[B, N, (patch // cell)**2 * bins * C]``, patches in raster order, the values of a patch in
        :data:`VALUE_ORDER`.

    Raises:
        TypeError: if ``images`` is not uint8 or floating, ``out_dtype`` not floating, or a size not an integer.
        ValueError: on any other shape, size or name.
    """
    require_tensors("hog", images=images)
    cell, bins, patch = (integer(f"hog: {n}", v) for n, v in (("cell", cell), ("bins", bins), ("patch", patch)))
    if images.dtype != torch.uint8 and images.dtype not in _FLOATING:
        raise TypeError(f"hog: images must be uint8 or floating, got {images.dtype}")
    if out_dtype not in _FLOATING:
        raise TypeError(f"hog: out_dtype must be floating, got {out_dtype}")
    for name, value, allowed in (("flavour", flavour, FLAVOURS), ("norm", norm, NORMS), ("layout", layout, LAYOUTS)):
        choice(f"hog: {name}", value, allowed)
    if images.ndim != 4:
        axes = "[B, H, W, C]" if layout == "nhwc" else "[B, C, H, W]"
        raise ValueError(f"hog: images must be {axes} for layout {layout}, got shape {tuple(images.shape)}")
    if bins < 1:
        raise ValueError(f"hog: bins must be at least 1, got {bins}")
    if bins > MAX_BINS:
        raise ValueError(f"hog: bins must be at most {MAX_BINS}, got {bins}")
    if patch < 1:
        raise ValueError(f"hog: patch must be at least 1 pixel, got {patch}")
    if cell < 1 or patch % cell:
        raise ValueError(f"hog: cell must be a divisor of patch {patch}, got {cell}")
    channels, height, width = _image_sizes(images, layout)
    if height < patch or width < patch or height % patch or width % patch:
        raise ValueError(f"hog: image height and width must be multiples of patch {patch}, got {height} x {width}")
    if channels < 1:
        raise ValueError("hog: images must have at least 1 channel, got 0")
    if flavour.startswith("maskfeat") and (height < 2 or width < 2):
        raise ValueError(f"hog: flavour {flavour} needs 2 x 2 pixels to reflect, got {height} x {width}")
    tokens: Tensor = torch.ops.dmjd.hog(images.detach(), cell, bins, patch, flavour, norm, layout, out_dtype)
    return tokens
