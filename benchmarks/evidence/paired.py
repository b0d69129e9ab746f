"""Differences of two arms that were trained from the same seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import optimize, stats

CONFIDENCE, POWER = 0.95, 0.8
HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot tell"


@dataclass(frozen=True)
class Difference:
    """Mean difference of pairs, its standard error and 95 % interval, and the smallest difference that the test finds
    with power .8."""

    mean: float
    error: float
    low: float
    high: float
    smallest: float
    pairs: int


def difference(first: Sequence[float], second: Sequence[float], overlap: float = 0.0) -> Difference:
    """The paired t interval of ``first - second``, at least two pairs.

    ``overlap``: test images per training image where the pairs are folds of the same images, whose training images
    overlap; the variance of the mean is then that of Nadeau and Bengio (2003), 1 / pairs + ``overlap`` times that of a
    pair. 0 for independent pairs.
    """
    values = [a - b for a, b in zip(first, second, strict=True)]
    pairs, mean = len(values), math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (pairs - 1)
    error = math.sqrt(variance * (1 / pairs + overlap))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1)) * error
    return Difference(mean, error, mean - half, mean + half, _effect(pairs) * error, pairs)


def between(first: Difference, second: Difference) -> tuple[float, float]:
    """The 95 % interval of ``first.mean - second.mean``, two experiments without common seeds (Welch's t)."""
    variances = [each.error**2 for each in (first, second)]
    squares = [variance**2 / (each.pairs - 1) for variance, each in zip(variances, (first, second), strict=True)]
    degrees = sum(variances) ** 2 / sum(squares)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees)) * math.sqrt(sum(variances))
    return first.mean - second.mean - half, first.mean - second.mean + half


def _effect(pairs: int) -> float:
    """The effect in standard errors that a two-sided paired t test finds with :data:`POWER`; a finding of the wrong
    sign, of a probability below 1e-3 then, is not counted."""
    degrees = pairs - 1
    bound = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))

    def excess(effect: float) -> float:
        return float(stats.nct.sf(bound, degrees, effect)) - POWER

    high = bound
    while excess(high) < 0:
        high *= 1.25
    return float(optimize.brentq(excess, 0.0, high))


def verdict(found: Difference, expect: str, within: float) -> str:
    """``expect="higher"``: holds if the interval is above 0, and does not if it is below. "equal": holds if it is
    inside +-``within``, and does not if it is outside."""
    if expect == "higher":
        return HOLDS if found.low > 0 else FAILS if found.high < 0 else OPEN
    if -within <= found.low and found.high <= within:
        return HOLDS
    return FAILS if found.low > within or found.high < -within else OPEN
