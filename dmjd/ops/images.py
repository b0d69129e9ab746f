"""Image operations on the device between the loader and the model.

Compositions of torch operators, which ``torch.compile`` fuses; none synchronises with the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmjd.ops.arguments import integer, number, pair, require_tensors, shown


def horizontal_flip(images: Tensor, flips: Tensor) -> Tensor:
    """Flip selected images left to right.

    Args:
        images: any dtype, ``[B, H, W, C]``.
        flips: bool ``[B]`` on the same device, true for images to flip.

    Returns:
        A new tensor of ``images``' shape and dtype.

    Raises:
        TypeError: if ``flips`` is not bool. ValueError: on any other shape or device.
    """
    require_tensors("horizontal_flip", images=images, flips=flips)
    if flips.dtype != torch.bool:
        raise TypeError(f"horizontal_flip: flips must be bool, got {flips.dtype}")
    if images.ndim != 4 or flips.shape != images.shape[:1]:
        raise ValueError(
            "horizontal_flip: images must be [B, H, W, C] and flips [B], "
            f"got {tuple(images.shape)} and {tuple(flips.shape)}"
        )
    if flips.device != images.device:
        raise ValueError(f"horizontal_flip: flips must be on images' device {images.device}, got {flips.device}")
    # torch.where over both versions: indexing with `flips` would synchronise with the host.
    return torch.where(flips[:, None, None, None], images.flip(2), images)


def _per_channel(values: Sequence[float], like: Tensor) -> Tensor:
    """``[C, 1, 1]``, filled on the device: copying a list from the host would synchronise every step."""
    return torch.stack([like.new_full((1, 1), value) for value in values])


def _numbers(name: str, values: Any) -> list[float]:
    if isinstance(values, Tensor) and not values.is_meta:
        values = values.tolist()
    is_sequence = hasattr(values, "__getitem__") and not isinstance(values, (str, bytes, dict, Tensor))
    if not is_sequence or getattr(values, "ndim", 1) == 0:
        raise TypeError(f"normalise: {name} must be a sequence of numbers, one for each channel, got {shown(values)}")
    numbers = [number(f"normalise: {name}", value) for value in values]
    if not all(-math.inf < value < math.inf for value in numbers):
        raise ValueError(f"normalise: {name} must be finite, got {tuple(numbers)}")
    return numbers


def normalise(
    images: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
) -> Tensor:
    """``(images / 255 - mean) / std`` per channel, channels first.

    Args:
        images: uint8 ``[B, H, W, C]``.
        mean: C numbers on the 0..1 scale.
        std: C positive numbers on the 0..1 scale.
        dtype: floating; the arithmetic is float32 (float64 if asked) and rounded once.

    Returns:
        ``[B, C, H, W]`` of ``dtype`` in the memory order of ``images`` (channels last).

    Raises:
        TypeError: if ``images`` is not uint8 or ``dtype`` not floating. ValueError: on any other shape or count.
    """
    require_tensors("normalise", images=images)
    if images.dtype != torch.uint8:
        raise TypeError(f"normalise: images must be uint8, got {images.dtype}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"normalise: dtype must be floating, got {dtype}")
    if images.ndim != 4:
        raise ValueError(f"normalise: images must be [B, H, W, C], got shape {tuple(images.shape)}")
    mean, std = _numbers("mean", mean), _numbers("std", std)
    channels = images.shape[3]
    if channels < 1:
        raise ValueError("normalise: images must have at least 1 channel, got 0")
    if len(mean) != channels or len(std) != channels:
        raise ValueError(
            f"normalise: mean and std must have one value for each of the {channels} channels, "
            f"got {len(mean)} and {len(std)}"
        )
    if any(value <= 0 for value in std):
        raise ValueError(f"normalise: std must be positive, got {tuple(std)}")
    # Contiguous: under channels_last the gradient of the patch convolution has other strides than its weight, and DDP
    # copies it and warns.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = images.permute(0, 3, 1, 2).to(wide, memory_format=torch.contiguous_format)
    return ((x / 255 - _per_channel(mean, x)) / _per_channel(std, x)).to(dtype)


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images into patches in raster order, the layout of MAE's pixel target.

    Args:
        images: any dtype, ``[B, C, H, W]``.
        patch: side of a patch in pixels, a divisor of H and W.

    Returns:
        ``[B, N, patch * patch * C]``, values of a patch in the order (row, column, channel).

    Raises:
        ValueError: on any other shape, or if ``patch`` does not divide it.
    """
    require_tensors("patchify", images=images)
    patch = integer("patchify: patch", patch)
    if images.ndim != 4:
        raise ValueError(f"patchify: images must be [B, C, H, W], got shape {tuple(images.shape)}")
    batch, channels, height, width = images.shape
    if patch < 1 or height % patch or width % patch:
        raise ValueError(f"patchify: patch must divide image height and width {height} x {width}, got {patch}")
    h, w = height // patch, width // patch
    pixels = images.reshape(batch, channels, h, patch, w, patch).permute(0, 2, 4, 3, 5, 1)
    return pixels.reshape(batch, h * w, patch * patch * channels)


def unpatchify(tokens: Tensor, grid: tuple[int, int] | int, patch: int) -> Tensor:
    """The inverse of :func:`patchify`.

    Args:
        tokens: any dtype, ``[B, h * w, patch * patch * C]``.
        grid: (h, w), patches per column and per row, or one number for both.
        patch: side of a patch in pixels.

    Returns:
        ``[B, C, h * patch, w * patch]``.

    Raises:
        ValueError: if ``tokens`` is not of that shape.
    """
    require_tensors("unpatchify", tokens=tokens)
    h, w = pair("unpatchify: grid", grid)
    patch = integer("unpatchify: patch", patch)
    if h < 0 or w < 0:
        raise ValueError(f"unpatchify: grid must hold 0 or more patches each way, got {(h, w)}")
    if tokens.ndim != 3 or tokens.shape[1] != h * w:
        raise ValueError(f"unpatchify: tokens must be [B, {h * w}, dim] for grid {h} x {w}, got {tuple(tokens.shape)}")
    if patch < 1 or tokens.shape[2] % (patch * patch):
        raise ValueError(f"unpatchify: patch * patch must divide the token size {tokens.shape[2]}, got patch {patch}")
    batch, channels = tokens.shape[0], tokens.shape[2] // (patch * patch)
    pixels = tokens.reshape(batch, h, w, patch, patch, channels).permute(0, 5, 1, 3, 2, 4)
    return pixels.reshape(batch, channels, h * patch, w * patch)
