"""Gather the visible tokens of masked views, and scatter them back to the full grid.

Both ops are linear, so the gradient of each backward op is the forward op again, and gradients of any order exist. Sums
are taken in float32 (float64 for float64) in a fixed order and rounded once: two runs give equal bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmjd.ops._lib import define
from dmjd.ops.arguments import integer, require_tensors
from dmjd.ops.id_check import check_ids


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex or dtype == torch.float64 else torch.float32


def _gather_fake(x: Tensor, ids: Tensor, prefix_tokens: int) -> Tensor:
    views, batch, visible = ids.shape
    return x.new_empty(views * batch, prefix_tokens + visible, x.shape[-1])


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ids, ctx.prefix_tokens = inputs
    ctx.tokens = x.shape[1] - ctx.prefix_tokens
    ctx.save_for_backward(ids)


def _gather_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    # The kernels do not support complex numbers.
    backward = _gather_backward_reference if grad.is_complex() else torch.ops.dmjd.gather_tokens_backward
    return backward(grad, ids, ctx.tokens, ctx.prefix_tokens), None, None


@define(
    "gather_tokens(Tensor x, Tensor ids, SymInt prefix_tokens) -> Tensor",
    fake=_gather_fake,
    autograd=(_gather_setup, _gather_gradient),
)
def _gather_reference(x: Tensor, ids: Tensor, prefix_tokens: int) -> Tensor:
    every_view = x[:, prefix_tokens:].expand(ids.shape[0], -1, -1, -1)
    tokens = every_view.gather(2, ids.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])).flatten(0, 1)
    if not prefix_tokens:
        return tokens
    prefix = x[:, :prefix_tokens].expand(ids.shape[0], -1, -1, -1).flatten(0, 1)
    return torch.cat((prefix, tokens), dim=1)


def _gather_backward_fake(grad: Tensor, ids: Tensor, tokens: int, prefix_tokens: int) -> Tensor:
    return grad.new_empty(ids.shape[1], prefix_tokens + tokens, grad.shape[-1])


def _gather_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids, _, ctx.prefix_tokens = inputs
    ctx.save_for_backward(ids)


def _gather_backward_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    return torch.ops.dmjd.gather_tokens(grad, ids, ctx.prefix_tokens), None, None, None


@define(
    "gather_tokens_backward(Tensor grad, Tensor ids, SymInt tokens, SymInt prefix_tokens) -> Tensor",
    fake=_gather_backward_fake,
    autograd=(_gather_backward_setup, _gather_backward_gradient),
)
def _gather_backward_reference(grad: Tensor, ids: Tensor, tokens: int, prefix_tokens: int) -> Tensor:
    views, batch, _ = ids.shape
    channels = grad.shape[-1]
    by_view = grad.unflatten(0, (views, batch))
    total = grad.new_zeros(batch, prefix_tokens + tokens, channels, dtype=_sum_dtype(grad.dtype))
    prefix, seen = total[:, :prefix_tokens], total[:, prefix_tokens:]
    for view in range(views):
        prefix = prefix + by_view[view, :, :prefix_tokens]
        # scatter, not scatter_add: ids are unique within a view, and views are summed in a fixed order.
        index = ids[view].unsqueeze(-1).expand(-1, -1, channels)
        seen = seen.scatter(1, index, seen.gather(1, index) + by_view[view, :, prefix_tokens:])
    return torch.cat((prefix, seen), dim=1).to(grad.dtype)


def _scatter_fake(
    x: Tensor, mask_token: Tensor, restore: Tensor, positions: Tensor | None, prefix_tokens: int
) -> Tensor:
    return x.new_empty(x.shape[0], prefix_tokens + restore.shape[-1], x.shape[-1])


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, restore, _, ctx.prefix_tokens = inputs
    ctx.visible = x.shape[1] - ctx.prefix_tokens
    ctx.save_for_backward(restore)


def _scatter_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (restore,) = ctx.saved_tensors
    wants_positions = ctx.needs_input_grad[3]
    x, mask_token, positions = torch.ops.dmjd.scatter_tokens_backward(
        grad, restore, ctx.visible, ctx.prefix_tokens, wants_positions
    )
    return x, mask_token, None, positions if wants_positions else None, None


@define(
    "scatter_tokens(Tensor x, Tensor mask_token, Tensor restore, Tensor? positions, SymInt prefix_tokens) -> Tensor",
    fake=_scatter_fake,
    autograd=(_scatter_setup, _scatter_gradient),
)
def _scatter_reference(
    x: Tensor, mask_token: Tensor, restore: Tensor, positions: Tensor | None, prefix_tokens: int
) -> Tensor:
    slots = restore.flatten(0, 1)
    visible = x[:, prefix_tokens:]
    count = visible.shape[1]
    index = slots.clamp(max=count - 1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    tokens = torch.where((slots < count).unsqueeze(-1), visible.gather(1, index), mask_token)
    if positions is not None:
        tokens = tokens + positions
    return torch.cat((x[:, :prefix_tokens], tokens), dim=1) if prefix_tokens else tokens


def _scatter_backward_fake(
    grad: Tensor, restore: Tensor, visible: int, prefix_tokens: int, positions: bool
) -> tuple[Tensor, Tensor, Tensor]:
    channels = grad.shape[-1]
    return (
        grad.new_empty(grad.shape[0], prefix_tokens + visible, channels),
        grad.new_empty(channels),
        grad.new_empty(restore.shape[-1], channels) if positions else grad.new_empty(0),
    )


def _scatter_backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, restore, _, ctx.prefix_tokens, ctx.positions = inputs
    ctx.save_for_backward(restore)


def _scatter_backward_gradient(ctx: Any, x: Tensor, mask_token: Tensor, positions: Tensor) -> tuple[Tensor | None, ...]:
    (restore,) = ctx.saved_tensors
    grad = torch.ops.dmjd.scatter_tokens(
        x, mask_token, restore, positions if ctx.positions else None, ctx.prefix_tokens
    )
    return grad, None, None, None, None


@define(
    "scatter_tokens_backward(Tensor grad, Tensor restore, SymInt visible, SymInt prefix_tokens, bool positions)"
    " -> (Tensor x, Tensor mask_token, Tensor positions)",
    fake=_scatter_backward_fake,
    autograd=(_scatter_backward_setup, _scatter_backward_gradient),
)
def _scatter_backward_reference(
    grad: Tensor, restore: Tensor, visible: int, prefix_tokens: int, positions: bool
) -> tuple[Tensor, Tensor, Tensor]:
    slots = restore.flatten(0, 1)
    tokens = grad[:, prefix_tokens:]
    # All masked tokens go to one extra slot, which is cut off.
    index = slots.clamp(max=visible).unsqueeze(-1).expand(-1, -1, grad.shape[-1])
    x = grad.new_zeros(grad.shape[0], visible + 1, grad.shape[-1]).scatter(1, index, tokens)[:, :visible]
    hidden = (slots >= visible).unsqueeze(-1)
    sum_dtype = _sum_dtype(grad.dtype)
    return (
        torch.cat((grad[:, :prefix_tokens], x), dim=1),
        torch.where(hidden, tokens, 0).sum(dim=(0, 1), dtype=sum_dtype).to(grad.dtype),
        tokens.sum(dim=0, dtype=sum_dtype).to(grad.dtype) if positions else grad.new_empty(0),
    )


def _require_ids(op: str, name: str, x: Tensor, ids: Tensor) -> None:
    if ids.dtype != torch.int64:
        raise TypeError(f"{op}: {name} must be int64, got {ids.dtype}")
    if ids.device != x.device:
        raise ValueError(f"{op}: {name} must be on x's device, got {ids.device} and {x.device}")


def _require_prefix(op: str, x: Tensor, prefix_tokens: int) -> int:
    prefix_tokens = integer(f"{op}: prefix_tokens", prefix_tokens)
    if not 0 <= prefix_tokens <= x.shape[1]:
        raise ValueError(
            f"{op}: prefix_tokens must be in [0, {x.shape[1]}] for x {tuple(x.shape)}, got {prefix_tokens}"
        )
    return prefix_tokens


def _require_added(name: str, added: Tensor, x: Tensor, restore: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``added`` in ``shape`` and x's dtype; leading dimensions of size 1 are allowed."""
    ones = added.ndim - len(shape)
    if ones < 0 or added.shape != (1,) * ones + shape:
        raise ValueError(
            f"scatter_tokens: {name} must be {list(shape)} for x {tuple(x.shape)} and restore {tuple(restore.shape)}, "
            f"got {tuple(added.shape)}"
        )
    if added.device != x.device:
        raise ValueError(f"scatter_tokens: {name} must be on x's device, got {added.device} and {x.device}")
    return added.reshape(shape).to(x.dtype)


def gather_tokens(x: Tensor, ids: Tensor, prefix_tokens: int = 0) -> Tensor:
    """Gather the tokens ``ids`` of K views from one copy of ``x``; prefix tokens (cls) are copied to the front.

    Args:
        x: ``[B, prefix + N, C]`` of any dtype.
        ids: int64 ``[K, B, V]`` into the N tokens, unique within a view. ``DMJD_CHECK_IDS=1`` checks them, see
            :mod:`dmjd.ops.id_check`.
        prefix_tokens: number of leading tokens of ``x`` that are never masked.

    Returns:
        ``[K*B, prefix + V, C]``, view-major. Its gradient is the sum over the views, view 0 first; tokens in no
        view get zero.

    Raises:
        TypeError: if ids are not an int64 tensor, or prefix_tokens is not an integer.
        ValueError: if shapes do not match, or x and ids are on different devices.
    """
    require_tensors("gather_tokens", x=x, ids=ids)
    if ids.ndim != 3 or x.ndim != 3 or ids.shape[1] != x.shape[0]:
        raise ValueError(
            f"gather_tokens: x must be [B, N, C] and ids [K, B, V], got {tuple(x.shape)}, {tuple(ids.shape)}"
        )
    _require_ids("gather_tokens", "ids", x, ids)
    prefix_tokens = _require_prefix("gather_tokens", x, prefix_tokens)
    check_ids("gather_tokens: ids", ids, x.shape[1] - prefix_tokens)
    return torch.ops.dmjd.gather_tokens(x, ids, prefix_tokens)


def scatter_tokens(
    x: Tensor, mask_token: Tensor, restore: Tensor, positions: Tensor | None = None, prefix_tokens: int = 0
) -> Tensor:
    """Scatter visible tokens to the full grid, fill masked positions with the mask token, and add positions.

    Args:
        x: floating ``[K*B, prefix + V, C]``, view-major.
        mask_token: ``[C]``, or ``[1, 1, C]`` as in MAE, cast to ``x``'s dtype.
        restore: int64 ``[K, B, N]``, token -> slot, a permutation of the N slots within a view; slots >= V are masked.
            ``DMJD_CHECK_IDS=1`` checks it, see :mod:`dmjd.ops.id_check`.
        positions: ``[N, C]`` or ``[1, N, C]``, added to the N tokens (not to the prefix) in ``x``'s dtype; or None.
        prefix_tokens: number of leading tokens of ``x``, which are copied to the front.

    Returns:
        ``[K*B, prefix + N, C]`` of ``x``'s dtype. Gradients go to ``x``, ``mask_token`` and ``positions``.

    Raises:
        TypeError: if restore is no int64 tensor, x is not floating, or an argument is of another type.
        ValueError: if shapes do not belong together, no token is visible, or the arguments are on different devices.
    """
    require_tensors("scatter_tokens", x=x, mask_token=mask_token, restore=restore)
    if positions is not None:
        require_tensors("scatter_tokens", positions=positions)
    if x.ndim != 3 or restore.ndim != 3 or restore.shape[0] * restore.shape[1] != x.shape[0]:
        raise ValueError(
            f"scatter_tokens: x must be [K*B, V, C] and restore [K, B, N], got {tuple(x.shape)}, {tuple(restore.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"scatter_tokens: x must be floating, got {x.dtype}")
    _require_ids("scatter_tokens", "restore", x, restore)
    prefix_tokens = _require_prefix("scatter_tokens", x, prefix_tokens)
    tokens, channels = restore.shape[2], x.shape[2]
    if not 0 < x.shape[1] - prefix_tokens <= tokens:
        raise ValueError(
            f"scatter_tokens: x must hold 1 to {tokens} tokens behind {prefix_tokens} of prefix, got {tuple(x.shape)} "
            f"for restore {tuple(restore.shape)}"
        )
    mask_token = _require_added("mask_token", mask_token, x, restore, (channels,))
    if positions is not None:
        positions = _require_added("positions", positions, x, restore, (tokens, channels))
    check_ids("scatter_tokens: restore", restore, tokens)
    return torch.ops.dmjd.scatter_tokens(x, mask_token, restore, positions, prefix_tokens)
