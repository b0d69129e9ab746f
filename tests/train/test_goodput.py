"""What a run's time went into, over launches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.compose import compose
from dmjd.parallel.single import SingleEngine
from dmjd.runs import checkpoint
from dmjd.runs.heartbeat import read_heartbeats
from dmjd.train.loop import pretrain
from dmjd.train.stopwatch import ACCOUNTS

Words = Callable[..., list[str]]


def last_timing(run: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((run / "timing.jsonl").read_text().splitlines()[-1])
    return row


def test_work_that_a_crash_threw_away_is_counted_once(
    tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config = compose("pretrain", tiny(run, "checkpoint_every=4", "keep_checkpoints=9", "log_every=1"))
    step = SingleEngine.step
    for crash in (7, 3, None):  # steps of each launch; the second starts at 4 and ends at 7 as well
        done = iter(range(100))

        def dies(self: SingleEngine, *args: Any, crash: int | None = crash, done: Any = done) -> Any:
            if next(done) == crash:
                raise KeyboardInterrupt
            return step(self, *args)

        monkeypatch.setattr(SingleEngine, "step", dies)
        if crash is None:
            before = read_heartbeats(run)[0]
            pretrain(config)
        else:
            with pytest.raises(KeyboardInterrupt):
                pretrain(config)
            (beat,) = read_heartbeats(run)
            assert (beat.step, beat.phase, beat.rank) == (7, "stop", 0)
    state = checkpoint.read_loop_state(run / "checkpoints" / "step-00000004")["journal"]
    row = last_timing(run)
    assert row["lost_seconds"] == pytest.approx(before.lost + before.seconds - state["seconds"])
    assert before.lost > 0
    assert sum(row[f"{account}_seconds"] for account in ACCOUNTS) - row["lost_seconds"] == pytest.approx(
        row["seconds"], abs=0.1
    )
    (beat,) = read_heartbeats(run)
    assert (beat.step, beat.phase) == (11, "stop")
    assert row["checkpoint_seconds"] > 0
    assert row["training_seconds"] > 0


def test_a_row_of_timing_counts_images_and_views(finished_run: Path) -> None:
    row = last_timing(finished_run)
    assert row["views_per_second"] == pytest.approx(2 * row["images_per_second"])
    assert row["ete"] == pytest.approx(
        2 * json.loads((finished_run / "log.jsonl").read_text().splitlines()[-1])["epoch"]
    )
    assert "mfu_percent" not in row, "a CPU has no peak to compare with"
    assert not torch.cuda.is_available() or "memory_allocated_gib" in row
