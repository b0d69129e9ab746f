"""Watching a few steps of a run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dmjd.cli import main
from dmjd.errors import ConfigError
from dmjd.train.profiler import StepRange

Words = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("10-14", r"profile must be steps:FIRST-LAST, such as steps:10-14, got '10-14'"),
        ("steps:3", r"profile must be steps:FIRST-LAST"),
        ("steps:-3-5", r"profile must be steps:FIRST-LAST"),
        ("steps:0-4", r"profile=steps:0-4 must name steps from 1 on"),
        ("steps:5-4", r"profile=steps:5-4 must name steps from 1 on, the first before the last"),
        ("steps:18-21", r"profile=steps:18-21 exceeds the 20 steps of the run"),
    ],
)
def test_a_malformed_window_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StepRange.parse(text, total_steps=20)


def test_a_window_counts_from_1_and_holds_its_ends() -> None:
    assert StepRange.parse("steps:1-20", total_steps=20) == (1, 20)
    assert StepRange.parse("steps:7-7", total_steps=20) == (7, 7)


def test_a_run_refuses_before_it_touches_its_folder(
    tiny: Words, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", *tiny(tmp_path / "run"), "profile=steps:9"]) == 2
    assert "profile must be steps:FIRST-LAST" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("window", ["steps:3-4", "steps:10-11"])  # the latter ends with the run
def test_the_trace_holds_the_steps_of_the_window(tiny: Words, tmp_path: Path, window: str) -> None:
    run = tmp_path / "run"
    assert main(["pretrain", *tiny(run), f"profile={window}"]) == 0
    name = f"{window.replace(':', '-')}-rank-00000"
    assert sorted(path.name for path in (run / "profile").iterdir()) == [f"{name}.json.gz", f"{name}.txt"]
    events = json.loads(gzip.decompress((run / "profile" / f"{name}.json.gz").read_bytes()))["traceEvents"]
    updates = [event for event in events if event.get("name", "").startswith("Optimizer.step#AdamW")]
    assert len(updates) == 2
    assert "aten::addmm" in (run / "profile" / f"{name}.txt").read_text()
