"""Attention over the large grid of a whole image: windows, global blocks, decomposed relative positions (ViTDet).

Decomposed relative positions (Li et al. 2022, as in detectron2's ``add_decomposed_rel_pos``) add to the score of the
query at (i, j) and the key at (k, l)

    q . R_h[i - k] + q . R_w[j - l]

A bias of 4096 x 4096 scores for each head is not formed: the query is extended by its products with the rows of R_h and
R_w, and the key by two one-hot vectors of its row and column, so that one attention over wider heads adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.models.attention import ShortAttention, ShortBeitAttention, toeplitz
from dmjd.models.masked_image_model import Encoder
from dmjd.models.swin import SwinBlock, SwinEncoder
from dmjd.ops.short_attention import MOST_TOKENS, short_attention, short_attention_packed

DECOMPOSED = (".attn.rel_pos_h", ".attn.rel_pos_w")
"""Ends of the names of decomposed relative positions."""

GLOBAL_BLOCKS = 4
"""Blocks that attend over the whole grid by default, evenly spaced."""


def attend_on_grid(
    encoder: Encoder,
    window: int | None,
    global_blocks: Sequence[int] | None,
    relative_positions: str,
    grid: tuple[int, int],
) -> None:
    """Change the blocks of ``encoder`` in place for :meth:`~dmjd.models.masked_image_model.Encoder.feature_maps`.

    The blocks of a ViT, or of stage 3 of a ConvViT, compute on maps of tokens ``[B, h, w, D]`` and without a class
    token, if there is a window or relative positions; otherwise they stay as they are. A Swin encodes images of any
    size afterwards: padded as in its authors' code, before the cyclic shift.

    Args:
        window: side of a window in tokens; None for attention over the whole grid in every block. The normalised map is
            padded with zeros to multiples of it, and attention does not mask them, as in ViTDet.
        global_blocks: blocks, from 0 within their stage, without windows; None for four, evenly spaced.
        relative_positions: "decomposed" gives each block tables ``attn.rel_pos_h`` and ``attn.rel_pos_w``, ``[2 n - 1,
            D / heads]`` for n rows or columns, zeros at first. Another number of rows interpolates them linearly.
            "none" for those of the encoder alone.
        grid: (h, w) tokens of a training image.

    Raises:
        ValueError: if the encoder has no feature maps, no such blocks, fewer of them, or relative positions of its own.
    """
    if not hasattr(encoder, "map_widths"):
        raise ValueError(
            f"{type(encoder).__name__} has no map_widths: it gives no feature maps, which this command needs"
        )
    if isinstance(encoder, SwinEncoder):
        if window is not None or relative_positions != "none":
            raise ValueError("Swin has windows and relative positions of its own; leave out window and the latter")
        _encode_any_size(encoder)
        return
    if window is None and relative_positions == "none":
        return
    blocks: Any = getattr(encoder, "blocks3", encoder.blocks)
    if any(type(getattr(block, "attn", None)) not in _ON_GRID for block in blocks):
        raise ValueError(f"{type(encoder).__name__} has no ViT blocks, which window and relative_positions change")
    if getattr(encoder, "rel_pos_bias", None) is not None or any(
        getattr(block.attn, "relative_position_bias_table", None) is not None for block in blocks
    ):
        raise ValueError(
            "an encoder with relative positions of one grid takes no windows and no further ones; use another encoder, "
            "or leave out window and relative_positions"
        )
    depth = len(blocks)
    if global_blocks is None:
        global_blocks = [max(0, depth * (i + 1) // GLOBAL_BLOCKS - 1) for i in range(GLOBAL_BLOCKS)]
    unbounded = set(global_blocks)
    if not unbounded <= set(range(depth)):
        raise ValueError(f"global_blocks must be in 0..{depth - 1}, got {sorted(unbounded)}")
    for index, block in enumerate(blocks):
        side = None if window is None or index in unbounded else window
        block.attn.__class__ = _ON_GRID[type(block.attn)]
        block.attn.window = side
        for name, size in zip(("rel_pos_h", "rel_pos_w"), grid if side is None else (side, side), strict=True):
            width = encoder.embed_dim // block.attn.num_heads
            table = nn.Parameter(torch.zeros(2 * size - 1, width)) if relative_positions == "decomposed" else None
            block.attn.register_parameter(name, table)
    if getattr(encoder, "cls_token", None) is not None:
        encoder.register_parameter("cls_token", None)
    encoder.on_grid = True


def _encode_any_size(encoder: Any) -> None:
    encoder.patch_embed.strict_img_size = False
    for block in encoder.blocks:
        block.__class__ = AnySizeSwinBlock
    encoder.on_grid = True


class GridAttention(ShortAttention):
    """timm's attention over a map of tokens, whole or in windows, with or without decomposed relative positions."""

    window: int | None
    rel_pos_h: nn.Parameter | None
    rel_pos_w: nn.Parameter | None

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """``[B, h, w, D]`` -> ``[B, h, w, D]``."""
        assert attn_mask is None
        assert not is_causal
        return _attend(self, x, self.qkv)


class GridBeitAttention(ShortBeitAttention):
    """BEiT's attention likewise; queries and values have a bias."""

    window: int | None
    rel_pos_h: nn.Parameter | None
    rel_pos_w: nn.Parameter | None

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """``[B, h, w, D]`` -> ``[B, h, w, D]``."""
        assert shared_rel_pos_bias is None
        parts: Any = (self.q_bias, self.k_bias, self.v_bias)
        return _attend(self, x, partial(F.linear, weight=self.qkv.weight, bias=torch.cat(parts)))


_ON_GRID: dict[type, type[nn.Module]] = {ShortAttention: GridAttention, ShortBeitAttention: GridBeitAttention}


def _attend(attention: Any, x: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
    size = x.shape[1:3]
    if attention.window is not None:
        x = into_windows(x, attention.window)
    qkv = project(x).unflatten(-1, (3, attention.num_heads, -1))
    x = attention.proj(attention_on_map(qkv, attention.rel_pos_h, attention.rel_pos_w).flatten(-2))
    return x if attention.window is None else out_of_windows(x, size)


def into_windows(x: Tensor, window: int) -> Tensor:
    """``[B, h, w, D]`` -> ``[B * n, window, window, D]``, padded with zeros at the bottom and the right."""
    height, width = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
    return x.unflatten(1, (-1, window)).unflatten(3, (-1, window)).transpose(2, 3).flatten(0, 2)


def out_of_windows(windows: Tensor, size: Sequence[int]) -> Tensor:
    """The inverse of :func:`into_windows` for maps of (h, w) ``size``."""
    (height, width), window = size, windows.shape[1]
    grid = (-1, -(-height // window), -(-width // window))
    x = windows.unflatten(0, grid).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return x[:, :height, :width]


def attention_on_map(qkv: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """Softmax attention of all tokens of each map, with decomposed relative positions.

    Args:
        qkv: ``[B, h, w, 3, heads, d]``.
        rows, columns: tables R_h ``[2 n - 1, d]`` and R_w for any n, or None for both.

    Returns:
        ``[B, h, w, heads, d]``.
    """
    h, w, depth = qkv.shape[1], qkv.shape[2], qkv.shape[-1]
    if rows is None or columns is None:
        return short_attention_packed(qkv.flatten(1, 2)).unflatten(1, (h, w))
    q, k, v = qkv.unbind(3)
    of_rows = torch.einsum("bhwnd,hkd->bhwnk", q, _pairs(rows, h).to(q.dtype))
    of_columns = torch.einsum("bhwnd,wkd->bhwnk", q, _pairs(columns, w).to(q.dtype))
    scale = depth**-0.5
    if qkv.is_meta:  # a count of FLOPs: those of the scores and biases, not of the wider heads
        bias = (of_rows.unsqueeze(-1) + of_columns.unsqueeze(-2)).flatten(-2).flatten(1, 2).transpose(1, 2)
        q, k, v = (part.flatten(1, 2).transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).unflatten(1, (h, w))
    wide = _head_size(depth + h + w, h * w)
    row_of, column_of = (torch.eye(n, dtype=k.dtype, device=k.device) for n in (h, w))
    q = torch.cat((q, of_rows / scale, of_columns / scale), dim=-1)
    row_of = row_of.view(h, 1, 1, h).expand(*k.shape[:-1], h)
    k = torch.cat((k, row_of, column_of.view(w, 1, w).expand(*k.shape[:-1], w)), dim=-1)
    # Values as wide as queries: flash attention needs that.
    q, k, v = (F.pad(part, (0, wide - part.shape[-1])).flatten(1, 2) for part in (q, k, v))
    return short_attention(q, k, v, scale=scale)[..., :depth].unflatten(1, (h, w))


def _pairs(table: Tensor, size: int) -> Tensor:
    """``table[i - k]`` for queries i and keys k, ``[size, size, d]``, interpolated if it is of another size."""
    if len(table) != 2 * size - 1:
        table = resized(table.to(torch.promote_types(table.dtype, torch.float32)), 2 * size - 1)
    return toeplitz(table.T).permute(1, 2, 0)


def resized(table: Tensor, rows: int) -> Tensor:
    """``[n, d]`` interpolated linearly to ``[rows, d]``, as in detectron2."""
    return F.interpolate(table.T.unsqueeze(0), size=rows, mode="linear")[0].T


def _head_size(least: int, tokens: int) -> int:
    """A head size of at least ``least`` that fast kernels have."""
    served = [size for size, most in MOST_TOKENS.items() if size >= least and tokens <= most]
    return min(served, default=-(-least // 8) * 8)


class AnySizeSwinBlock(SwinBlock):
    """A Swin block for maps of any size, as its authors': padded to multiples of the window, then shifted."""

    def _attn(self, x: Tensor) -> Tensor:
        size, window, (down, right) = x.shape[1:3], self.window_size, self.shift_size
        x = F.pad(x, (0, 0, 0, -size[1] % window[1], 0, -size[0] % window[0]))
        padded = x.shape[1:3]
        mask = None
        if down or right:
            x = x.roll((-down, -right), (1, 2))
            mask = shift_mask(padded, window, (down, right), x.device)
        windows = self.attn(window_partition(x, window).flatten(1, 2), mask).unflatten(1, window)
        x = window_reverse(windows, window, *padded)
        if down or right:
            x = x.roll((down, right), (1, 2))
        return x[:, : size[0], : size[1]]


def shift_mask(size: Sequence[int], window: tuple[int, int], shift: tuple[int, int], device: torch.device) -> Tensor:
    """Swin's bias for windows of a map of (h, w) ``size`` after the cyclic shift, float32 ``[W, N, N]``: -100 between
    tokens that were not neighbours before it, 0 between others."""
    regions = []
    for length, side, step in zip(size, window, shift, strict=True):
        place = torch.arange(length, device=device)
        regions.append((place >= length - side).int() + (place >= length - step).int())
    region = (3 * regions[0][:, None] + regions[1]).view(1, *size, 1)
    ids = window_partition(region, window).flatten(1)
    return torch.where(ids.unsqueeze(1) == ids.unsqueeze(2), 0.0, -100.0)
