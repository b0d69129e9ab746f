"""From encoded views to predictions: MAE's decoder for the masked branch, a projector for the visible branch."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from dmjd.models.positions import sincos_positions
from dmjd.models.vit import layer_norm
from dmjd.ops.tokens import scatter_tokens
from dmjd.ops.views import Views


class MAEDecoder(nn.Module):
    """MAE's light decoder: embeds visible tokens, fills hidden places with a mask token, attends over the whole grid.

    ``forward(tokens [K*B, prefix + V, D], views) -> [K*B, N, dim]``; the prefix takes part in attention, then leaves.
    Positions are those of ``grid``, so unlike the encoder it serves one image size.
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
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, mlp_ratio, qkv_bias=True, norm_layer=layer_norm) for _ in range(depth)
        )
        self.norm = layer_norm(dim)

    def forward(self, tokens: Tensor, views: Views) -> Tensor:
        x = scatter_tokens(
            # The residual stream stays float32 under autocast, as the encoder's does and as in MAE.
            self.embed(tokens).to(self.mask_token.dtype),
            self.mask_token.flatten(),
            views.restore,
            self.positions,
            prefix_tokens=self.prefix_tokens,
        )
        for block in self.blocks:
            x = block(x)
        return self.norm(x[:, self.prefix_tokens :])


class VisibleBranch(nn.Module):
    """The paper's visible distillation branch: a three-layer projector g with LayerNorm after each layer, then a
    fully-connected predictor q. The last LayerNorm has no affine parameters.

    ``forward(tokens [K*B, V, D]) -> [K*B, V, target_dim]``.
    """

    def __init__(self, *, encoder_dim: int, width: int, target_dim: int) -> None:
        super().__init__()
        self.projector = nn.Sequential(
            nn.Linear(encoder_dim, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.LayerNorm(width, elementwise_affine=False),
        )
        self.predictor = nn.Linear(width, target_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.predictor(self.projector(tokens))
