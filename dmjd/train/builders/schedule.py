"""The learning rate of a configuration: its peak by rule, and its course over the steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError
from dmjd.masking import MaskSpec
from dmjd.train.schedules import adaptive_lr, classic_lr, cosine, multistep


def peak_lr(config: PretrainConfig, spec: MaskSpec, grid: tuple[int, int]) -> float:
    """The learning rate at the end of warm-up."""
    optim = config.optim
    if optim.lr_rule == "classic":
        return classic_lr(optim.base_lr, config.batch_size, spec.views)
    rates = spec.true_rates(grid) if optim.lr_rates == "exact" else spec.nominal_rates(grid)
    return adaptive_lr(optim.base_lr, config.batch_size, rates.m_corr, rates.m_pred)


def build_schedule(
    config: PretrainConfig, spec: MaskSpec, grid: tuple[int, int], steps_per_epoch: int
) -> Callable[[int], float]:
    """Optimizer step -> learning rate.

    Raises:
        ConfigError: if milestones are missing, idle or not within the epochs of the run.
    """
    optim = config.optim
    peak, warmup = peak_lr(config, spec, grid), round(optim.warmup_epochs * steps_per_epoch)
    if optim.schedule == "cosine":
        if optim.milestones:
            raise ConfigError("optim.milestones belongs to optim.schedule=multistep, and the schedule is cosine")
        total = config.epochs * steps_per_epoch
        return partial(cosine, total=total, warmup=warmup, peak=peak, floor=optim.min_lr, start=optim.warmup_lr)
    if not optim.milestones or max(optim.milestones) >= config.epochs:
        raise ConfigError(
            f"optim.milestones of optim.schedule=multistep must be epochs below epochs={config.epochs}, got "
            f"{optim.milestones}"
        )
    milestones = [round(epoch * steps_per_epoch) for epoch in optim.milestones]
    return partial(multistep, milestones=milestones, warmup=warmup, peak=peak, start=optim.warmup_lr)
