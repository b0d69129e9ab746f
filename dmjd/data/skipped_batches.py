"""Batches that a run skips. Optimizer steps stay consecutive; the numbers of the batches they read do not.

Windows are half-open intervals ``(begin, end)`` of batch numbers, sorted, disjoint and not adjacent.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmjd.data.batch import Batch
from dmjd.data.loader import Ahead, TrainingBatches
from dmjd.data.substitution import Substitution

Windows = tuple[tuple[int, int], ...]


def batch_of(step: int, windows: Windows) -> int:
    """The number of the batch that optimizer step ``step`` reads, both counted from 0."""
    batch = step
    for begin, end in windows:
        if batch < begin:
            break
        batch += end - begin
    return batch


def add_window(windows: Windows, begin: int, end: int) -> Windows:
    """``windows`` with batches ``begin .. end - 1`` added."""
    assert 0 <= begin < end
    merged: list[tuple[int, int]] = []
    for low, high in sorted((*windows, (begin, end))):
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


class SkippedBatches:
    """``batches`` by optimizer step, without those in ``windows``."""

    def __init__(self, batches: TrainingBatches, windows: Windows) -> None:
        self._batches, self._windows = batches, windows

    def begin(self, step: int, workers: int) -> int:
        """See :class:`dmjd.data.loader.TrainingBatches`."""
        return self._batches.begin(batch_of(step, self._windows), workers)

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        """See :class:`dmjd.data.loader.Batches`."""
        return self._batches.load(batch_of(number, self._windows))


class SkippedBatchesAhead:
    """Passes optimizer steps to ``ahead`` as batch numbers, without those in ``windows``."""

    def __init__(self, ahead: Ahead, windows: Windows) -> None:
        self._ahead, self._windows = ahead, windows

    def start(self, step: int, stop: int) -> None:
        """See :class:`dmjd.data.loader.Ahead`, as for the others."""
        self._ahead.start(batch_of(step, self._windows), batch_of(stop, self._windows))

    def reach(self, step: int) -> None:
        self._ahead.reach(batch_of(step, self._windows))

    def close(self) -> None:
        self._ahead.close()
