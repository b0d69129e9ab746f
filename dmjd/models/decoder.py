"""From encoded views to predictions: MAE's decoder for the masked branch, a projector for the visible branch."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import Attention
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.models.attention import ShortBlock
from dmjd.models.norm import layer_norm
from dmjd.ops.tokens import gather_tokens, scatter_tokens
from dmjd.ops.views import Views
from dmjd.positions import sincos_positions


def select_tokens(tokens: Tensor, ids: Tensor) -> Tensor:
    """``[K*B, N, C]`` at ``ids [K, B, P]`` -> ``[K*B, P, C]``."""
    return gather_tokens(tokens, ids.flatten(0, 1).unsqueeze(0))


class SelectiveBlock(ShortBlock):
    """timm's block, computed where its output is read: chosen tokens look at all of them.

    Exact, since beyond the keys and values a block works on each token by itself.
    """

    def forward(self, x: Tensor, ids: Tensor, prefix_tokens: int = 0) -> Tensor:  # type: ignore[override]
        """``x [K*B, prefix + N, C]`` and ``ids [K, B, P]`` of the tokens behind the prefix -> ``[K*B, P, C]``."""
        normed = self.norm1(x)
        chosen = select_tokens(normed[:, prefix_tokens:], ids)
        x = select_tokens(x[:, prefix_tokens:], ids) + self._attend(chosen, normed)
        return x + self.mlp(self.norm2(x))

    def _attend(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """timm's attention, its fused projection split between the two inputs."""
        attention = self.attn
        assert isinstance(attention, Attention)
        dim, heads = queries.shape[-1], (attention.num_heads, attention.head_dim)
        weight, bias = attention.qkv.weight, attention.qkv.bias
        q = F.linear(queries, weight[:dim], bias[:dim]).unflatten(-1, heads).transpose(1, 2)
        kv = F.linear(tokens, weight[dim:], bias[dim:]).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, *kv.unbind())
        return attention.proj(seen.transpose(1, 2).flatten(-2))


class MAEDecoder(nn.Module):
    """MAE's light decoder: embeds visible tokens, fills masked places with a mask token, attends over the whole grid.

    ``forward(tokens [K*B, prefix + V, D], views, predicted [K, B, P]) -> [K*B, P, dim]``; the prefix takes part in
    attention, then leaves. Positions are those of ``grid``, so unlike the encoder it serves one image size.
    """

    def __init__(
        self,
        *,
        encoder_dim: int,
        grid: tuple[int, int],
        prefix_tokens: int,
        dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.prefix_tokens = prefix_tokens
        self.embed = nn.Linear(encoder_dim, dim)
        self.mask_token = nn.Parameter(torch.empty(1, 1, dim))
        self.positions: Tensor
        self.register_buffer("positions", sincos_positions(grid, dim), persistent=False)
        kinds = [ShortBlock] * (depth - 1) + [SelectiveBlock]
        self.blocks = nn.ModuleList(
            kind(dim, num_heads, mlp_ratio, qkv_bias=True, norm_layer=layer_norm) for kind in kinds
        )
        self.norm = layer_norm(dim)

    def forward(self, tokens: Tensor, views: Views, predicted: Tensor) -> Tensor:
        x = scatter_tokens(
            # The residual stream stays float32 under autocast, as the encoder's does and as in MAE.
            self.embed(tokens).to(self.mask_token.dtype),
            self.mask_token.flatten(),
            views.restore,
            self.positions,
            prefix_tokens=self.prefix_tokens,
        )
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x)
        return self.norm(last(x, predicted, self.prefix_tokens))


class VisibleBranch(nn.Module):
    """The paper's visible distillation branch: a three-layer projector g with LayerNorm after each layer, then a
    fully-connected predictor q. The last LayerNorm has no affine parameters. A "linear" projector, of the paper's
    ablation, is the last layer and its LayerNorm alone.

    ``forward(tokens [K*B, V, D]) -> [K*B, V, target_dim]``.
    """

    def __init__(self, *, encoder_dim: int, width: int, target_dim: int, projector: str = "nonlinear") -> None:
        super().__init__()
        before, inner = [], encoder_dim
        for _ in range(2 if projector == "nonlinear" else 0):
            before += [nn.Linear(inner, width), layer_norm(width), nn.GELU()]
            inner = width
        self.projector = nn.Sequential(*before, nn.Linear(inner, width), layer_norm(width, elementwise_affine=False))
        self.predictor = nn.Linear(width, target_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.predictor(self.projector(tokens))
