"""Attention weights of an encoder's last block."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Attention
from timm.models import beit
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.models.attention import relative_bias
from dmjd.models.masked_image_model import Encoder


def attention_of(encoder: Encoder) -> nn.Module | None:
    """The attention module of the last block; None if that does not attend over the whole image, as in Swin, or over a
    map of tokens (:mod:`dmjd.models.dense.grid_attention`)."""
    if encoder.on_grid:
        return None
    module = getattr(list(encoder.blocks)[-1], "attn", None)
    return module if isinstance(module, (Attention, beit.Attention)) else None


def attention_weights(encoder: Encoder, images: Tensor) -> Tensor:
    """``softmax(q k^T * scale + bias)`` of the last block, float32 ``[B, heads, T, T]``, T = prefix + h * w.

    Row i holds the weights with which token i reads all tokens. Tokens are those that the block's own attention gets
    in a forward pass of ``images``, float ``[B, C, H, W]``, normalised, of any size that the encoder takes.

    Raises:
        ValueError: if the encoder has no attention over the whole image, or cannot encode the size.
    """
    attention: Any = attention_of(encoder)
    if attention is None:
        raise ValueError(f"the last block of {type(encoder).__name__} does not attend over the whole image")
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        found.append(_weights(module, *inputs, **options))

    handle = attention.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            encoder(images)
    finally:
        handle.remove()
    return found[0]


def _weights(attention: Any, tokens: Tensor, shared_rel_pos_bias: Tensor | None = None, **others: Any) -> Tensor:
    bias = shared_rel_pos_bias
    if isinstance(attention, beit.Attention):
        parts: Any = (attention.q_bias, attention.k_bias, attention.v_bias)
        qkv = F.linear(tokens, attention.qkv.weight, None if parts[0] is None else torch.cat(parts))
        if attention.relative_position_bias_table is not None:
            height, width = attention.window_size
            prefix = tokens.shape[1] > height * width
            bias = relative_bias(attention.relative_position_bias_table, (height, width), prefix)
    else:
        qkv = attention.qkv(tokens)
    q, k, _ = qkv.float().unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return (scores if bias is None else scores + bias).softmax(-1)
