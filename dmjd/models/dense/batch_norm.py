"""Batch normalisation over the images of all processes (SyncBN), on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` whose training statistics are those of a micro-batch on all processes, in float32.

    Parameters and buffers have torch's names. One value for each channel is normalised to 0.

    Attributes:
        reduce: sums a tensor (float64 or float32) over the processes; None for one process. Every process calls it
            equally often.
    """

    reduce: Callable[[Tensor], Tensor] | None = None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, h, w]`` of any floating type; the same type comes back."""
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        y, mean, variance, count = _Normalised.apply(x, self.weight, self.bias, self.eps, self.reduce)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            assert self.momentum is not None
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        return y


class _Normalised(torch.autograd.Function):
    """Saves its input, and no copy of it in float32. Of one process these are PyTorch's kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        reduce: Callable[[Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels, wide = x.shape[1], weight.dtype
        count = weight.new_full((1,), x.numel() // channels)
        if reduce is None:
            y, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
            mean, inverse = mean.to(wide), inverse.to(wide)  # they are, but not as fake tensors of the CPU
            variance = inverse.pow(-2) - eps
        else:
            variance, mean = torch.var_mean(x.to(wide), (0, 2, 3), correction=0)
            own = mean.double(), variance.double()  # the difference of squares below cancels in float32
            moments = torch.cat((own[0], own[1] + own[0].square(), torch.ones_like(own[0][:1])))
            sums = reduce(moments * count)
            moments = sums[:-1] / sums[-1:]
            mean, square, count = moments[:channels], moments[channels:], sums[-1:].to(wide)
            mean, variance = mean.to(wide), (square - mean.square()).to(wide)
            y = F.batch_norm(x, mean, variance, weight, bias, eps=eps)
            inverse = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.reduce, ctx.eps = reduce, eps
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        wanted = [ctx.reduce is None, True, True]
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, None, None, mean, inverse, True, ctx.eps, wanted
        )
        if ctx.reduce is not None:
            sums = ctx.reduce(torch.cat((grad_bias, grad_weight)))
            of_mean, of_deviation = (part / count for part in sums.chunk(2))
            # weight * inverse * (grad - of_mean - (x - mean) * inverse * of_deviation), in few passes over memory
            slope = weight * inverse
            tilt = -slope * inverse * of_deviation
            grad_x = torch.addcmul(_map(-slope * of_mean - tilt * mean), x, _map(tilt))
            grad_x = grad_x.addcmul_(grad, _map(slope)).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None


def _map(channels: Tensor) -> Tensor:
    """``[C]`` -> ``[C, 1, 1]``."""
    return channels.view(-1, 1, 1)


def with_batch_norm(module: nn.Module) -> nn.Module:
    """Replace every ``nn.BatchNorm2d`` in ``module`` by :class:`BatchNorm2d`, in place; parameters stay."""
    for part in module.modules():
        if type(part) is nn.BatchNorm2d:
            part.__class__ = BatchNorm2d
    return module
