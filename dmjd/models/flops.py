"""Model FLOPs of a step: what the mathematics needs, counted op by op. Multiplication and addition are two."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dmjd.models.objective import Trainable

Shape = tuple[int, ...]


def _depthwise(x: Shape, visible: Shape, restore: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """A multiplication and an addition for each tap; taps on masked tokens count, as those on a zero border do."""
    return 2 * math.prod(x) * math.prod(weight[1:])


def _depthwise_backward(
    grad: Shape, x: Shape, visible: Shape, restore: Shape, weight: Shape, *_: Any, **__: Any
) -> int:
    """The gradients of input and weight each take what the output took."""
    return 2 * 2 * math.prod(x) * math.prod(weight[1:])


FORMULAS = {
    torch.ops.dmjd.masked_depthwise_conv2d: _depthwise,
    torch.ops.dmjd.masked_depthwise_conv2d_backward: _depthwise_backward,
}
"""Of our ops that a model multiplies in; the others move tokens, or make masks and targets outside the model."""


def count_flops(objective: Trainable, inputs: tuple[Any, ...]) -> int:
    """FLOPs of one forward and backward pass of ``objective(*inputs).total``: matrix products, convolutions, attention.

    On tensors of the "meta" device nothing is computed. The objective must not be transformed: what activation
    checkpointing computes again, and what a fused attention does in its backward pass, are no model FLOPs.
    """
    # The products of attention written out, since a fused kernel is counted with the scores that it recomputes.
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter, sdpa_kernel(SDPBackend.MATH):
        objective(*inputs).total.backward()
    for parameter in objective.parameters():
        parameter.grad = None
    return int(counter.get_total_flops())
