from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def same(one: Any, other: Any) -> bool:
    """Bit for bit, through containers."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(scope="session")
def assert_same_run() -> Callable[[Path, Path], None]:
    """``assert_same_run(run, other)``: equal weights, moments, average, position, generators and log at their ends."""
    from dmjd.parallel import store
    from dmjd.train import checkpoint

    def check(run: Path, other: Path) -> None:
        ends = [checkpoint.newest(path / "checkpoints") for path in (run, other)]
        one, two = (end for end in ends if end is not None)
        assert one.name == two.name
        assert same(store.read(one), store.read(two))
        states = [checkpoint.read_loop_state(end) for end in (one, two)]
        assert all(same(states[0][part], states[1][part]) for part in ("position", "random"))
        assert (run / "log.jsonl").read_bytes() == (other / "log.jsonl").read_bytes()

    return check
