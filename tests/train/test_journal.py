from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from dmjd.compose import compose
from dmjd.parallel.world import alone
from dmjd.runs.folder import RunFolder
from dmjd.train.guard import StepNumbers
from dmjd.train.journal import Journal, steps_per_row
from dmjd.train.stopwatch import Stopwatch
from dmjd.train.throughput import Throughput

Laps = list[tuple[float, float]]


class Told(Stopwatch):
    """A stopwatch that says what it is told: seconds and seconds waited of each lap."""

    def __init__(self, laps: Laps) -> None:
        super().__init__()
        self._laps = iter(laps)

    def lap(self) -> tuple[float, float]:
        return next(self._laps)


@pytest.fixture
def warnings_of(
    tmp_path: Path, tiny: Callable[..., list[str]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """``warnings_of(laps, workers)``: what a run of so many laps says."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))

    def run(laps: Laps, workers: int = 2) -> list[str]:
        config = compose("pretrain", tiny(tmp_path / "run", "log_every=1", f"workers={workers}"))
        folder = RunFolder(tmp_path / "run")
        folder.create()
        world = alone(torch.device("cpu"))
        journal = Journal(config, 99, 9, world, lambda: Throughput(views=2, device=world.device))
        journal.clock = Told(laps)
        with caplog.at_level(logging.WARNING, logger="dmjd"), ExitStack() as stack:
            journal.open(folder, 0)
            stack.callback(journal.close)
            for step in range(1, len(laps) + 1):
                journal.log_step(step, StepNumbers({"loss": 1.0}, 1.0, applied=1.0), lr=0.1)
        return [record.getMessage() for record in caplog.records]

    return run


def test_waiting_for_data_is_warned_of_once_with_the_workers_that_would_hide_it(
    warnings_of: Callable[..., list[str]],
) -> None:
    (sentence,) = warnings_of([(10.0, 9.0), (10.0, 0.5), (10.0, 5.0), (10.0, 5.0)])
    assert sentence == "50 % of the time is spent waiting for data, with workers=2; set workers=4"


def test_the_start_of_the_workers_and_a_short_wait_are_no_news(warnings_of: Callable[..., list[str]]) -> None:
    assert not warnings_of([(10.0, 9.0), (10.0, 0.9), (10.0, 0.9)])


def test_more_workers_than_processors_are_no_advice(warnings_of: Callable[..., list[str]]) -> None:
    (sentence,) = warnings_of([(10.0, 0.0), (10.0, 9.0)], workers=4)
    assert "set workers=40, but this process may use 16 CPU(s) only" in sentence


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (399, 1), (900, 4), (20_000, 100), (10**6, 100)])
def test_rows_are_about_200_and_at_most_100_steps(steps: int, every: int) -> None:
    assert steps_per_row(steps) == every
