"""Wall time of a run: of every logged lap, and in total by account."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from dmjd.runs.heartbeat import PHASES

T = TypeVar("T")

_ACCOUNTS = dict(zip(PHASES, PHASES, strict=True)) | {"forward": "training", "step": "training", "stop": "start"}

ACCOUNTS = ("training", "start", "data", "checkpoint", "evaluate", "lost")
"""Accounts of wall time. start: from the launch to the end of its first step, with compilation; data: waiting for it;
checkpoint: the time that training waits, not asynchronous writing; lost: work discarded by a crash or a rollback."""


class Stopwatch:
    """Wall time of a run over all launches, by account, and the time of each lap that was spent waiting for data."""

    def __init__(self) -> None:
        self._begin = self._entered = time.perf_counter()
        self._waited = self._evaluated = 0.0  # seconds of this launch
        self._lap = self._marked = (self._begin, 0.0)  # the time without evaluations, and the part spent waiting
        self._phase, self._warm = PHASES[0], False
        self._spent = dict.fromkeys(ACCOUNTS, 0.0)
        self.on_phase: Callable[[str], object] = lambda phase: None
        """Called with the phase whenever one begins."""

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, over all launches, without lost ones."""
        return time.perf_counter() - self._begin

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by account (see :data:`ACCOUNTS`), over all launches, up to now."""
        self._charge()
        return dict(self._spent)

    def enter(self, phase: str) -> None:
        """Begin ``phase``, one of :data:`~dmjd.runs.heartbeat.PHASES`."""
        self._charge()
        self._warm |= self._phase == "step"  # the first step of a launch compiles, and starts workers and libraries
        self._phase = phase
        self.on_phase(phase)

    def _charge(self) -> None:
        now = time.perf_counter()
        account = _ACCOUNTS[self._phase]
        if not self._warm and account in ("training", "data"):
            account = "start"
        self._spent[account] += now - self._entered
        self._evaluated += (now - self._entered) * (account == "evaluate")
        self._entered = now

    def resume(self, elapsed: float, spent: Mapping[str, float]) -> None:
        """Add a checkpoint's ``elapsed`` and ``spent`` to the time of this launch so far."""
        self._begin -= elapsed
        for account, seconds in spent.items():
            self._spent[account] += seconds

    def rewind(self, elapsed: float, spent: Mapping[str, float]) -> None:
        """Return to a checkpoint within a launch; the time after it is lost."""
        lost = self._spent["lost"] + self.elapsed - elapsed
        self._begin = time.perf_counter() - elapsed
        self._charge()
        self._spent |= {**spent, "lost": lost}

    def lose(self, seconds: float) -> None:
        """Count ``seconds`` of an earlier launch as lost."""
        self._spent["lost"] += max(seconds, 0.0)

    def mark(self) -> None:
        """Mark the end of a step: the numbers of some steps are read in the next one, those of others at once."""
        self._charge()
        self._marked = self._entered - self._evaluated, self._waited

    def lap(self) -> tuple[float, float]:
        """Seconds from the mark of the last lap to the last mark, without evaluations, and the part of them spent
        waiting in :meth:`waiting`."""
        before, self._lap = self._lap, self._marked
        return self._lap[0] - before[0], self._lap[1] - before[1]

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """Yield ``items`` and count the time waiting for each: the phase is "data", then "forward"."""
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
