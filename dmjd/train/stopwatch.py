"""Wall time of a run: how long each logged lap took, and what all of it went into."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from dmjd.runs.heartbeat import PHASES

T = TypeVar("T")

_ACCOUNTS = dict(zip(PHASES, PHASES, strict=True)) | {"forward": "training", "step": "training", "stop": "start"}

ACCOUNTS = ("training", "start", "data", "checkpoint", "evaluate", "lost")
"""What seconds go into. start: from launch to the end of its first step, compilation included; data: waiting for it;
checkpoint: the stall, not what is written meanwhile; lost: work that a crash or a rollback threw away."""


class Stopwatch:
    """Wall time of the run, restarts included, and how much of each lap went into waiting for data."""

    def __init__(self) -> None:
        self._begin = self._lap = self._entered = time.perf_counter()
        self._waited = 0.0
        self._phase, self._warm = PHASES[0], False
        self._spent = dict.fromkeys(ACCOUNTS, 0.0)
        self.listener: Callable[[str], object] = lambda phase: None
        """Told the phase whenever one begins."""

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, over all launches, without those lost."""
        return time.perf_counter() - self._begin

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by account (see :data:`ACCOUNTS`), over all launches, up to now."""
        self._charge()
        return dict(self._spent)

    def enter(self, phase: str) -> None:
        """From now on the run is in ``phase``, one of :data:`~dmjd.runs.heartbeat.PHASES`."""
        self._charge()
        self._warm |= self._phase == "step"  # the first step of a launch compiles, and starts workers and libraries
        self._phase = phase
        self.listener(phase)

    def _charge(self) -> None:
        now = time.perf_counter()
        account = _ACCOUNTS[self._phase]
        if not self._warm and account in ("training", "data"):
            account = "start"
        self._spent[account] += now - self._entered
        self._entered = now

    def resume(self, elapsed: float, spent: Mapping[str, float]) -> None:
        """Count on from a checkpoint's ``elapsed`` and ``spent``, what this launch has taken so far included."""
        self._begin -= elapsed
        for account, seconds in spent.items():
            self._spent[account] += seconds

    def rewind(self, elapsed: float, spent: Mapping[str, float]) -> None:
        """Back to a checkpoint within a launch: what came after it is lost."""
        lost = self._spent["lost"] + self.elapsed - elapsed
        self._begin = time.perf_counter() - elapsed
        self._charge()
        self._spent |= {**spent, "lost": lost}

    def lose(self, seconds: float) -> None:
        """An earlier launch worked so long in vain."""
        self._spent["lost"] += max(seconds, 0.0)

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and those of them spent in :meth:`waiting`."""
        now = time.perf_counter()
        seconds, waited = now - self._lap, self._waited
        self._lap, self._waited = now, 0.0
        return seconds, waited

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """``items``, counting the time that each takes to come: the phase is "data", then "forward"."""
        iterator = iter(items)
        while True:
            begin = time.perf_counter()
            self.enter("data")
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - begin
            self.enter("forward")
            yield item
