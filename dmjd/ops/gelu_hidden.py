"""The hidden layer of a GELU MLP and its gradient, with kernels for Hopper; used by :mod:`dmjd.ops.gelu_mlp`.

The native kernels need compute capability 9.0; :func:`served` returns whether they support a call.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.ops import _native
from dmjd.ops._lib import define

TILE_HIDDEN, TILE_INPUT = 256, 64
"""Widths must be multiples of these, as in csrc/ops/hopper/gelu_hidden.cuh."""

ROWS_PER_SUM = 64


def served(x: Tensor, hidden: int, *depths: int) -> bool:
    """Whether the native kernels support ``x [M, C]``: Hopper, half precision, at least one row, whole tiles."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and min(x.shape[0], hidden, *depths) > 0
        and hidden % TILE_HIDDEN == 0
        and all(depth % TILE_INPUT == 0 for depth in depths)
        and _on_hopper(x.device)
        and _native.why_missing("HOPPER") is None
    )


def dense(tensor: Tensor) -> Tensor:
    """``tensor`` as the copy engine needs it: contiguous and aligned to 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@cache
def _on_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _fake_hidden(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@define(
    "gelu_hidden(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    fake=_fake_hidden,
    differentiable=True,
    library="HOPPER",
)
def _reference_hidden(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x @ weight.T + bias)``, contiguous ``[M, C]``, ``[H, C]`` and ``[H]`` -> ``[M, H]``."""
    return F.gelu(F.linear(x, weight, bias))


def _fake_gradient(
    x: Tensor, weight1: Tensor, bias1: Tensor, grad: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = x.new_empty(x.shape[0], weight1.shape[0])
    sums = (x.shape[0] + ROWS_PER_SUM - 1) // ROWS_PER_SUM
    return hidden, torch.empty_like(hidden), x.new_empty(sums, weight1.shape[0], dtype=torch.float32)


@define(
    "gelu_hidden_gradient(Tensor x, Tensor weight1, Tensor bias1, Tensor grad, Tensor weight2) "
    "-> (Tensor, Tensor, Tensor)",
    fake=_fake_gradient,
    differentiable=True,
    library="HOPPER",
)
def _reference_gradient(
    x: Tensor, weight1: Tensor, bias1: Tensor, grad: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the hidden layer from ``grad [M, D]`` and ``weight2 [D, H]``, the hidden layer, both ``[M, H]``,
    and the sums of the gradient over 64 rows each, float32 ``[ceil(M / 64), H]``."""
    before = F.linear(x, weight1, bias1)
    grad_hidden = torch.ops.aten.gelu_backward(grad @ weight2, before)
    padded = F.pad(grad_hidden.float(), (0, 0, 0, -x.shape[0] % ROWS_PER_SUM))
    return grad_hidden, F.gelu(before), padded.view(-1, ROWS_PER_SUM, padded.shape[1]).sum(1)
