"""The spike rule against its stated rate of false alarms, and against losses that should and should not raise one."""

from __future__ import annotations

from math import erf, sqrt

import numpy as np
import pytest

from dmjd.train.guard import SpikeRule


def alarms(losses: np.ndarray, height: float, steps: int, window: int = 100) -> int:
    """How often ``steps`` high losses in a row end."""
    rule = SpikeRule(height, steps, window)
    count = 0
    for loss in losses.tolist():
        rule.add(loss)
        count += rule.spike
    return count


@pytest.mark.parametrize(("height", "steps"), [(2.0, 1), (1.5, 2), (1.0, 3)])
def test_independent_normal_losses_give_the_stated_rate(height: float, steps: int) -> None:
    count = 40_000
    losses = 3 + 0.2 * np.random.default_rng(0).standard_normal(count)
    tail = (1 - erf(height / sqrt(2))) / 2
    # A window of 400 estimates the level to 6 % and the spread to 5 % of itself, which moves a tail by a tenth or two.
    assert alarms(losses, height, steps, window=400) / count == pytest.approx(tail**steps, rel=0.25)


def test_the_default_heights_are_silent_over_a_long_falling_curve_with_heavy_tails() -> None:
    rng = np.random.default_rng(1)
    steps = np.arange(100_000)
    curve = 0.5 + 0.5 * np.exp(-steps / 20_000)
    noise = 0.02 * rng.standard_t(4, steps.size)
    assert alarms(curve + noise, height=6, steps=1) > 0, "single losses of such tails do go that high"
    assert alarms(curve + noise, height=6, steps=3) == 0


@pytest.mark.parametrize("height", [3.0, 6.0])
def test_a_spike_is_seen_at_its_third_step_in_all_of_many_runs(height: float) -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        losses = 0.4 + 0.01 * rng.standard_normal(200)
        rule = SpikeRule(height, 3, 100)
        assert sum(rule.add(loss) and rule.spike for loss in losses.tolist()) == 0
        seen = []
        for rise in (0.15, 0.3, 0.5):
            rule.add(0.4 + rise)
            seen.append(rule.spike)
        assert seen == [False, False, True]


def test_nothing_is_high_before_the_window_is_full() -> None:
    rule = SpikeRule(3, 1, 50)
    assert not any(rule.add(10.0**step) for step in range(50))


def test_a_level_that_stays_is_the_new_level() -> None:
    rng = np.random.default_rng(3)
    rule = SpikeRule(6, 3, 50)
    for loss in 1 + 0.1 * rng.standard_normal(100):
        rule.add(loss)
    high = [rule.add(loss) for loss in 4 + 0.1 * rng.standard_normal(60)]
    assert all(high[:10])
    assert not any(high[40:])


def test_what_a_loss_that_is_low_does() -> None:
    rule = SpikeRule(6, 1, 20)
    for loss in [1.0, 1.1, 0.9, 1.0] * 5:
        rule.add(loss)
    assert not rule.add(-100.0)


def test_a_rule_goes_on_from_its_state_under_another_window() -> None:
    rng = np.random.default_rng(4)
    first, second = SpikeRule(2, 2, 30), SpikeRule(2, 2, 30)
    losses = rng.standard_normal(200).tolist()
    for loss in losses[:100]:
        first.add(loss)
    second.load_state_dict(first.state_dict())
    for loss in losses[100:]:
        assert first.add(loss) == second.add(loss)
        assert first.spike == second.spike
    shorter = SpikeRule(2, 2, 10)
    shorter.load_state_dict(first.state_dict())
    assert shorter.state_dict()["losses"] == losses[-10:]
