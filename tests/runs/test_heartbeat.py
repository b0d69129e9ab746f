from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dmjd.runs.heartbeat import FOLDER, Beat, Heartbeat, forget_ranks, ranks_with_heartbeat, read_heartbeats


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_last_beat_of_every_rank_is_read_back(tmp_path: Path) -> None:
    before = time.time()
    for rank in (3, 0):
        with Heartbeat(tmp_path, rank) as heartbeat:
            heartbeat.beat(7, "data", 1.5, 0.5)
            heartbeat.beat(8, "stop", 2.5, 0.5)
    first, second = read_heartbeats(tmp_path)
    assert (first.rank, second.rank) == (0, 3)
    assert (second.step, second.phase, second.seconds, second.lost, second.pid) == (8, "stop", 2.5, 0.5, os.getpid())
    assert before <= second.time <= time.time()
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == ["rank-00000.json", "rank-00003.json"]


def test_files_follow_within_a_second_and_at_most_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[Beat] = []
    monkeypatch.setattr(
        "dmjd.runs.heartbeat.replace_file", lambda path, content: writes.append(Beat(**json.loads(content)))
    )
    begin = time.monotonic()
    with Heartbeat(tmp_path, 0) as heartbeat:
        heartbeat.beat(0, "start", 0, 0)
        until(lambda: bool(writes))
        for step in range(1000):
            heartbeat.beat(step, "forward", 0, 0)
        until(lambda: writes[-1].phase == "forward")
    assert writes[-1].step == 999, "a rank that hangs is seen in the phase that it hangs in"
    assert len(writes) <= 2 + time.monotonic() - begin


def test_a_rank_killed_between_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    program = """
import itertools, sys
from pathlib import Path
import dmjd.runs.heartbeat as heartbeat
heartbeat.INTERVAL = 1e-4
with heartbeat.Heartbeat(Path(sys.argv[1]), 0) as beats:
    for step in itertools.count():
        beats.beat(step, "step", step, 0)
"""
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    until(lambda: bool(read_heartbeats(tmp_path)) and read_heartbeats(tmp_path)[0].step > 100)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (beat,) = read_heartbeats(tmp_path)
    assert beat.phase == "step"
    assert beat.pid == process.pid


def test_a_disk_that_refuses_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dmjd.runs.heartbeat.replace_file", refuse)
    monkeypatch.setattr("dmjd.runs.heartbeat.INTERVAL", 1e-3)
    with Heartbeat(tmp_path, 0) as heartbeat:
        heartbeat.beat(0, "start", 0, 0)
        until(lambda: bool(caplog.records))
        heartbeat.beat(1, "stop", 0, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text


def test_ranks_of_a_larger_launch_are_forgotten(tmp_path: Path) -> None:
    for rank in range(4):
        with Heartbeat(tmp_path, rank) as heartbeat:
            heartbeat.beat(0, "start", 0, 0)
    forget_ranks(tmp_path, 2)
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [0, 1]


@pytest.mark.parametrize("left", ["", "{}", '{"rank": 0, "st'])
def test_what_a_node_without_power_leaves_is_passed_over_and_forgotten_like_any_other(
    tmp_path: Path, left: str
) -> None:
    assert read_heartbeats(tmp_path) == []
    with Heartbeat(tmp_path, 1) as heartbeat:
        heartbeat.beat(0, "start", 0, 0)
    for rank in (0, 2):
        (tmp_path / FOLDER / f"rank-{rank:05d}.json").write_text(left)
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [1]
    forget_ranks(tmp_path, 2)
    assert ranks_with_heartbeat(tmp_path) == [0, 1]


def test_a_launch_is_not_refused_for_it(
    finished_run: Path, tmp_path: Path, tiny: Callable[..., list[str]], dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / FOLDER / "rank-00000.json").write_text("")
    code, out, error = dmjd("pretrain", *tiny(run))
    assert code == 0, error
    assert "finished" in out
    assert [beat.phase for beat in read_heartbeats(run)] == ["stop"]
