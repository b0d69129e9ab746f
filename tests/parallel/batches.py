"""Random batches of an objective."""

from __future__ import annotations

import torch
from torch import Tensor

from dmjd.masking import MaskedViews, MaskSpec


def random_batch(side: int, patch: int = 16, images: int = 3) -> tuple[Tensor, MaskedViews, Tensor]:
    """Images of ``side`` pixels, two disjoint views of each, and targets ``[images, N, 5]``: always the same."""
    generator = torch.Generator().manual_seed(1)
    grid = (side // patch, side // patch)
    spec = MaskSpec(views=2, mask_ratio=0.6, pattern="uniform")
    masked_views = spec.draw(torch.arange(images), grid, seed=0, epoch=0)
    pixels = torch.randn(images, 3, side, side, generator=generator)
    return pixels, masked_views, torch.randn(images, grid[0] * grid[1], 5, generator=generator)
