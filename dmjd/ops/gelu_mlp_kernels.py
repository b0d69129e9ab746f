"""Triton kernels of :mod:`dmjd.ops.gelu_mlp`: matrix products fused with GELU and its gradient.

Each thread block computes a tile of the hidden layer. Hidden layers are wide and their inputs narrow, so a product
spends much of its time writing its result; the backward kernel therefore recomputes the hidden layer instead of reading
it. erfc is Abramowitz and Stegun's 7.1.26: its error of 1.5e-7 is far below the rounding of half precision, and it
shares its exponential with GELU's derivative.
"""
# No `from __future__ import annotations`: Triton reads `tl.constexpr` from annotations.

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS, BLOCK_HIDDEN, BLOCK_INPUT = 128, 128, 64
"""A tile of the hidden layer and the depth of one step of its product: the fastest of 7 on an H100."""

_LAUNCH = {"num_warps": 8, "num_stages": 3}


@triton.jit
def _erfc_and_exp(h):  # type: ignore[no-untyped-def]
    """``erfc(|h| / sqrt 2)`` and ``exp(-h^2 / 2)``."""
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(h))
    exp = tl.exp2(h * h * -0.7213475204444817)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return series * exp, exp


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    a, b, rows, columns, depth: tl.constexpr, column_stride, depth_stride, block_depth: tl.constexpr
):
    """``a[rows] @ b[:, columns]`` in float32, ``a`` with rows of ``depth`` values."""
    step = tl.arange(0, block_depth)
    left = a + rows[:, None] * depth + step[None, :]
    right = b + columns[None, :] * column_stride + step[:, None] * depth_stride
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for _ in range(0, depth, block_depth):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += block_depth
        right += block_depth * depth_stride
    return total


@triton.jit
def _hidden_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, hidden, count, width, depth: tl.constexpr,
    block_rows: tl.constexpr, block_hidden: tl.constexpr, block_depth: tl.constexpr,
):  # fmt: skip
    tiles = width // block_hidden
    tile = tl.program_id(0)
    row = tile // tiles * block_rows + tl.arange(0, block_rows)
    column = tile % tiles * block_hidden + tl.arange(0, block_hidden)
    inside = row < count
    row = tl.minimum(row, count - 1).to(tl.int64)
    h = _product(x, weight, row, column, depth, depth, 1, block_depth)
    h += tl.load(bias + column).to(tl.float32)[None, :]
    erfc, _ = _erfc_and_exp(h)
    half = 0.5 * h * erfc
    value = tl.where(h > 0, h - half, half)
    at = hidden + row[:, None] * width + column[None, :]
    tl.store(at, value.to(hidden.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    x, weight1, bias1, grad, weight2, grad_hidden, hidden, partials, count, width,
    depth: tl.constexpr, grad_depth: tl.constexpr,
    block_rows: tl.constexpr, block_hidden: tl.constexpr, block_depth: tl.constexpr,
):  # fmt: skip
    tiles = width // block_hidden
    tile = tl.program_id(0)
    row = tile // tiles * block_rows + tl.arange(0, block_rows)
    column = tile % tiles * block_hidden + tl.arange(0, block_hidden)
    inside = (row < count)[:, None]
    row = tl.minimum(row, count - 1).to(tl.int64)
    h = _product(x, weight1, row, column, depth, depth, 1, block_depth)
    slope = _product(grad, weight2, row, column, grad_depth, 1, width, block_depth)
    h += tl.load(bias1 + column).to(tl.float32)[None, :]
    erfc, exp = _erfc_and_exp(h)
    below = tl.where(h > 0, 1 - 0.5 * erfc, 0.5 * erfc)
    slope = tl.where(inside, slope * (below + h * exp * 0.3989422804014327), 0.0)
    at = row[:, None] * width + column[None, :]
    tl.store(hidden + at, (h * below).to(hidden.dtype.element_ty), mask=inside)
    tl.store(grad_hidden + at, slope.to(grad_hidden.dtype.element_ty), mask=inside)
    # One sum per tile, added in a fixed order later: atomics would round in another order each time.
    tl.store(partials + (tile // tiles).to(tl.int64) * width + column, tl.sum(slope, axis=0))


def fits(x: Tensor, hidden: int, *depths: int) -> bool:
    """Whether the kernels support ``x [M, C]``: half precision, at least one row, sizes of whole tiles."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[0] > 0
        and hidden % BLOCK_HIDDEN == 0
        and all(depth % BLOCK_INPUT == 0 for depth in depths)
    )


def hidden_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x @ weight.T + bias)``, contiguous ``[M, C]``, ``[H, C]`` and ``[H]`` -> ``[M, H]``."""
    (count, depth), width = x.shape, weight.shape[0]
    hidden = x.new_empty(count, width)
    with torch.cuda.device_of(x):
        _hidden_kernel[_grid(count, width)](
            x, weight, bias, hidden, count, width, depth, BLOCK_ROWS, BLOCK_HIDDEN, BLOCK_INPUT, **_LAUNCH
        )
    return hidden


def hidden_gradient(
    x: Tensor, weight1: Tensor, bias1: Tensor, grad: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the hidden layer from ``grad [M, D]`` and ``weight2 [D, H]``, the hidden layer, both ``[M, H]``,
    and the sums of the gradient over 128 rows each, in float32."""
    (count, depth), width = x.shape, weight1.shape[0]
    grad_hidden, hidden = x.new_empty(count, width), x.new_empty(count, width)
    partials = x.new_empty(triton.cdiv(count, BLOCK_ROWS), width, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _gradient_kernel[_grid(count, width)](
            x, weight1, bias1, grad, weight2, grad_hidden, hidden, partials, count, width, depth, grad.shape[1],
            BLOCK_ROWS, BLOCK_HIDDEN, BLOCK_INPUT, **_LAUNCH,
        )  # fmt: skip
    return grad_hidden, hidden, partials


def _grid(count: int, width: int) -> tuple[int]:
    # Tiles of one row are computed together, so their input rows are read from L2.
    return (triton.cdiv(count, BLOCK_ROWS) * (width // BLOCK_HIDDEN),)
