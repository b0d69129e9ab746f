"""The MLP of a block over the last axis, and recomputation of its hidden layer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.models.recompute import recompute
from dmjd.ops.gelu_mlp import gelu_mlp


class Pointwise(nn.Conv2d):
    """A 1 x 1 convolution over the last axis, with a convolution's parameters and initialisation."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., C] -> [..., D]``."""
        return F.linear(x, self.weight.flatten(1), self.bias)


class PointwiseMlp(nn.Module):
    """``[..., C] -> [..., C]`` through one hidden layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Pointwise(dim, hidden)
        self.fc2 = Pointwise(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class Gelu(nn.GELU):
    """:func:`gelu` as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)


def gelu(x: Tensor) -> Tensor:
    """The exact GELU; of half precision under torch.compile on CUDA as :func:`value_and_slope` computes it.

    inductor's kernels of ``F.gelu`` are bound by the instructions of erf, not by memory.
    """
    if torch.compiler.is_compiling() and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        compiled: Tensor = ShortGelu.apply(x)
        return compiled
    return F.gelu(x)


class ShortGelu(torch.autograd.Function):
    """GELU by :func:`value_and_slope`, in float32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return value_and_slope(x.float())[0].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad.float() * value_and_slope(x.float())[1]).to(x.dtype)


def value_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """The exact GELU of float32 values, and its derivative, with errors below 5e-7.

    erfc is 7.1.26 of Abramowitz and Stegun (1964), which shares its exponential with the derivative, as in the kernels
    of :func:`~dmjd.ops.gelu_mlp.gelu_mlp`.
    """
    t = (0.3275911 * 0.5**0.5 * x.abs() + 1).rsqrt().square()  # a reciprocal in two instructions
    exponential = torch.exp2(-0.72134752 * x.square())
    series = 0.5 * 1.061405429 * t - 0.5 * 1.453152027
    for coefficient in (1.421413741, -0.284496736, 0.254829592):
        series = series * t + 0.5 * coefficient
    tail = series * t * exponential
    below = torch.where(x > 0, 1 - tail, tail)
    return x * below, 0.39894228 * x * exponential + below


def recompute_hidden(mlp: nn.Module) -> None:
    """Make ``mlp`` keep only its input for the backward pass. Parameter names do not change.

    Two layers with an exact GELU between them go through :func:`~dmjd.ops.gelu_mlp.gelu_mlp`, whose kernels recompute
    at no cost on CUDA; anything else is checkpointed. As in :func:`~dmjd.models.recompute.recompute`, the module gets a
    subclass of its class.
    """
    if _is_plain(mlp):
        mlp.__class__ = _forgetting(type(mlp))  # type: ignore[arg-type]  # classes hash
    else:
        recompute(mlp)


def _is_plain(mlp: nn.Module) -> bool:
    if type(mlp) is PointwiseMlp:
        return True
    return (
        type(mlp) is Mlp
        and type(mlp.act) in (nn.GELU, Gelu)
        and mlp.act.approximate == "none"
        and type(mlp.norm) is nn.Identity
        and mlp.drop1.p == mlp.drop2.p == 0
        and all(type(layer) is nn.Linear and layer.bias is not None for layer in (mlp.fc1, mlp.fc2))
    )


@cache
def _forgetting(kind: type[nn.Module]) -> type[nn.Module]:
    class Forgetting(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            # flatten: of a convolution's weight; a linear layer's does not change.
            return gelu_mlp(x, self.fc1.weight.flatten(1), self.fc1.bias, self.fc2.weight.flatten(1), self.fc2.bias)

    return Forgetting
