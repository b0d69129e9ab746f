"""Runs that wait for data: how long, what ends them, and that what they save is what all ranks have."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmjd.data.shards.build import build_shards
from tests.compare import checkpoints, reason, rows, telling

Words = Callable[..., list[str]]
Launch = Callable[..., Any]
Same = Callable[..., None]
EVERY = ("batch_size=64", "log_every=2", "checkpoint_every=100", "ema_decay=0.9")  # 22 steps

BLOCKED = """
import ctypes
from dmjd.data.loader import StepBatches
load = StepBatches.load
def blocked(self, number):
    if number == {at} and os.environ.get("RANK", "0") == "{rank}":
        open({file!r}, "w").close()
        ctypes.CDLL(None).sleep(600)  # in C, as in a file system that does not answer
    return load(self, number)
StepBatches.load = blocked
"""


def until(true: Callable[[], bool], process: Any) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.01)


def run_to_the_end(command: list[str], launch: Launch) -> None:
    process = launch(command)
    process.join(60)
    assert process.exitcode == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny: Words, launch: Launch) -> Path:
    folder: Path = tmp_path_factory.mktemp("undisturbed") / "run"
    run_to_the_end(["pretrain", *tiny(folder, *EVERY)], launch)
    return folder


# The limit


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_never_comes_ends_the_run_and_leaves_the_stacks(
    workers: int, tmp_path: Path, tiny: Words, launch: Launch
) -> None:
    fault = telling(tmp_path / "said") + BLOCKED.format(at=2, rank=0, file=str(tmp_path / "blocked"))
    words = tiny(tmp_path / "run", *EVERY, f"workers={workers}", "data.timeout=0.02")
    process = launch(["pretrain", *words], fault, DMJD_EXIT_RECORD=str(tmp_path / "word"))
    process.join(30)
    assert process.exitcode == 2
    stacks = tmp_path / "run" / "stacks" / "rank-00000.txt"
    said = (tmp_path / "said").read_text()
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert line.startswith("error: no data arrived for 0.02 minute(s), which is data.timeout; ")
    assert str(stacks) in line
    assert "Traceback" not in said
    assert reason(tmp_path / "run")["reason"] == "error"
    assert (tmp_path / "word").read_text().startswith("error: no data arrived for 0.02 minute(s)")
    assert "in blocked" in stacks.read_text()
    assert stacks.read_text().count("loader worker") == workers


def test_images_that_arrive_slowly_are_progress(tmp_path: Path, tiny: Words, launch: Launch) -> None:
    slow = """
import time
import dmjd.data.loader as loader
read = loader.read_sample
def slowly(*arguments):
    time.sleep(0.02)  # 64 of them to a batch, which is above data.timeout
    return read(*arguments)
loader.read_sample = slowly
"""
    words = tiny(tmp_path / "run", *EVERY, "workers=1", "data.timeout=0.015", "time_budget=0:00:00")
    process = launch(["pretrain", *words], slow)
    process.join(60)
    assert (process.exitcode, reason(tmp_path / "run")["reason"]) == (0, "time")


def test_with_several_processes_it_is_below_their_own_limits(
    tmp_path: Path, tiny: Words, launch_world: Callable[..., list[Any]]
) -> None:
    words = tiny(tmp_path / "run", *EVERY, "engine=ddp", "data.timeout=3", "engine.step_timeout=3")
    processes = launch_world(2, ["pretrain", *words], telling(tmp_path / "said"))
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [2, 2]
    assert "data.timeout=3 must be below engine.step_timeout=3" in (tmp_path / "said").read_text()


# Requests to stop


@pytest.mark.parametrize(
    ("workers", "number", "at"),
    [(0, signal.SIGTERM, 5), (1, signal.SIGINT, 5), (2, signal.SIGTERM, 5), (1, signal.SIGTERM, 0)],
)
def test_a_run_that_waits_for_data_ends_within_five_seconds_of_a_signal(
    workers: int,
    number: signal.Signals,
    at: int,
    tmp_path: Path,
    tiny: Words,
    launch: Launch,
    undisturbed: Path,
    assert_same_run: Same,
) -> None:
    command = ["pretrain", *tiny(tmp_path / "run", *EVERY, f"workers={workers}")]
    file = tmp_path / "blocked"
    process = launch(command, BLOCKED.format(at=at, rank=0, file=str(file)))
    until(lambda: file.exists() and (tmp_path / "run" / "heartbeat").exists(), process)
    time.sleep(1)  # with workers the steps before are still to be taken
    os.kill(process.pid, number)
    process.join(5)
    assert process.exitcode == 0
    record = reason(tmp_path / "run")
    assert (record["reason"], record["detail"], record["step"]) == ("signal", f"{number.name} at rank 0", at)
    assert checkpoints(tmp_path / "run") == [at] * (at > 0)
    run_to_the_end(command, launch)
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_waits_for_a_shard_ends_within_five_seconds_of_a_signal(
    workers: int, tmp_path: Path, tiny: Words, launch: Launch, image_folder: Path
) -> None:
    root = tmp_path / "shards"
    build_shards(str(image_folder / "train"), str(root), workers=1)
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and never answers
        manifest = json.loads((root / "manifest.json").read_text())
        for shard in manifest["shards"]:
            shard["url"] = f"http://127.0.0.1:{server.getsockname()[1]}/{shard['url']}"
        (root / "manifest.json").write_text(json.dumps(manifest))
        data = ("data=shards", f"data.root={root}", "data.image_size=[16,16]", f"data.cache={tmp_path / 'cache'}")
        statistics = ("data.mean=[.5,.5,.5]", "data.std=[.5,.5,.5]", "batch_size=8", f"workers={workers}")
        process = launch(["pretrain", *tiny(tmp_path / "run", *data, *statistics)])
        until(lambda: bool(list((tmp_path / "cache").glob("*.part"))), process)
        until((tmp_path / "run" / "heartbeat" / "rank-00000.json").exists, process)
        os.kill(process.pid, signal.SIGTERM)
        process.join(5)
        assert (process.exitcode, reason(tmp_path / "run")["reason"]) == (0, "signal")


def test_a_stop_file_ends_a_run_that_waits_for_data(tmp_path: Path, tiny: Words, launch: Launch) -> None:
    file = tmp_path / "blocked"
    command = ["pretrain", *tiny(tmp_path / "run", *EVERY)]
    process = launch(command, BLOCKED.format(at=2, rank=0, file=str(file)))
    until(file.exists, process)
    (tmp_path / "run" / "stop").touch()
    process.join(5)
    assert (process.exitcode, reason(tmp_path / "run")["reason"]) == (0, "file")
    assert checkpoints(tmp_path / "run") == [2]


@pytest.mark.parametrize(("engine", "rank", "at"), [("ddp", 1, 5), ("fsdp", 0, 21)])  # 21: an evaluation would follow
@pytest.mark.slow
@pytest.mark.alone
def test_two_ranks_save_the_last_step_that_both_took(
    engine: str,
    rank: int,
    at: int,
    tmp_path: Path,
    tiny: Words,
    launch_world: Callable[..., list[Any]],
    assert_same_run: Same,
) -> None:
    file = tmp_path / "blocked"

    def start(name: str, fault: str = "") -> list[Any]:
        words = tiny(tmp_path / name, *EVERY, f"engine={engine}", "workers=1", "online_knn.every_epochs=1")
        return launch_world(2, ["pretrain", *words], fault)

    processes = start("run", BLOCKED.format(at=at, rank=rank, file=str(file)))
    until(file.exists, processes[0])
    time.sleep(1.5)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    begin = time.monotonic()
    for process in processes:
        process.join(20)
    assert time.monotonic() - begin < 5
    assert [process.exitcode for process in processes] == [0, 0]
    assert reason(tmp_path / "run")["step"] == at
    assert checkpoints(tmp_path / "run") == [at]
    for name in ("run", "oracle"):
        for process in (again := start(name)):
            process.join(60)
        assert [process.exitcode for process in again] == [0, 0]
    assert_same_run(tmp_path / "run", tmp_path / "oracle")


@pytest.mark.slow
def test_a_signal_during_an_evaluation_is_obeyed_and_the_next_launch_evaluates(
    tmp_path: Path, tiny: Words, launch: Launch, assert_same_run: Same
) -> None:
    file = tmp_path / "blocked"
    blocked = f"""
import ctypes
from dmjd.data.loader import EvaluationBatches
def block(self, number):
    open({str(file)!r}, "w").close()
    ctypes.CDLL(None).sleep(600)
EvaluationBatches.__getitem__ = block
"""
    words = (*EVERY, "epochs=2", "online_knn.every_epochs=1", "workers=1")
    process = launch(["pretrain", *tiny(tmp_path / "run", *words)], blocked)
    until(file.exists, process)
    os.kill(process.pid, signal.SIGTERM)
    process.join(5)
    assert process.exitcode == 0
    assert (reason(tmp_path / "run")["reason"], checkpoints(tmp_path / "run")) == ("signal", [22])
    for name in ("run", "oracle"):
        run_to_the_end(["pretrain", *tiny(tmp_path / name, *words)], launch)
    assert_same_run(tmp_path / "run", tmp_path / "oracle")
    assert [row["step"] for row in rows(tmp_path / "run") if "knn_top1" in row] == [22, 44]


# Shared memory and sockets


@pytest.mark.parametrize("command", ["shards build", pytest.param("pretrain", marks=pytest.mark.long)])
def test_a_long_tmpdir_is_not_too_long_for_the_sockets_of_workers(
    command: str, tmp_path: Path, tiny: Words, image_folder: Path
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    words = ["shards", "build", str(image_folder), str(tmp_path / "shards"), "workers=2"]
    if command == "pretrain":
        words = ["pretrain", *tiny(tmp_path / "run", *EVERY, "workers=1")]
    done = subprocess.run([sys.executable, "-m", "dmjd", *words], env={**os.environ, "TMPDIR": str(folder)}, timeout=60)
    assert done.returncode == 0


SMALL_SHM = """
import ctypes, subprocess
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x00020000):  # CLONE_NEWNS: mounts of its own
    raise OSError(ctypes.get_errno(), "unshare")
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size={size}", "tmpfs", "/dev/shm"], check=True)
"""


@pytest.fixture
def in_small_shm(launch: Launch, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """``in_small_shm(size, words, prelude="")``: exit code and standard error of a command whose /dev/shm is small."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("a small /dev/shm of its own needs root and mounts of its own")

    def run(size: str, words: list[str], prelude: str = "") -> tuple[int, str]:
        said = tmp_path / "said"
        said.unlink(missing_ok=True)
        process = launch(words, SMALL_SHM.format(size=size) + telling(said) + prelude)
        process.join(120)
        return process.exitcode, said.read_text()

    return run


@pytest.mark.slow
def test_a_small_shared_memory_is_an_error_before_workers_begin(
    tmp_path: Path, tiny: Words, in_small_shm: Callable[..., tuple[int, str]]
) -> None:
    code, said = in_small_shm("256k", ["pretrain", *tiny(tmp_path / "run", *EVERY, "workers=4")])
    assert code == 2
    assert said.startswith("error: workers=4 need 1 MiB of /dev/shm for their batches, and 0 MiB are free; set")
    assert said.count("\n") == 1
    code, _ = in_small_shm("256k", ["pretrain", *tiny(tmp_path / "run", *EVERY, "workers=0")])
    assert code == 0


@pytest.mark.slow
def test_a_feeder_thread_without_room_ends_the_run_with_its_reason(
    tmp_path: Path, tiny: Words, in_small_shm: Callable[..., tuple[int, str]]
) -> None:
    unchecked = "import dmjd.train.data_pipeline as pipeline; pipeline.check_shared_memory = lambda *arguments: None\n"
    words = ["pretrain", *tiny(tmp_path / "run", *EVERY, "workers=2", "batch_size=512")]
    code, said = in_small_shm("128k", words, unchecked)
    assert code == 2
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert "a loader worker cannot send a batch" in line
    assert "set fewer workers, or workers=0, or enlarge /dev/shm" in line
    assert "Traceback" not in said
    assert reason(tmp_path / "run")["reason"] == "error"
