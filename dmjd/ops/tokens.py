"""Moving tokens between an image's full grid and the slots of its masked views."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_tokens(x: Tensor, ids: Tensor, prefix_tokens: int = 0) -> Tensor:
    """K views from one copy of ``x``: the tokens ``ids`` names, prefix tokens (cls) passed through in front.

    Args:
        x: ``[B, prefix + N, C]``.
        ids: int64 ``[K, B, V]`` into the N tokens, unique within a view.

    Returns:
        ``[K*B, prefix + V, C]``, view-major. Its gradient sums over the views in a fixed order: ids are unique within a
        view, so nothing is added twice to one place.

    Raises:
        ValueError: if the batch sizes differ.
    """
    if ids.ndim != 3 or x.ndim != 3 or ids.shape[1] != x.shape[0]:
        raise ValueError(
            f"gather_tokens: x must be [B, N, C] and ids [K, B, V], got {tuple(x.shape)}, {tuple(ids.shape)}"
        )
    channels = x.shape[-1]
    every_view = x[:, prefix_tokens:].expand(ids.shape[0], -1, -1, -1)
    tokens = every_view.gather(2, ids.unsqueeze(-1).expand(-1, -1, -1, channels)).flatten(0, 1)
    if not prefix_tokens:
        return tokens
    prefix = x[:, :prefix_tokens].expand(ids.shape[0], -1, -1, -1).flatten(0, 1)
    return torch.cat((prefix, tokens), dim=1)


def scatter_tokens(
    x: Tensor, mask_token: Tensor, restore: Tensor, positions: Tensor | None = None, prefix_tokens: int = 0
) -> Tensor:
    """Put visible tokens back on the full grid, fill hidden places with the mask token, and add positions.

    Args:
        x: ``[K*B, prefix + V, C]``, view-major.
        mask_token: ``[C]``.
        restore: int64 ``[K, B, N]``, token -> slot; slots >= V are hidden.
        positions: ``[N, C]`` added to the N tokens (not to the prefix), or None.

    Returns:
        ``[K*B, prefix + N, C]``.

    Raises:
        ValueError: if the batch sizes differ, or no token is visible.
    """
    slots = restore.flatten(0, 1)
    if x.ndim != 3 or slots.shape[0] != x.shape[0]:
        raise ValueError(
            f"scatter_tokens: x must be [K*B, V, C] and restore [K, B, N], got {tuple(x.shape)}, {tuple(restore.shape)}"
        )
    visible = x[:, prefix_tokens:]
    if not visible.shape[1]:
        raise ValueError(f"scatter_tokens: x must hold at least one token behind the prefix, got {tuple(x.shape)}")
    count = visible.shape[1]
    index = slots.clamp(max=count - 1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    # `where` and not a gather from cat(x, mask_token): the mask token's gradient is then a plain, ordered reduction.
    tokens = torch.where((slots < count).unsqueeze(-1), visible.gather(1, index), mask_token.to(x.dtype))
    if positions is not None:
        tokens = tokens + positions.to(x.dtype)
    return torch.cat((x[:, :prefix_tokens], tokens), dim=1) if prefix_tokens else tokens
