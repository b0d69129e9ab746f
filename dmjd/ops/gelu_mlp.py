"""A two-layer GELU MLP that saves only its input for the backward pass.

The hidden layer is 4 to 8 times as wide as input and output: most of the saved memory of a transformer block, and most
of the memory traffic of the MLP. On CUDA, in half precision, GELU and its gradient are fused into the matrix products
(:mod:`dmjd.ops.gelu_hidden` on Hopper, :mod:`dmjd.ops.gelu_mlp_kernels` elsewhere), where recomputing the hidden layer
costs no more than reading it back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.ops import gelu_hidden
from dmjd.ops._lib import autocast_dtype, define, without_autocast
from dmjd.ops.arguments import require_tensors


def _rows(x: Tensor) -> Tensor:
    """``[..., C]`` as ``[M, C]``; reshape(-1, 0) would be an error."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _fake_backward(
    grad: Tensor, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        weight1.new_empty(weight1.shape),
        bias1.new_empty(bias1.shape),
        weight2.new_empty(weight2.shape),
    )


def _triton_backward(
    grad: Tensor, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from dmjd.ops import gelu_mlp_kernels as kernels

    rows, grads = _rows(x), _rows(grad)
    if not kernels.fits(rows, *weight1.shape, weight2.shape[0]):
        return _reference_backward(grad, x, weight1, bias1, weight2)
    # For the products below too: other layouts would round in another order.
    rows, weight1, bias1, grads, weight2 = map(gelu_hidden.dense, (rows, weight1, bias1, grads, weight2))
    native = gelu_hidden.served(rows, *weight1.shape, weight2.shape[0])
    gradient = torch.ops.dmjd.gelu_hidden_gradient if native else kernels.hidden_gradient
    grad_hidden, hidden, sums = gradient(rows, weight1, bias1, grads, weight2)
    return (
        (grad_hidden @ weight1).view(x.shape),
        grad_hidden.T @ rows,
        sums.sum(0).to(bias1.dtype),
        grads.T @ hidden,
    )


@define(
    "gelu_mlp_backward(Tensor grad, Tensor x, Tensor weight1, Tensor bias1, Tensor weight2) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    differentiable=True,
    triton=_triton_backward,
)
def _reference_backward(
    grad: Tensor, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight1, bias1 and weight2."""
    rows, grads = _rows(x), _rows(grad)
    with without_autocast(x.device.type):
        before = F.linear(rows, weight1, bias1)
        grad_hidden = torch.ops.aten.gelu_backward(grads @ weight2, before)
        return (
            (grad_hidden @ weight1).view(x.shape),
            grad_hidden.T @ rows,
            grad_hidden.sum(0),
            grads.T @ F.gelu(before),
        )


def _fake(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight2.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    # The gradient of bias2 is outside the op, so that a compiler can fuse it with the computation of grad.
    grad_bias2 = _rows(grad).sum(0)
    return (*torch.ops.dmjd.gelu_mlp_backward(grad, *ctx.saved_tensors), grad_bias2)


def _triton(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    from dmjd.ops import gelu_mlp_kernels as kernels

    rows = _rows(x)
    if not kernels.fits(rows, *weight1.shape, weight2.shape[0]):
        return _reference(x, weight1, bias1, weight2, bias2)
    layer = torch.ops.dmjd.gelu_hidden if gelu_hidden.served(rows, *weight1.shape) else kernels.hidden_layer
    hidden = layer(*map(gelu_hidden.dense, (rows, weight1, bias1)))
    return F.linear(hidden, weight2, bias2).view(*x.shape[:-1], weight2.shape[0])


@define(
    "gelu_mlp(Tensor x, Tensor weight1, Tensor bias1, Tensor weight2, Tensor bias2) -> Tensor",
    fake=_fake,
    autograd=(_setup_context, _backward),
    triton=_triton,
)
def _reference(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    with without_autocast(x.device.type):  # gelu_mlp() has cast the arguments
        return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


def gelu_mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    """``gelu(x @ weight1.T + bias1) @ weight2.T + bias2`` with exact GELU, without saving the hidden layer.

    Under autocast arguments are cast as by :func:`torch.nn.functional.linear`. Results are bitwise deterministic.
    torch.func, forward mode and second derivatives use PyTorch's layers.

    Args:
        x: ``[..., C]`` floating point.
        weight1: ``[H, C]``.
        bias1: ``[H]``.
        weight2: ``[D, H]``.
        bias2: ``[D]``.

    Returns:
        ``[..., D]`` of x's dtype, or autocast's. CUDA kernels support bfloat16 and float16 if H is a multiple of 128
        and C and D of 64: on Hopper, for multiples of 256, those of :mod:`dmjd.ops.gelu_hidden`, else Triton's. All
        else uses PyTorch's layers.

    Raises:
        TypeError: if the dtypes differ outside autocast, or an argument is not a tensor.
        ValueError: if shapes do not fit, or devices differ.
    """
    named = {"x": x, "weight1": weight1, "bias1": bias1, "weight2": weight2, "bias2": bias2}
    require_tensors("gelu_mlp", **named)
    dtype = autocast_dtype(x.device.type)
    if dtype is not None and x.dtype != torch.float64:
        named = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in named.items()}
    for name, tensor in named.items():
        if not tensor.is_floating_point():
            raise TypeError(f"gelu_mlp: {name} must be floating, got {tensor.dtype}")
        if tensor.dtype != named["x"].dtype:
            raise TypeError(f"gelu_mlp: {name} must have x's floating dtype {named['x'].dtype}, got {tensor.dtype}")
    if len({tensor.device for tensor in named.values()}) > 1:
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items())
        raise ValueError(f"gelu_mlp: all tensors must be on one device, got {places}")
    if weight1.ndim != 2 or weight2.ndim != 2:
        raise ValueError(
            f"gelu_mlp: weight1 [H, C] and weight2 [D, H] must be matrices, got {list(weight1.shape)} and "
            f"{list(weight2.shape)}"
        )
    hidden, depth = weight1.shape
    fitting = (x.ndim > 0 and x.shape[-1] == depth, bias1.shape == (hidden,), weight2.shape[1] == hidden)
    if not all(fitting) or bias2.shape != weight2.shape[:1]:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
        raise ValueError(
            f"gelu_mlp: expected x [..., C], weight1 [H, C], bias1 [H], weight2 [D, H], bias2 [D]; got {shapes}"
        )
    return torch.ops.dmjd.gelu_mlp(*named.values())
