"""Softmax attention over the short sequences of masked pre-training: 50 to 288 tokens, heads of 32, 64 or 80.

The kernels keep a whole head in shared memory, forward and backward, so inputs are not transposed or copied and
gradients need no atomics. :func:`short_attention` and :func:`short_attention_packed` fall back to
:func:`torch.nn.functional.scaled_dot_product_attention` for everything that the kernels do not support.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.ops import _native
from dmjd.ops._lib import _transformed, autocast_dtype, define, without_autocast
from dmjd.ops.arguments import number, require_tensors

MOST_TOKENS = {32: 288, 64: 256, 80: 256}
"""Head sizes of the kernels -> greatest number of tokens."""

_TILE = 16  # rows, as in csrc/ops/cuda/attention_tiles.cuh


def _window_bias(bias: Tensor, batch: int) -> Tensor:
    """Expand ``[H, N, N]`` or ``[W, H, N, N]`` to ``[B, H, N, N]``."""
    if bias.ndim == 3:
        return bias.expand(batch, -1, -1, -1)
    return bias if bias.shape[0] == batch else bias.repeat(batch // bias.shape[0], 1, 1, 1)


def _scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if not torch.compiler.is_compiling() and _transformed((q, k, v, bias)):
        return _reference(q, k, v, bias, scale)[0]  # PyTorch's attention on the CPU has no forward mode and no vmap
    mask = None if bias is None else _window_bias(bias, q.shape[0])
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention scores ``[B, H, N, N]``, in float32 or float64."""
    q, k = (tensor.to(_summed(tensor)).transpose(1, 2) for tensor in (q, k))
    scores = (q @ k.transpose(-1, -2)) * scale
    return scores if bias is None else scores + _window_bias(bias, q.shape[0])


def _summed(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _fake_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, depth = q.shape
    grad_qkv = q.new_empty(batch, tokens, 3, heads, depth)
    return grad_qkv, bias.new_empty(bias.shape) if bias is not None and with_bias else q.new_empty(0)


@define(
    "short_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, "
    "float scale, bool with_bias) -> (Tensor, Tensor)",
    fake=_fake_backward,
    differentiable=True,
)
def _reference_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of q, k and v as one ``[B, N, 3, H, D]``, and of bias, empty unless ``with_bias``."""
    with without_autocast(q.device.type):
        # Recomputed instead of using lse and out, so that second derivatives pass through the softmax.
        probability = _scores(q, k, bias, scale).softmax(-1)
        grads, keys, values, queries = (tensor.to(_summed(tensor)).transpose(1, 2) for tensor in (grad, k, v, q))
        grad_probability = grads @ values.transpose(-1, -2)
        grad_scores = probability * (grad_probability - (probability * grad_probability).sum(-1, keepdim=True))
        grad_q = grad_scores @ keys * scale
        grad_k = grad_scores.transpose(-1, -2) @ queries * scale
        grad_v = probability.transpose(-1, -2) @ grads
        grad_qkv = torch.stack((grad_q, grad_k, grad_v), 2).permute(0, 3, 2, 1, 4).to(q.dtype).contiguous()
        if bias is None or not with_bias:
            return grad_qkv, q.new_empty(0)
        windows = 1 if bias.ndim == 3 else bias.shape[0]
        maps = grad_scores.unflatten(0, (q.shape[0] // windows, windows)).sum(0)
        return grad_qkv, maps.reshape(bias.shape).to(bias.dtype)


def _fake(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, tokens, dtype=_summed(q))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, bias, *output)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    with_bias = ctx.needs_input_grad[3]
    grad_qkv, grad_bias = torch.ops.dmjd.short_attention_backward(grad, *ctx.saved_tensors, ctx.scale, with_bias)
    return *grad_qkv.unbind(2), grad_bias if with_bias else None, None


@define(
    "short_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale) -> (Tensor, Tensor)",
    fake=_fake,
    autograd=(_setup_context, _backward),
)
def _reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The result ``[B, N, H, D]``, and the log-sum-exp of the scores ``[B, H, N]``, without gradient."""
    with without_autocast(q.device.type):
        scores = _scores(q, k, bias, scale)
        out = scores.softmax(-1) @ v.to(scores.dtype).transpose(1, 2)
        return out.transpose(1, 2).to(q.dtype).contiguous(), scores.logsumexp(-1)


def _fake_packed(qkv: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return _fake(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], bias, scale)


def _setup_packed_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, bias, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(qkv, bias, *output)


def _packed_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (qkv, *saved), with_bias = ctx.saved_tensors, ctx.needs_input_grad[1]
    grad_qkv, grad_bias = torch.ops.dmjd.short_attention_backward(grad, *qkv.unbind(2), *saved, ctx.scale, with_bias)
    return grad_qkv, grad_bias if with_bias else None, None


@define(
    "short_attention_packed(Tensor qkv, Tensor? bias, float scale) -> (Tensor, Tensor)",
    fake=_fake_packed,
    autograd=(_setup_packed_context, _packed_backward),
)
def _reference_packed(qkv: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return _reference(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], bias, scale)


def _shared_memory(device: torch.device) -> int:
    """Shared memory per block in bytes; 0 if the kernels are not available."""
    why = _native.why_missing("CUDA")
    if why is not None:
        _native.warn_of_references(why)
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


# As torch.compiler.assume_constant_result, which would import the compiler.
_shared_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _needed_memory(tokens: int, depth: int) -> int:
    """Least shared memory of the backward kernel in bytes (attention_backward.cuh); the forward kernel needs less."""
    rows = -(-tokens // _TILE) * _TILE
    alone = {32: 0, 64: 80, 80: 80}[depth]  # up to this many tokens a warp has one tile of keys, else two
    keys = rows if tokens <= alone else -(-tokens // (2 * _TILE)) * 2 * _TILE
    stride = 176 if depth == 80 else 2 * depth
    return 2 * (rows + keys) * stride + 8 * rows + max(keys * (_TILE + 8) * 2, rows * stride)


def _served(q: Tensor, scale: float) -> bool:
    """Whether the kernels support ``q [B, N, H, D]`` on its device."""
    tokens, depth = q.shape[1], q.shape[3]
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and depth in MOST_TOKENS
        and 0 < tokens <= MOST_TOKENS[depth]
        and 0 < scale < math.inf
        and _needed_memory(tokens, depth) <= _shared_memory(q.device)
    )


def _shapes(named: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())


def _check(op: str, named: dict[str, Tensor], bias: Tensor | None) -> None:
    """Check q, k and v in ``named``, [B, N, H, D], and bias."""
    q = named["q"]
    if q.ndim != 4 or q.shape[3] < 1 or any(tensor.shape != q.shape for tensor in named.values()):
        raise ValueError(f"{op}: q, k and v must have one shape [B, N, H, D], D at least 1, got {_shapes(named)}")
    if bias is not None:
        batch, tokens, heads, _ = q.shape
        fits = bias.ndim in (3, 4) and bias.shape[-3:] == (heads, tokens, tokens)
        if not fits or (bias.ndim == 4 and (bias.shape[0] < 1 or batch % bias.shape[0] != 0)):
            raise ValueError(
                f"{op}: bias must be [H, N, N], or [W, H, N, N] with W a divisor of B, got {list(bias.shape)} with "
                f"{_shapes(named)}"
            )
        named = {**named, "bias": bias}
    if not q.is_floating_point():
        raise TypeError(f"{op}: q must be floating point, got {q.dtype}")
    for name, tensor in named.items():
        if tensor.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must have q's dtype {q.dtype}, got {tensor.dtype}")
    if any(tensor.device != q.device for tensor in named.values()):
        places = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {places}")


def _cast(tensor: Tensor, kind: str) -> Tensor:
    """Cast ``tensor`` to the dtype of autocast for device type ``kind``, if it is on."""
    dtype = autocast_dtype(kind)
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def short_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """``softmax(scale * q @ k.T + bias) @ v`` per head, in the layout of the projections of q, k and v.

    CUDA kernels support bfloat16 and float16 with heads of 32 (up to 288 tokens), 64 and 80 (up to 256), if a head fits
    shared memory. Softmax and sums are float32 and bitwise deterministic, gradients included. torch.func transforms,
    and second derivatives of what the kernels support, use PyTorch's operations. Everything else uses
    :func:`torch.nn.functional.scaled_dot_product_attention`, which has no second derivatives on the CPU. Under autocast
    all tensors are cast to its dtype.

    Args:
        q: ``[B, N, H, D]`` floating point, any strides; not copied if rows of D are contiguous and aligned to 16 bytes,
            as those of ``qkv.view(B, N, 3, H, D).unbind(2)`` do.
        k: same shape and dtype as q.
        v: same shape and dtype as q.
        bias: ``[H, N, N]``, or ``[W, H, N, N]`` where image ``b`` uses ``b % W``, in q's dtype. Its gradient is summed
            over images in order.
        scale: positive; ``D ** -0.5`` by default.

    Returns:
        ``[B, N, H, D]`` of q's dtype, or autocast's.

    Raises:
        TypeError: if dtypes differ or are not floating point, or an argument is not a tensor.
        ValueError: if shapes do not fit, or devices differ.
    """
    require_tensors("short_attention", q=q, k=k, v=v, **({} if bias is None else {"bias": bias}))
    kind = q.device.type
    q, k, v = (_cast(tensor, kind) for tensor in (q, k, v))
    bias = None if bias is None else _cast(bias, kind)
    _check("short_attention", {"q": q, "k": k, "v": v}, bias)
    scale = q.shape[3] ** -0.5 if scale is None else number("short_attention: scale", scale)
    if not _served(q, scale):
        return _scaled_dot_product(q, k, v, bias, scale)
    return torch.ops.dmjd.short_attention(q, k, v, bias, scale)[0]


def short_attention_packed(qkv: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
    """:func:`short_attention` with q, k and v in one tensor, whose gradient is written without a copy.

    Args:
        qkv: ``[B, N, 3, H, D]``, such as ``nn.Linear(C, 3 * C)(x).view(B, N, 3, H, D)``.
        bias: as in :func:`short_attention`.
        scale: as in :func:`short_attention`.

    Returns:
        ``[B, N, H, D]`` of qkv's dtype, or autocast's.

    Raises:
        TypeError: if dtypes differ or are not floating point.
        ValueError: if shapes do not fit, or devices differ.
    """
    require_tensors("short_attention_packed", qkv=qkv, **({} if bias is None else {"bias": bias}))
    kind = qkv.device.type
    qkv, bias = _cast(qkv, kind), None if bias is None else _cast(bias, kind)
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"short_attention_packed: qkv must be [B, N, 3, H, D], got {list(qkv.shape)}")
    q, k, v = qkv.unbind(2)
    _check("short_attention_packed", {"q": q, "k": k, "v": v}, bias)
    scale = q.shape[3] ** -0.5 if scale is None else number("short_attention_packed: scale", scale)
    if not _served(q, scale):
        return _scaled_dot_product(q, k, v, bias, scale)
    return torch.ops.dmjd.short_attention_packed(qkv, bias, scale)[0]
