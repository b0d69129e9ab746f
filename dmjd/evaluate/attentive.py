"""An attentive probe: one learned query attends to the frozen tokens, followed by a linear layer (Bardes et al., 2024).

The head of V-JEPA's evaluation of images; it needs no class token.
"""

from __future__ import annotations

import math

import torch
from timm.layers import Mlp
from torch import Tensor, nn


class AttentiveHead(nn.Module):
    """``[B, T, D] -> [B, num_classes]``: cross-attention from one query to normalised tokens, an MLP, a linear layer.

    ``q = query + attention(query, norm1(tokens))``, ``q = q + mlp(norm2(q))``, ``logits = linear(q)``; the MLP is four
    times as wide. Initialised on the CPU as V-JEPA's, the same bits on every device: weights and query truncated normal
    with deviation 0.02, the layers that end a residual branch divided by the root of 2, the linear layer as torch's.

    Args:
        dim: D.
        num_heads: attention heads, a divisor of ``dim``; as many as the encoder has.
        num_classes: number of logits.
        seed: of the initial weights. The global generator is left alone.
    """

    def __init__(self, dim: int, num_heads: int, num_classes: int, *, seed: int) -> None:
        super().__init__()
        with torch.device("meta"):  # torch's own initialisation draws from the global generator
            self.query = nn.Parameter(torch.empty(1, 1, dim))
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)
            self.mlp = Mlp(dim, 4 * dim)
            self.linear = nn.Linear(dim, num_classes)
        self.to_empty(device="cpu")
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.norm1(tokens)
        query = self.query.expand(len(tokens), -1, -1)
        query = query + self.attention(query, tokens, tokens, need_weights=False)[0]
        query = query + self.mlp(self.norm2(query))
        logits: Tensor = self.linear(query.squeeze(1))
        return logits

    def optimizer(self) -> torch.optim.AdamW:
        """V-JEPA's: AdamW with weight decay 0.001, none for biases and norms."""
        decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.0)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
            else:
                nn.init.zeros_(parameter)
        for norm in (self.norm1, self.norm2):
            nn.init.ones_(norm.weight)
        for ending in (self.attention.out_proj, self.mlp.fc2):
            ending.weight.div_(math.sqrt(2))
        bound = 1 / math.sqrt(self.linear.in_features)
        for parameter in self.linear.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
