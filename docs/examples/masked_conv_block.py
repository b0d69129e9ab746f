"""A convolution block that sees visible tokens alone, for a trainer of your own. Needs torch and dmjd.ops.

python docs/examples/masked_conv_block.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dmjd.ops import Views, disjoint_masks, gather_tokens, masked_depthwise_conv2d


class MaskedConvBlock(nn.Module):
    """Pointwise, depthwise 5x5 on the masked map, pointwise, residual: ``[K*B, V, q*q, C]`` in and out."""

    def __init__(self, channels: int, grid: tuple[int, int], q: int) -> None:
        super().__init__()
        self.grid, self.q = grid, q
        self.norm = nn.LayerNorm(channels)
        self.expand = nn.Linear(channels, channels)
        # A plain layer, so that the dense block of fine-tuning loads the same weights.
        self.depthwise = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.project = nn.Linear(channels, channels)

    def forward(self, x: Tensor, views: Views) -> Tensor:
        weight, bias = self.depthwise.weight.squeeze(1), self.depthwise.bias
        y = self.expand(self.norm(x))
        y = masked_depthwise_conv2d(y, views.visible, views.restore, weight, bias, self.grid, self.q)
        return x + self.project(y)


batch, channels, grid, q = 8, 64, (14, 14), 4
pixel_map = torch.randn(batch, grid[0], q, grid[1], q, channels)
tokens = pixel_map.transpose(2, 3).reshape(batch, grid[0] * grid[1], q * q * channels)
views = disjoint_masks(torch.arange(batch), grid=grid, views=2, mask_ratio=0.6, pattern="block", seed=0, epoch=0)
x = gather_tokens(tokens, views.visible).unflatten(-1, (q * q, channels))

block = MaskedConvBlock(channels, grid, q)
y = block(x, views)
y.square().mean().backward()
print(f"{x.shape[1]} of {tokens.shape[1]} tokens, {tuple(y.shape)}")
