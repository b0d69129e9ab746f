"""Learning-rate rules and schedules, as pure functions: resuming needs nothing but the step number."""

from __future__ import annotations

import math
from collections.abc import Sequence

REFERENCE_BATCH = 256
"""Base learning rates are quoted for this many images, as in MAE and in the paper's Eq. 4."""


def adaptive_lr(base_lr: float, unique_batch: int, m_corr: float, m_pred: float) -> float:
    """The paper's Eq. 4: ``base * (b_u * m_pred / m_corr) / 256``, with b_u images that are distinct."""
    return base_lr * unique_batch * (m_pred / m_corr) / REFERENCE_BATCH


def classic_lr(base_lr: float, unique_batch: int, views: int) -> float:
    """The linear rule over all views, ``base * K * b_u / 256`` (the paper's baseline in its LR ablation)."""
    return base_lr * views * unique_batch / REFERENCE_BATCH


def cosine(step: int, *, total: int, warmup: int, peak: float, floor: float = 0.0, start: float = 0.0) -> float:
    """Linear warm-up from ``start`` over ``warmup`` steps, then half a cosine from ``peak`` to ``floor`` at ``total``.

    ``step`` counts optimizer steps from 0, so the value is the one to use *for* that step.
    """
    if step < warmup:
        return _warm_up(step, warmup, start, peak)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def multistep(
    step: int, *, milestones: Sequence[int], warmup: int, peak: float, start: float = 0.0, factor: float = 0.1
) -> float:
    """Linear warm-up as in :func:`cosine`, then ``peak``, times ``factor`` from each of ``milestones`` (steps) on."""
    if step < warmup:
        return _warm_up(step, warmup, start, peak)
    return peak * factor ** sum(milestone <= step for milestone in milestones)


def _warm_up(step: int, warmup: int, start: float, peak: float) -> float:
    return start + (peak - start) * step / warmup
