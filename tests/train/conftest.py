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
    from dmjd.train.checkpoint import newest

    def check(run: Path, other: Path) -> None:
        ends = [newest(path / "checkpoints") for path in (run, other)]
        assert all(ends)
        assert ends[0].name == ends[1].name  # type: ignore[union-attr]
        for name in ("model.pt", "optimizer.pt", "loop.pt"):
            states = [torch.load(end / name, weights_only=True) for end in ends]  # type: ignore[operator]
            if name == "loop.pt":
                states = [{part: state.get(part) for part in ("ema", "position", "random")} for state in states]
            assert same(*states), name
        assert (run / "log.jsonl").read_bytes() == (other / "log.jsonl").read_bytes()

    return check
