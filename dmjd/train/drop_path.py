"""Stochastic depth as a pure function of (seed, epoch, sample, view, layer).

Drawn from a generator it would depend on batch size, rank and accumulation, and a resumed run would need its state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dmjd.ops import Domain, keyed_uniform


def draw_branch_scales(sample_ids: Tensor, key: Tensor, *, views: int, depth: int, rate: float) -> Tensor:
    """Scales of every block's attention and MLP branch: 0 where it is dropped, ``1 / (1 - p)`` where it is kept.

    Args:
        sample_ids: int64 ``[B]``.
        key: from :func:`dmjd.ops.make_key`.
        rate: p of the last block; p grows linearly from 0 at the first (Huang et al. 2016), as in timm.

    Returns:
        float32 ``[depth, 2, views * B]``, view-major.
    """
    rates = torch.linspace(0, rate, depth, device=sample_ids.device).repeat_interleave(2)
    draws = [keyed_uniform(sample_ids, 2 * depth, key=key, domain=Domain.DROP_PATH, lane=view) for view in range(views)]
    scales = (torch.cat(draws) >= rates) / (1 - rates)
    return scales.float().T.unflatten(0, (depth, 2)).contiguous()
