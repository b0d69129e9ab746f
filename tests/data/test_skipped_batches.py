"""Skipped batches, against a walk along all batches without them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from dmjd.data.batch import Batch
from dmjd.data.loader import make_loader
from dmjd.data.skipped_batches import SkippedBatches, SkippedBatchesAhead, Windows, add_window, batch_of
from dmjd.data.substitution import Substitution


def walk(gone: set[int], count: int) -> list[int]:
    """The first ``count`` batch numbers that are not in ``gone``."""
    return [number for number in range(count + len(gone)) if number not in gone][:count]


@pytest.mark.parametrize("seed", range(20))
def test_steps_read_all_other_batches_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    windows: Windows = ()
    gone: set[int] = set()
    for _ in range(rng.integers(0, 8)):
        begin = int(rng.integers(0, 60))
        end = begin + int(rng.integers(1, 12))
        windows = add_window(windows, begin, end)
        gone |= set(range(begin, end))
        assert sum(high - low for low, high in windows) == len(gone)
        assert all(low[1] < high[0] for low, high in pairwise(windows)), "sorted and apart"
    assert [batch_of(step, windows) for step in range(80)] == walk(gone, 80)


def test_the_order_of_windows_does_not_matter() -> None:
    assert add_window(add_window((), 3, 5), 7, 9) == add_window(add_window((), 7, 9), 3, 5) == ((3, 5), (7, 9))
    assert add_window(((3, 5), (7, 9)), 5, 7) == ((3, 9),)


class Numbered:
    """Batch ``n`` holds sample ``n``."""

    def begin(self, step: int, workers: int) -> int:
        self.begun = step
        return workers

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        return Batch.empty(1, [(1, 1)], 1)._replace(sample_ids=torch.tensor([number])), ()


class Recorded:
    """Keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def start(self, step: int, stop: int) -> None:
        self.calls.append(("start", step, stop))

    def reach(self, step: int) -> None:
        self.calls.append(("reach", step, 0))

    def close(self) -> None:
        self.calls.append(("close", 0, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_skips_the_windows_and_reports_progress(workers: int) -> None:
    windows, ahead = ((2, 4), (5, 6)), Recorded()
    batches = Numbered()
    loader = make_loader(
        SkippedBatches(batches, windows), 2, 5, workers, pin_memory=False, ahead=SkippedBatchesAhead(ahead, windows)
    )
    assert batches.begun == 4
    assert [batch.sample_ids.item() for batch in loader] == [4, 6, 7]
    reached = [("reach", number, 0) for number in (4, 6, 7)]
    assert ahead.calls == [("start", 4, 8), *reached, ("close", 0, 0)]
