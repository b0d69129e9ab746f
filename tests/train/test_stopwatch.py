"""What a run's time goes into."""

from __future__ import annotations

import time

import pytest

from dmjd.train.stopwatch import ACCOUNTS, Stopwatch


class Clock:
    """A clock that goes when it is told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def walk(watch: Stopwatch, clock: Clock, *stays: tuple[str, float]) -> None:
    for phase, seconds in stays:
        watch.enter(phase)
        clock.now += seconds


STEP = (("data", 1.0), ("forward", 4.0), ("step", 2.0))


def test_everything_up_to_the_end_of_the_first_step_is_start(clock: Clock) -> None:
    watch = Stopwatch()
    clock.now += 10.0
    walk(watch, clock, *STEP, *STEP, *STEP, ("checkpoint", 5.0), ("evaluate", 3.0), ("data", 0.5))
    expected = {"training": 12.0, "start": 17.0, "data": 2.5, "checkpoint": 5.0, "evaluate": 3.0, "lost": 0.0}
    assert watch.spent == expected
    assert watch.elapsed == sum(expected.values())


def test_the_first_checkpoint_of_a_launch_is_no_start(clock: Clock) -> None:
    watch = Stopwatch()
    walk(watch, clock, *STEP, ("checkpoint", 5.0), *STEP)
    assert watch.spent["checkpoint"] == 5.0
    assert watch.spent["start"] == 7.0
    assert watch.spent["training"] == 6.0


def test_a_restart_counts_on(clock: Clock) -> None:
    first = Stopwatch()
    walk(first, clock, *STEP, *STEP)
    saved = first.elapsed, first.spent
    clock.now += 1e6  # the queue
    second = Stopwatch()
    clock.now += 3.0
    second.resume(*saved)
    second.lose(2.0)
    walk(second, clock, *STEP, *STEP)
    assert second.elapsed == 14.0 + 3.0 + 14.0
    assert second.spent == {
        "training": 12.0, "start": 17.0, "data": 2.0, "checkpoint": 0.0, "evaluate": 0.0, "lost": 2.0,
    }  # fmt: skip


def test_a_lap_ends_at_its_step_and_has_no_evaluation(clock: Clock) -> None:
    watch = Stopwatch()
    laps = []
    for step in range(1, 7):
        walk(watch, clock, *STEP)
        if step not in (1, 4):  # the numbers of a step before an evaluation are read before the next step
            laps.append(watch.lap())
        watch.mark()
        if step == 3:
            laps.append(watch.lap())
            walk(watch, clock, ("evaluate", 50.0))
    assert laps == [(7.0, 0.0)] * 5


def test_a_rollback_loses_what_came_after_the_checkpoint(clock: Clock) -> None:
    watch = Stopwatch()
    walk(watch, clock, *STEP, *STEP)
    saved = watch.elapsed, watch.spent
    for expected in (7.0, 14.0):  # the second rollback remembers the first
        walk(watch, clock, *STEP)
        watch.rewind(*saved)
        assert watch.elapsed == saved[0]
        assert watch.spent == {**saved[1], "lost": expected}
    walk(watch, clock, *STEP)
    assert watch.spent["training"] == saved[1]["training"] + 6.0


def test_a_listener_hears_each_phase(clock: Clock) -> None:
    watch = Stopwatch()
    heard: list[str] = []
    watch.on_phase = heard.append
    for _ in watch.waiting([1, 2]):
        watch.enter("step")
    assert heard == ["data", "forward", "step", "data", "forward", "step", "data"]
    assert set(watch.spent) == set(ACCOUNTS)
