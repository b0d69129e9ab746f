"""Learning-rate rules and schedules, as pure functions of the step number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from dmjd.config import OptimConfig, PretrainConfig, TrainConfig
from dmjd.errors import ConfigError
from dmjd.masking import MaskSpec

REFERENCE_BATCH = 256
"""Base learning rates are quoted for this many images, as in MAE and in the paper's Eq. 4."""


def adaptive_lr(base_lr: float, unique_batch: int, m_corr: float, m_pred: float) -> float:
    """The paper's Eq. 4: ``base * (b_u * m_pred / m_corr) / 256``, with b_u distinct images."""
    return base_lr * unique_batch * (m_pred / m_corr) / REFERENCE_BATCH


def classic_lr(base_lr: float, unique_batch: int, views: int) -> float:
    """The linear rule over all views, ``base * K * b_u / 256`` (the paper's baseline in its LR ablation)."""
    return base_lr * views * unique_batch / REFERENCE_BATCH


def cosine(step: int, *, total: int, warmup: int, peak: float, floor: float = 0.0, start: float = 0.0) -> float:
    """Linear warm-up from ``start`` over ``warmup`` steps, then half a cosine from ``peak`` to ``floor`` at ``total``.

    ``step`` counts optimizer steps from 0; the value is the learning rate of that step.
    """
    if step < warmup:
        return _warm_up(step, warmup, start, peak)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def linear(step: int, *, total: int, warmup: int, peak: float, floor: float = 0.0, start: float = 0.0) -> float:
    """Linear warm-up as in :func:`cosine`, then a line to ``floor`` at ``total``, on which the rate at step 0 would be
    ``peak`` (mmsegmentation's "poly" of power 1)."""
    if step < warmup:
        return _warm_up(step, warmup, start, peak)
    return floor + (peak - floor) * (1 - min(1.0, step / max(1, total)))


def multistep(step: int, *, milestones: Sequence[int], warmup: int, peak: float, start: float = 0.0) -> float:
    """Linear warm-up as in :func:`cosine`, then ``peak``, times 0.1 from each of ``milestones`` (steps) on."""
    if step < warmup:
        return _warm_up(step, warmup, start, peak)
    return peak * 0.1 ** sum(milestone <= step for milestone in milestones)


def _warm_up(step: int, warmup: int, start: float, peak: float) -> float:
    return start + (peak - start) * step / warmup


def peak_lr(config: PretrainConfig, spec: MaskSpec, grid: tuple[int, int]) -> float:
    """The learning rate at the end of warm-up."""
    optim = config.optim
    if optim.lr_rule == "classic":
        return classic_lr(optim.base_lr, config.batch_size, spec.views)
    rates = spec.true_rates(grid) if optim.lr_rates == "exact" else spec.nominal_rates(grid)
    return adaptive_lr(optim.base_lr, config.batch_size, rates.m_corr, rates.m_pred)


def warmup_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Steps of warm-up."""
    optim = config.optim
    if optim.warmup_epochs is None:
        return round(optim.warmup_percent / 100 * config.epochs * steps_per_epoch)
    if optim.warmup_percent != OptimConfig().warmup_percent:
        raise ConfigError(
            f"optim.warmup_epochs={optim.warmup_epochs:g} and optim.warmup_percent={optim.warmup_percent:g} are both "
            "set; set optim.warmup_epochs=null to use the percentage"
        )
    return round(optim.warmup_epochs * steps_per_epoch)


def build_schedule(config: TrainConfig, peak: float, steps_per_epoch: int) -> Callable[[int], float]:
    """Optimizer step -> learning rate.

    Args:
        peak: the learning rate at the end of warm-up.

    Raises:
        ConfigError: if milestones are missing, unused or beyond the epochs of the run.
    """
    optim = config.optim
    warmup = warmup_steps(config, steps_per_epoch)
    if optim.schedule != "multistep":
        if optim.milestones:
            raise ConfigError(
                f"optim.milestones needs optim.schedule=multistep, got optim.schedule={optim.schedule}; leave it out"
            )
        total = config.epochs * steps_per_epoch
        decay = {"cosine": cosine, "linear": linear}[optim.schedule]
        return partial(decay, total=total, warmup=warmup, peak=peak, floor=optim.min_lr, start=optim.warmup_lr)
    if not optim.milestones or max(optim.milestones) >= config.epochs:
        raise ConfigError(
            f"optim.milestones of optim.schedule=multistep must be epochs below epochs={config.epochs}, got "
            f"{optim.milestones}"
        )
    milestones = [round(epoch * steps_per_epoch) for epoch in optim.milestones]
    return partial(multistep, milestones=milestones, warmup=warmup, peak=peak, start=optim.warmup_lr)
