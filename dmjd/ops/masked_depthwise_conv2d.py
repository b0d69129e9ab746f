"""Depthwise convolution of a masked map, computed on its visible tokens only.

ConvMAE's first two stages (Gao et al., 2022, section 3.2) convolve a map whose masked tokens are set to zero, so that
nothing leaks from masked to visible tokens. All other layers of these stages are pointwise and the mask is aligned to
tokens, so an encoder that keeps only the pixels of visible tokens, with this op as its convolution, computes the same
function.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.ops._lib import define, without_autocast
from dmjd.ops.arguments import integer, pair, require_tensors

KERNEL_SIZES = (3, 5, 7)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NAME = "masked_depthwise_conv2d"


def _to_map(x: Tensor, visible: Tensor, grid_h: int, grid_w: int, q: int) -> Tensor:
    """Visible tokens ``[R, V, q*q, C]`` on the pixel map ``[R, C, grid_h*q, grid_w*q]``, zero where masked."""
    rows, _, pixels, channels = x.shape
    tokens = x.new_zeros(rows, grid_h * grid_w, pixels, channels).scatter(1, _index(visible, x), x)
    blocks = tokens.view(rows, grid_h, grid_w, q, q, channels)
    return blocks.permute(0, 5, 1, 3, 2, 4).reshape(rows, channels, grid_h * q, grid_w * q)


def _from_map(pixel_map: Tensor, visible: Tensor, like: Tensor, grid_h: int, grid_w: int, q: int) -> Tensor:
    """The inverse of :func:`_to_map` at visible tokens, in the shape and dtype of ``like``."""
    rows, channels = pixel_map.shape[:2]
    blocks = pixel_map.view(rows, channels, grid_h, q, grid_w, q).permute(0, 2, 4, 3, 5, 1)
    tokens = blocks.reshape(rows, grid_h * grid_w, q * q, channels)
    return tokens.gather(1, _index(visible, like)).to(like.dtype)


def _index(visible: Tensor, x: Tensor) -> Tensor:
    return visible[:, :, None, None].expand(x.shape)


def _fake_backward(
    grad: Tensor, x: Tensor, visible: Tensor, restore: Tensor, weight: Tensor, grid_h: int, grid_w: int, q: int
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0])


@define(
    f"{_NAME}_backward(Tensor grad, Tensor x, Tensor visible, Tensor restore, Tensor weight, SymInt grid_h, "
    "SymInt grid_w, SymInt q) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    differentiable=True,
)
def _reference_backward(
    grad: Tensor, x: Tensor, visible: Tensor, restore: Tensor, weight: Tensor, grid_h: int, grid_w: int, q: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    channels, size = weight.shape[:2]
    grad_map, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        _to_map(grad.to(weight.dtype), visible, grid_h, grid_w, q),
        _to_map(x.to(weight.dtype), visible, grid_h, grid_w, q),
        weight.unsqueeze(1),
        [channels],
        stride=[1, 1],
        padding=[size // 2, size // 2],
        dilation=[1, 1],
        transposed=False,
        output_padding=[0, 0],
        groups=channels,
        output_mask=[True, True, True],
    )
    return _from_map(grad_map, visible, x, grid_h, grid_w, q), grad_weight.squeeze(1), grad_bias


def _fake(
    x: Tensor,
    visible: Tensor,
    restore: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid_h: int,
    grid_w: int,
    q: int,
) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, visible, restore, weight, bias, *ctx.layout = inputs
    ctx.save_for_backward(x, visible, restore, weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight, grad_bias = torch.ops.dmjd.masked_depthwise_conv2d_backward(
        grad, *ctx.saved_tensors, *ctx.layout
    )
    return grad_x, None, None, grad_weight, grad_bias if ctx.has_bias else None, None, None, None


# visible and restore have the same information. The reference needs only visible; a kernel, which looks up the
# neighbours of a token, needs restore.
@define(
    f"{_NAME}(Tensor x, Tensor visible, Tensor restore, Tensor weight, Tensor? bias, SymInt grid_h, SymInt grid_w, "
    "SymInt q) -> Tensor",
    fake=_fake,
    autograd=(_setup_context, _backward),
)
def _reference(
    x: Tensor,
    visible: Tensor,
    restore: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid_h: int,
    grid_w: int,
    q: int,
) -> Tensor:
    channels, size = weight.shape[:2]
    pixel_map = _to_map(x.to(weight.dtype), visible, grid_h, grid_w, q)
    with without_autocast(x.device.type):  # autocast would round the weight
        result = F.conv2d(pixel_map, weight.unsqueeze(1), bias, padding=size // 2, groups=channels)
    return _from_map(result, visible, x, grid_h, grid_w, q)


def masked_depthwise_conv2d(
    x: Tensor,
    visible: Tensor,
    restore: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid: tuple[int, int] | int,
    q: int,
) -> Tensor:
    """Depthwise convolution of a map whose masked tokens are zero, at the pixels of its visible tokens.

    The map has ``grid[0] * q`` by ``grid[1] * q`` pixels; each token is a block of ``q`` by ``q``. The result and the
    gradients of ``x``, ``weight`` and ``bias`` equal those of ``F.conv2d(map, weight[:, None], bias, padding=k // 2,
    groups=C)`` at the visible tokens, but the kernels do not materialise the map.

    Sums are float32 (float64 for float64), and so are ``weight`` and ``bias`` inside, whatever their own dtype: under
    autocast, float32 parameters and their gradients are not rounded to ``x``'s dtype. The kernels are bitwise
    deterministic on one device. torch.func, forward mode and second derivatives use the dense convolution.

    Args:
        x: ``[K*B, V, q*q, C]``, view-major; the pixels of each visible token in raster order. float32, bfloat16,
            float16 or float64.
        visible: int64 ``[K, B, V]``, token ids of ``x``'s second dimension, unique within a view (``Views.visible``).
        restore: int64 ``[K, B, N]``, token -> slot of ``x``; slots >= V are masked (``Views.restore``);
            N tokens in raster order.
        weight: ``[C, k, k]`` with k of 3, 5 or 7; ``conv.weight.squeeze(1)`` of an ``nn.Conv2d`` with groups=C.
        bias: ``[C]``, or None.
        grid: tokens (down, across), or one number for both.
        q: pixels along a token's edge.

    Returns:
        ``x``'s shape and dtype.

    Raises:
        TypeError: if a dtype is not one of these, or an argument has another type.
        ValueError: if shapes do not match, or tensors are on different devices.
    """
    require_tensors(_NAME, x=x, visible=visible, restore=restore, weight=weight)
    if bias is not None:
        require_tensors(_NAME, bias=bias)
    grid_h, grid_w = pair(f"{_NAME}: grid", grid)
    q = integer(f"{_NAME}: q", q)
    if x.dtype not in _DTYPES or not weight.is_floating_point() or not (bias is None or bias.is_floating_point()):
        raise TypeError(
            f"{_NAME}: x must be float32, bfloat16, float16 or float64 and weight and bias floating point, "
            f"got {x.dtype}, {weight.dtype} and {None if bias is None else bias.dtype}"
        )
    if visible.dtype != torch.int64 or restore.dtype != torch.int64:
        raise TypeError(f"{_NAME}: visible and restore must be int64, got {visible.dtype} and {restore.dtype}")
    if visible.ndim != 3 or restore.ndim != 3 or visible.shape[:2] != restore.shape[:2]:
        raise ValueError(
            f"{_NAME}: visible must be [K, B, V] and restore [K, B, N], "
            f"got {tuple(visible.shape)} and {tuple(restore.shape)}"
        )
    if grid_h < 1 or grid_w < 1 or q < 1 or restore.shape[2] != grid_h * grid_w:
        raise ValueError(
            f"{_NAME}: grid must be (h, w) with h * w = N tokens and q at least 1, got grid {(grid_h, grid_w)}, "
            f"q {q} and restore {tuple(restore.shape)}"
        )
    views, batch, count = visible.shape
    if x.ndim != 4 or x.shape[0] != views * batch or x.shape[1] != count or x.shape[2] != q * q or x.shape[3] < 1:
        raise ValueError(
            f"{_NAME}: x must be [K*B, V, q*q, C], got {tuple(x.shape)} with visible {tuple(visible.shape)} and q {q}"
        )
    channels = x.shape[3]
    if weight.ndim != 3 or weight.shape[0] != channels or weight.shape[1] != weight.shape[2]:
        raise ValueError(f"{_NAME}: weight must be [C, k, k] with C = {channels}, got {tuple(weight.shape)}")
    if weight.shape[1] not in KERNEL_SIZES:
        raise ValueError(f"{_NAME}: weight must have k in {KERNEL_SIZES}, got {tuple(weight.shape)}")
    if bias is not None and (bias.ndim != 1 or bias.shape[0] != channels):
        raise ValueError(f"{_NAME}: bias must be [C] with C = {channels}, got {tuple(bias.shape)}")
    named = {"x": x, "visible": visible, "restore": restore, "weight": weight, "bias": bias}
    devices = {name: tensor.device for name, tensor in named.items() if tensor is not None}
    if len(set(devices.values())) != 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{_NAME}: all tensors must be on one device, got {places}")
    summed = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.ops.dmjd.masked_depthwise_conv2d(
        x,
        visible.flatten(0, 1),
        restore.flatten(0, 1),
        weight.to(summed),
        None if bias is None else bias.to(summed),
        grid_h,
        grid_w,
        q,
    )
