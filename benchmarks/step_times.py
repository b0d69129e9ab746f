"""Duration of each step, and of each rank's own work in it."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from dmjd.parallel.world import World

Moment = float | torch.cuda.Event


class StepTimes:
    """Times of consecutive steps by the device's clock, recorded as events: the host does not wait.

    A step lasts from one end to the next, so time in which the device is idle between steps counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begins: list[Moment] = []
        self._forwards: list[Moment] = []
        self._ends = [self._now()]

    def _now(self) -> Moment:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """The batch has arrived."""
        self._begins.append(self._now())

    def forward(self) -> None:
        """The losses of a micro-batch are computed; the last of a step counts."""
        self._forwards[len(self._begins) - 1 :] = [self._now()]

    def end(self) -> None:
        """The weights are updated."""
        self._ends.append(self._now())

    def milliseconds(self) -> list[float]:
        """Of every step; the device must be idle."""
        return [_between(*pair) for pair in zip(self._ends[:-1], self._ends[1:], strict=True)]

    def own_milliseconds(self) -> list[float]:
        """Of every step, from its beginning to its losses: a rank's own work, unless forward gathers parameters."""
        return [_between(*pair) for pair in zip(self._begins, self._forwards, strict=True)]


def _between(begin: Any, end: Any) -> float:  # both of one type of Moment
    return begin.elapsed_time(end) if isinstance(begin, torch.cuda.Event) else 1000 * (end - begin)


def spread(times: StepTimes, wait_percent: float, gathers: bool, world: World) -> dict[str, Any]:
    """Fastest, median and slowest step, each as slow as its slowest rank, and what every rank took. Collective.

    Args:
        wait_percent: share of the steps' time that this rank waited for data.
        gathers: whether a forward pass waits for the other ranks; no rank's own work is known then.
    """
    steps = times.milliseconds()
    mine: dict[str, Any] = {
        "median_ms": median(steps),
        "slowest_ms": max(steps),
        "own_ms": None if gathers else median(times.own_milliseconds()),
        "data_wait_percent": wait_percent,
    }
    slowest = [max(ranks) for ranks in zip(*world.gather(steps), strict=True)]
    ranks = world.gather(mine)
    return {
        "fastest_ms": min(slowest),
        "median_ms": median(slowest),
        "slowest_ms": max(slowest),
        "data_wait_percent": max(rank["data_wait_percent"] for rank in ranks),
        "ranks": ranks,
    }
