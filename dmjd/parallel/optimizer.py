"""AdamW and its parameter groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from dmjd.config import OptimConfig


def parameter_groups(parameters: Mapping[str, nn.Parameter], no_decay: Collection[str] = ()) -> list[dict[str, object]]:
    """Two groups by MAE's rule: matrices, convolutions and tokens decay; vectors (biases, LayerNorm) do not.

    ``no_decay`` names more that do not, by the last part of their names: BEiT's class token and positions.
    ``lr_scale`` and ``wd_scale`` multiply the loop's learning rate and weight decay; layer decay will use the former.
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            spared = parameter.ndim <= 1 or name.rpartition(".")[2] in no_decay
            (undecayed if spared else decayed).append(parameter)
    return [
        {"params": decayed, "lr_scale": 1.0, "wd_scale": 1.0},
        {"params": undecayed, "lr_scale": 1.0, "wd_scale": 0.0},
    ]


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW, whose kernels skip an update on the device when told that a gradient is not finite."""
    betas, groups = (config.betas[0], config.betas[1]), parameter_groups(parameters, config.no_decay)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps, fused=True)
