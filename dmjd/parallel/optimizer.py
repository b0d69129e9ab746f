"""AdamW and its parameter groups."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from dmjd.config import OptimConfig


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, object]]:
    """Two groups by MAE's rule: matrices, convolutions and tokens decay; vectors (biases, LayerNorm) do not.

    ``lr_scale`` and ``wd_scale`` multiply the loop's learning rate and weight decay; layer decay will use the former.
    """
    trainable = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim > 1], "lr_scale": 1.0, "wd_scale": 1.0},
        {"params": [p for p in trainable if p.ndim <= 1], "lr_scale": 1.0, "wd_scale": 0.0},
    ]


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW, whose kernels skip an update on the device when told that a gradient is not finite."""
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(parameter_groups(parameters), lr=0.0, betas=betas, eps=config.eps, fused=True)
