"""Fixed two-dimensional sine-cosine positions, as in MAE."""

from __future__ import annotations

import torch
from torch import Tensor


def sincos_positions(grid: tuple[int, int], dim: int) -> Tensor:
    """float32 ``[h * w, dim]``: the first half of the channels encodes the column, the second the row.

    Each half is ``[sin(p / 10000^(i / (dim/4))), cos(...)]`` for i in ``range(dim / 4)``; computed in float64.

    Raises:
        ValueError: if ``dim`` is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"sine-cosine positions need a width that is a multiple of 4, got {dim}")
    frequencies = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    rows, columns = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    halves = []
    for coordinate in (columns, rows):
        angles = coordinate.reshape(-1, 1) * frequencies
        halves += [angles.sin(), angles.cos()]
    return torch.cat(halves, dim=1).float()
