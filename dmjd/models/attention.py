"""timm's attention through :func:`dmjd.ops.short_attention_packed`."""

from __future__ import annotations

from typing import Any

from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor

from dmjd.ops.short_attention import short_attention_packed


class ShortAttention(Attention):
    """timm's attention without its options (norms, gate, dropout), which reads q, k and v where their projection is."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """``[R, T, D]`` -> ``[R, T, D]``."""
        assert attn_mask is None, "no block of ours hides keys"
        assert not is_causal, "no block of ours hides keys"
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        return self.proj(short_attention_packed(qkv).flatten(2))  # type: ignore[no-any-return]


class ShortBlock(Block):
    """timm's block with :class:`ShortAttention`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, attn_layer=ShortAttention, **options)
