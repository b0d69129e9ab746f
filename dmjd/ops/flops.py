"""FLOP formulas of the ops for :class:`torch.utils.flop_counter.FlopCounterMode`, equal to those of the references.

Importing torch's counter imports triton, so the formulas are registered when another module imports it.
"""

from __future__ import annotations

import math
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"

Shape = tuple[int, ...]


def gelu_mlp(x: Shape, weight1: Shape, bias1: Shape, weight2: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of two matrix products."""
    (hidden, inputs), outputs = weight1, weight2[0]
    return 2 * math.prod(x[:-1]) * hidden * (inputs + outputs)


def gelu_mlp_backward(grad: Shape, x: Shape, weight1: Shape, bias1: Shape, weight2: Shape, **_: Any) -> int:
    """FLOPs of five products: the recomputed hidden layer, its gradient, and those of x and both weights."""
    (hidden, inputs), outputs = weight1, weight2[0]
    return 2 * math.prod(x[:-1]) * hidden * (3 * inputs + 2 * outputs)


def short_attention(q: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of two products over all pairs of tokens; ``q [B, N, H, D]``."""
    batch, tokens, heads, depth = q
    return 4 * batch * heads * tokens**2 * depth


def short_attention_packed(qkv: Shape, *_: Any, **__: Any) -> int:
    """As :func:`short_attention`; ``qkv [B, N, 3, H, D]``."""
    return short_attention((*qkv[:2], *qkv[3:]))


def short_attention_backward(grad: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of five products: the recomputed scores, the gradient of the probabilities, and those of q, k and v."""
    return short_attention(grad) * 5 // 2


def _dense(x: Shape, weight: Shape, grid_h: int, grid_w: int, q: int) -> tuple[Shape, Shape]:
    """Shapes of the whole map and of the filter."""
    channels, size, _ = weight
    return (x[0], channels, grid_h * q, grid_w * q), (channels, 1, size, size)


def _register(counter: ModuleType) -> None:
    ops, registry = torch.ops.dmjd, counter.flop_registry

    def convolution(x: Shape, visible: Shape, restore: Shape, weight: Shape, bias: Any, *layout: int, **_: Any) -> int:
        pixels, taps = _dense(x, weight, *layout)
        formula = registry[torch.ops.aten.convolution]
        return int(formula(pixels, taps, None, None, None, None, False, out_val=pixels))

    def convolution_backward(
        grad: Shape, x: Shape, visible: Shape, restore: Shape, weight: Shape, *layout: int, **_: Any
    ) -> int:
        pixels, taps = _dense(x, weight, *layout)
        formula = registry[torch.ops.aten.convolution_backward]
        nothing = (None,) * 4
        masks, out = [True] * 3, (pixels, taps, weight[:1])
        return int(formula(pixels, pixels, taps, *nothing, False, None, weight[0], masks, out_val=out))

    for op, formula in (
        (ops.gelu_mlp, gelu_mlp),
        (ops.gelu_mlp_backward, gelu_mlp_backward),
        (ops.short_attention, short_attention),
        (ops.short_attention_packed, short_attention_packed),
        (ops.short_attention_backward, short_attention_backward),
        (ops.masked_depthwise_conv2d, convolution),
        (ops.masked_depthwise_conv2d_backward, convolution_backward),
    ):
        counter.register_flop_formula(op)(formula)


class _OnImport(MetaPathFinder):
    """Import hook that registers the formulas when torch's counter is imported, and then removes itself."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Add the formulas to torch's counter, now or when it is imported. Call once, after the ops are defined."""
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _OnImport())
