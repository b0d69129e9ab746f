"""timm's attention modules, computed by :mod:`dmjd.ops.short_attention`: parameters and names stay timm's."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention
from timm.models import beit
from timm.models.swin_transformer import WindowAttention
from timm.models.vision_transformer import Block
from torch import Tensor
from torch.nn import functional as F

from dmjd.models.mlp import Gelu
from dmjd.ops.short_attention import short_attention_packed


class ShortAttention(Attention):
    """timm's attention without norms of queries and keys, gate or dropout."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """``[R, T, D]`` -> ``[R, T, D]``."""
        assert attn_mask is None
        assert not is_causal
        return _attend(self, self.qkv(x))


class ShortBlock(Block):
    """timm's block with :class:`ShortAttention` and :class:`~dmjd.models.mlp.Gelu`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"attn_layer": ShortAttention, "act_layer": Gelu, **options})


class ShortBeitAttention(beit.Attention):
    """BEiT's attention (queries and values have a bias) with relative positions of its own or that all blocks share."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """``[R, T, D]`` and a bias ``[heads, T, T]`` or None for 0 -> ``[R, T, D]``."""
        if self.relative_position_bias_table is not None:
            class_token = x.shape[1] > self.window_size[0] * self.window_size[1]
            shared_rel_pos_bias = relative_bias(self.relative_position_bias_table, self.window_size, class_token)
        parts: Any = (self.q_bias, self.k_bias, self.v_bias)
        bias = torch.cat(parts)
        return _attend(self, F.linear(x, self.qkv.weight, bias), shared_rel_pos_bias)


class ShortWindowAttention(WindowAttention):
    """Swin's attention within windows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``[B * W, N, D]`` with a bias of the W windows of an image, ``[W, N, N]`` or None -> ``[B * W, N, D]``."""
        bias = patch_bias(self.relative_position_bias_table, self.window_size)
        if mask is not None:
            bias = bias + mask.unsqueeze(1)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        return self.proj(short_attention_packed(qkv, bias.to(qkv.dtype)).flatten(2))


def relative_bias(table: Tensor, grid: tuple[int, int], class_token: bool) -> Tensor:
    """timm's bias of a table ``[(2h - 1)(2w - 1) + 3, heads]``, ``[heads, T, T]``, without an index: the gradient of
    one is added up in no fixed order where inductor compiles it for CUDA.

    Args:
        class_token: whether the T tokens begin with one, whose rows of the table are the last three.
    """
    patches = patch_bias(table[:-3], grid)
    if not class_token:
        return patches
    tokens = patches.shape[1]
    of_class, to_class, own = (row[:, None, None] for row in table[-3:])
    first = torch.cat((own, of_class.expand(-1, 1, tokens)), dim=2)
    return torch.cat((first, torch.cat((to_class.expand(-1, tokens, 1), patches), dim=2)), dim=1)


def patch_bias(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """Swin's bias of a table ``[(2h - 1)(2w - 1), heads]``, ``[heads, h * w, h * w]``, without an index."""
    h, w = grid
    patches = toeplitz(table.T.unflatten(1, (2 * h - 1, 2 * w - 1)))  # [heads, 2 h - 1, w, w]
    patches = toeplitz(patches.movedim(1, -1))  # [heads, w, w, h, h]
    return patches.permute(0, 3, 1, 4, 2).reshape(table.shape[1], h * w, h * w)


def toeplitz(x: Tensor) -> Tensor:
    """``[..., 2 n - 1]`` -> ``[..., n, n]``, with ``x[..., i - j + n - 1]`` at (i, j)."""
    n = (x.shape[-1] + 1) // 2
    rows = x.unsqueeze(-2).expand(*x.shape[:-1], n, 2 * n - 1).flatten(-2)
    return F.pad(rows, (0, n)).unflatten(-1, (n, 2 * n))[..., :n].flip(-1)  # each row is read one further on


def _attend(attention: Any, qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    qkv = qkv.unflatten(-1, (3, attention.num_heads, -1))
    return attention.proj(short_attention_packed(qkv, bias).flatten(2))
