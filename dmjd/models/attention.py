"""timm's attention modules, computed by :mod:`dmjd.ops.short_attention`: parameters and names stay timm's."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention
from timm.models import beit
from timm.models.vision_transformer import Block
from torch import Tensor
from torch.nn import functional as F

from dmjd.ops.short_attention import short_attention_packed


class ShortAttention(Attention):
    """timm's attention without norms of queries and keys, gate or dropout."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """``[R, T, D]`` -> ``[R, T, D]``."""
        assert attn_mask is None
        assert not is_causal
        return _attend(self, self.qkv(x))


class ShortBlock(Block):
    """timm's block with :class:`ShortAttention`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"attn_layer": ShortAttention, **options})


class ShortBeitAttention(beit.Attention):
    """BEiT's attention (queries and values have a bias) with relative positions of its own or that all blocks share."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """``[R, T, D]`` and a bias ``[heads, T, T]`` or None for 0 -> ``[R, T, D]``."""
        if self.relative_position_bias_table is not None:
            tokens = x.shape[1]  # the first row and column of the bias are the class token's, if there is one
            shared_rel_pos_bias = self._get_rel_pos_bias()[0, :, -tokens:, -tokens:]
        parts: Any = (self.q_bias, self.k_bias, self.v_bias)
        bias = torch.cat(parts)
        return _attend(self, F.linear(x, self.qkv.weight, bias), shared_rel_pos_bias)


def _attend(attention: Any, qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    qkv = qkv.unflatten(-1, (3, attention.num_heads, -1))
    return attention.proj(short_attention_packed(qkv, bias).flatten(2))
