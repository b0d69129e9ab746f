"""Bilinear interpolation whose backward pass is two matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def upsample(x: Tensor, size: Sequence[int]) -> Tensor:
    """``F.interpolate(x, size, mode="bilinear", align_corners=False)`` of ``[B, C, h, w]``.

    PyTorch's CUDA kernel for the gradient adds with atomics: the many pixels of a map at the images' resolution that
    one input pixel reaches wait for each other, and are added in no fixed order. Interpolation is linear and separable,
    so the gradient is the product with the transposed weights of rows and of columns. Compiled code has PyTorch's
    kernel: torch.compile does not restore autocast after a backward pass that it traces.
    """
    # In a count of FLOPs these products are none of the model's.
    if x.is_meta or not x.requires_grad or torch.compiler.is_compiling():
        return F.interpolate(x, list(size), mode="bilinear", align_corners=False)
    result: Tensor = _Upsampled.apply(x, size)
    return result


class _Upsampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: Sequence[int]) -> Tensor:
        ctx.size = x.shape[-2:]
        return F.interpolate(x, list(size), mode="bilinear", align_corners=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows, columns = (_weights(n, length, grad) for n, length in zip(ctx.size, grad.shape[-2:], strict=True))
        with torch.autocast(grad.device.type, enabled=False):
            if grad.is_contiguous():
                return rows @ (grad @ columns.T), None
            batch, channels, height, width = grad.shape
            x = rows @ grad.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
            x = columns @ x.view(batch * len(rows), width, channels)
            return x.view(batch, len(rows), len(columns), channels).permute(0, 3, 1, 2), None


def _weights(size: int, length: int, like: Tensor) -> Tensor:
    """``[size, length]``: how much of each input there is in each output."""
    unit = torch.eye(size, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device).unsqueeze(0)
    return F.interpolate(unit, length, mode="linear", align_corners=False)[0].to(like.dtype)
