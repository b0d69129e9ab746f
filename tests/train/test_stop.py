"""Asking a run to stop or to save: real signals, files and clocks, to one process and to several."""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dmjd.train.loop as loop
import dmjd.train.stop as stop
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError, DataError
from dmjd.parallel.world import alone
from dmjd.train.stop import ASKS, Requests, deadline_of, seconds_of
from tests.compare import checkpoints, reason, rows, telling

Words = Callable[..., list[str]]
Launch = Callable[..., Any]
Same = Callable[[Path, Path], None]
CPU = torch.device("cpu")
EVERY = ("batch_size=64", "log_every=2", "checkpoint_every=100", "ema_decay=0.9")  # 22 steps
STEPS = 22


# Times


@pytest.mark.parametrize(
    ("text", "seconds"), [("0:00:00", 0), ("11:50:00", 42600), ("1-00:00:01", 86401), ("100:00:00", 360000)]
)
def test_a_time_is_read_as_slurm_writes_it(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "3600", "1:60:00", "11:50", "1:00:00:00", "-1:00:00", "soon", "1-1-00:00:00"])
def test_another_time_is_refused_before_anything_is_touched(tmp_path: Path, tiny: Words, text: str) -> None:
    with pytest.raises(ConfigError, match=r"time_budget must be H:MM:SS .*, got '"):
        loop.pretrain(compose("pretrain", tiny(tmp_path / "run", f"time_budget='{text}'")))
    assert not (tmp_path / "run").exists()


def test_the_end_of_a_slurm_job_is_a_deadline_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert deadline_of("auto", 300) is None
    assert deadline_of(None, 300) is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000000000")
    assert deadline_of("auto", 300) == 1999999700
    assert deadline_of(None, 300) is None
    assert deadline_of("1:00:00", 300) == pytest.approx(time.time() + 3600, abs=60)


def test_a_job_that_is_not_longer_than_the_margin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", "1999999700")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000000000")
    with pytest.raises(ConfigError, match=r"this job's time of 300 seconds .* not above time_margin=300: .* smaller"):
        deadline_of("auto", 300)
    assert deadline_of("auto", 299) == 1999999701
    assert deadline_of(None, 300) is None
    assert deadline_of("1:00:00", 300) is not None


# What one rank hears


@pytest.fixture
def requests(tmp_path: Path) -> Requests:
    return Requests(tmp_path, alone(CPU), None)


def until(true: Callable[[], bool], process: Any = None, seconds: float = 60) -> None:
    """Wait for it, as long as ``process`` runs."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        assert process is None or process.is_alive()
        time.sleep(0.01)


def heard(requests: Requests, step: int = 1) -> list[str]:
    return [name for name, flag in zip(ASKS, requests.asks(step).tolist(), strict=True) if flag]


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_asks_and_handlers_are_put_back(requests: Requests, number: signal.Signals) -> None:
    before = signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, []), threading.active_count()
    with requests:
        assert heard(requests) == []
        os.kill(os.getpid(), number)
        until(lambda: heard(requests) == ["signal"])
        os.kill(os.getpid(), number)  # a launcher's echo
        requests.agree(1, [float(name == "signal") for name in ASKS])
        assert requests.stopping() == ("signal", f"{number.name} at rank 0")
    after = signal.getsignal(number), signal.pthread_sigmask(signal.SIG_BLOCK, []), threading.active_count()
    assert after == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_job_in_the_background_does_not_hear_its_terminal(requests: Requests, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with requests:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: heard(requests) == ["signal"])
            requests.agree(1, [float(name == "signal") for name in ASKS])
            assert requests.stopping() == ("signal", "SIGUSR1 at rank 0")
    finally:
        signal.signal(number, before)


def test_files_are_looked_for_now_and_then(requests: Requests, tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    (tmp_path / "save").touch()
    assert [heard(requests, step) for step in (9, 10, 11)] == [[], ["file", "save"], ["file", "save"]]


def test_a_folder_is_no_request_and_stays(requests: Requests, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "stop").mkdir()
    (tmp_path / "save" / "mine").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, logger="dmjd"):
        assert [heard(requests, step) for step in (10, 20)] == [[], []]
    assert [record.getMessage().partition(" and is ignored")[0] for record in caplog.records] == [
        f"{tmp_path / name} is a folder" for name in ("stop", "save")
    ]
    # a signal, and a file that has become a folder meanwhile
    requests.agree(10, [float(name in ("signal", "save")) for name in ASKS])
    requests.saved()
    assert (tmp_path / "stop").is_dir()
    assert (tmp_path / "save" / "mine").is_dir()
    (tmp_path / "stop").rmdir()
    (tmp_path / "stop").touch()
    assert heard(requests, 30) == ["file"]


def test_a_save_is_done_once_for_each_file(requests: Requests, tmp_path: Path) -> None:
    (tmp_path / "save").touch()
    requests.agree(10, requests.asks(10).tolist())
    assert (requests.saving, requests.reason) == (True, None)
    requests.saved()
    assert (requests.saving, (tmp_path / "save").exists()) == (False, False)
    assert heard(requests, 20) == []


def test_a_checkpoint_is_due_some_minutes_after_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("dmjd.train.stop.time.monotonic", lambda: now)
    requests = Requests(tmp_path, alone(CPU), None, save_minutes=2)
    for seconds, due in ((119.0, False), (2.0, True)):
        now += seconds
        requests.agree(1, requests.asks(1).tolist())
        assert (requests.save_due, requests.saving, requests.reason) == (due, False, None)
    requests.restart_timer()
    assert not requests.save_due
    assert heard(requests) == []
    now += 121
    assert heard(requests) == ["minutes"]
    now += 1e9
    assert heard(Requests(tmp_path, alone(CPU), None)) == []


def test_alone_an_error_is_raised_at_once(requests: Requests) -> None:
    with pytest.raises(DataError, match="gone"):
        requests.fail(DataError("gone"))


# One process


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny: Words) -> Path:
    """The run of one process that nobody disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "write_pictures", lambda *arguments: {})
        config: PretrainConfig = compose("pretrain", tiny(tmp_path_factory.mktemp("straight") / "run", *EVERY))
        return loop.pretrain(config).path


@pytest.fixture
def run(tmp_path: Path, tiny: Words, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``run(*words)``: launch the run in ``tmp_path / "run"`` once, in this process."""
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: {})

    def once(*words: str) -> Path:
        config: PretrainConfig = compose("pretrain", tiny(tmp_path / "run", *EVERY, *words))
        return loop.pretrain(config).path

    return once


def test_a_stop_file_stops_once(
    assert_same_run: Same, run: Callable[..., Path], straight: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    stopped = run()
    assert checkpoints(stopped) == [11], "looked for at step 10 and agreed on one step later"
    record = reason(stopped)
    assert (record["reason"], record["step"], record["total_steps"]) == ("file", 11, STEPS)
    assert record.keys() == {"reason", "detail", "step", "total_steps", "when", "advice", "next"}
    assert not (stopped / "stop").exists()
    assert_same_run(run(), straight)
    assert reason(stopped)["reason"] == "finished"


def test_a_save_file_saves_and_the_run_goes_on(
    assert_same_run: Same, run: Callable[..., Path], straight: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "save").touch()
    saved = run()
    assert checkpoints(saved) == [11, STEPS]
    assert not (saved / "save").exists()
    assert_same_run(saved, straight)


def test_a_run_out_of_time_gets_there_in_small_launches(
    assert_same_run: Same, run: Callable[..., Path], straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))  # within the margin
    for step, words in ((2, ["time_budget=0:00:00"]), (4, [])):
        stopped = run(*words)
        assert (reason(stopped)["reason"], reason(stopped)["step"]) == ("time", step)
    assert_same_run(run("time_budget=null"), straight)


def test_what_breaks_a_run_off_is_left_in_words(run: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "log_finished", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run()
    record = reason(tmp_path / "run")
    assert (record["reason"], record["detail"], record["step"]) == (
        "crashed",
        f"rank 0 on {platform.node()}: ZeroDivisionError: division by zero",
        0,
    )


# Signals to processes. `launch` forks a process of its own, so a fault can be planted at an exact step.

SIGNAL = """
from dmjd.parallel.single import SingleEngine
from dmjd.train.stop import Requests
import signal, threading
step, calls, hear, heard = SingleEngine.step, [], Requests._on_signal, threading.Event()
def signalled(self, lr, wd):
    calls.append(1)
    if len(calls) == {at} and os.environ.get("RANK", "0") == "{rank}":
        os.kill(os.getpid(), signal.{name})
        assert heard.wait(60)  # a thread hears it, and perhaps not before this step asks
    return step(self, lr, wd)
def hearing(self, number):
    hear(self, number)
    heard.set()
SingleEngine.step, Requests._on_signal = signalled, hearing
"""


def signal_at(at: int, name: str, rank: int = 0) -> str:
    return SIGNAL.format(at=at, name=name, rank=rank)


@pytest.mark.parametrize(
    ("name", "at", "workers"),
    [
        *(("SIGUSR1", 5, 1), ("SIGTERM", 1, 0), ("SIGTERM", STEPS, 0)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("SIGINT", 3, 1), ("SIGHUP", 2, 0))),
    ],
)
def test_a_signalled_process_saves_ends_well_and_goes_on(
    assert_same_run: Same, tmp_path: Path, tiny: Words, launch: Launch, straight: Path, name: str, at: int, workers: int
) -> None:
    command = ["pretrain", *tiny(tmp_path / "run", *EVERY, f"workers={workers}")]
    process = launch(command, signal_at(at, name))
    process.join(60)
    assert process.exitcode == 0
    record = reason(tmp_path / "run")
    if at == STEPS:  # nothing is left to go on with
        assert record["reason"] == "finished"
    else:
        assert (record["reason"], record["detail"], record["step"]) == ("signal", f"{name} at rank 0", at + 1)
        assert checkpoints(tmp_path / "run") == [at + 1]
        process = launch(command)
        process.join(60)
        assert process.exitcode == 0
    assert_same_run(tmp_path / "run", straight)


HANGS = """
import ctypes
import dmjd.train.stop as stop
from dmjd.parallel.single import SingleEngine
stop.ECHO_SECONDS = 0.0
def hang(self, lr, wd):
    open({file!r}, "w").close()
    ctypes.CDLL(None).sleep(600)  # in C, where Python's handlers are not run
SingleEngine.step = hang
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_of_a_kind_ends_a_process_that_does_not_get_there(
    tmp_path: Path, tiny: Words, launch: Launch, number: signal.Signals
) -> None:
    process = launch(["pretrain", *tiny(tmp_path / "run", *EVERY)], HANGS.format(file=str(tmp_path / "hangs")))
    until((tmp_path / "hangs").exists, process)
    for each in (signal.SIGUSR1, number):
        os.kill(process.pid, each)
        process.join(0.3)
        assert process.is_alive(), "one of each kind only asks"
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == -number


COMPILES = """
import signal, subprocess, time
from dmjd.parallel.single import SingleEngine
os.setpgid(0, 0)
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
step = SingleEngine.step
def compile_and_step(self, lr, wd):
    from torch._inductor.async_compile import AsyncCompile
    if self.compiled is None:
        pool = AsyncCompile.process_pool()
        pool.submit(int).result(120)  # the workers are there
        jobs, compiler = [pool.submit(time.sleep, 2) for worker in range(2)], subprocess.Popen(["sleep", "2"])
        os.killpg(0, signal.SIGTERM)
        SingleEngine.compiled = [job.result(60) for job in jobs], compiler.wait(60)
    return step(self, lr, wd)
SingleEngine.compiled, SingleEngine.step = None, compile_and_step
"""


@pytest.mark.slow
def test_a_signal_to_the_group_leaves_compilers_alone_and_they_end_with_the_run(
    tmp_path: Path, tiny: Words, launch: Launch
) -> None:
    """Jobs in inductor's own pool, where Triton's kernels are compiled, and a process beside it, as g++ is."""
    process = launch(["pretrain", *tiny(tmp_path / "run", *EVERY)], COMPILES)
    process.join(180)
    assert process.exitcode == 0
    assert (reason(tmp_path / "run")["reason"], reason(tmp_path / "run")["step"]) == ("signal", 2)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


# Several processes


Two = Callable[..., list[int]]


def two_ranks(folder: Path, tiny: Words, launch_world: Launch) -> Two:
    """``two(prelude, *words, name="run")``: exit codes of two ranks; what they say goes to ``said``."""

    def run(prelude: str = "", *words: str, name: str = "run") -> list[int]:
        command = ["pretrain", *tiny(folder / name, *EVERY, "engine=ddp", *words)]
        processes = launch_world(2, command, telling(folder / "said") + prelude)
        for process in processes:
            process.join(120)
        return [process.exitcode for process in processes]

    return run


@pytest.fixture
def two(tmp_path: Path, tiny: Words, launch_world: Launch) -> Two:
    return two_ranks(tmp_path, tiny, launch_world)


@pytest.fixture(scope="module")
def straight_two(tmp_path_factory: pytest.TempPathFactory, tiny: Words, launch_world: Launch) -> Path:
    """The run of two processes that nobody disturbed."""
    folder = tmp_path_factory.mktemp("straight_two")
    assert two_ranks(folder, tiny, launch_world)() == [0, 0]
    return folder / "run"


def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    assert_same_run: Same, tmp_path: Path, two: Two, straight_two: Path
) -> None:
    assert two(signal_at(5, "SIGUSR1", rank=1)) == [0, 0]
    record = reason(tmp_path / "run")
    assert (record["reason"], record["detail"], record["step"]) == ("signal", "SIGUSR1 at rank 1", 6)
    assert checkpoints(tmp_path / "run") == [6]
    assert two() == [0, 0]
    assert_same_run(tmp_path / "run", straight_two)


UNREADABLE = """
from dmjd.data.loader import StepBatches
from dmjd.errors import DataError
load = StepBatches.load
def fault(self, step):
    if step >= 5 and os.environ["RANK"] == "1":
        raise DataError("the shards of rank 1 are gone")
    return load(self, step)
StepBatches.load = fault
"""
FULL = """
from dmjd.errors import StorageError
from dmjd.train.metrics import RunLog
write, calls = RunLog.write, []
def fault(self, row):
    calls.append(1)
    if len(calls) > 4:  # a row goes to two files
        raise StorageError("the disk of rank 0 is full")
    write(self, row)
RunLog.write = fault
"""


SHUT = """
import dmjd.runs.checkpoint as checkpoint
def fault(path):
    if os.environ["RANK"] == "1":
        raise OSError("the folder is shut for rank 1")
checkpoint._flush = fault
"""


@pytest.mark.parametrize(
    ("fault", "sentence", "saved"),
    [
        (UNREADABLE, "error: the shards of rank 1 are gone\n", [1, 2, 3, 4, 5]),
        (FULL, "error: the disk of rank 0 is full\n", [4]),
        (SHUT, "step-00000004: the folder is shut for rank 1 (", []),
    ],
    ids=["data", "log", "checkpoint"],
)
def test_what_one_rank_cannot_do_stops_all_with_its_sentence(
    assert_same_run: Same, tmp_path: Path, two: Two, straight_two: Path, fault: str, sentence: str, saved: list[int]
) -> None:
    # None of the checkpoints may hold what the rank made of batches that it did not have.
    every = "checkpoint_every=1" if fault == UNREADABLE else "checkpoint_every=4"
    assert two(fault, every, "keep_checkpoints=99") == [2, 2]
    said = (tmp_path / "said").read_text()
    assert said.count("error: ") == said.count(sentence) == 1
    record = reason(tmp_path / "run")
    assert record["reason"] == "error"
    assert record["detail"] in said
    assert checkpoints(tmp_path / "run") == saved
    if fault == UNREADABLE:
        assert two() == [0, 0]
        assert_same_run(tmp_path / "run", straight_two)


NAN = """
from dmjd.builders.preparation import Preparation
call, calls = Preparation.__call__, []
def poisoned(self, batch, epoch):
    prepared = call(self, batch, epoch)
    key = tuple(batch.sample_ids.tolist())
    calls.append(key)
    # The first call is the rehearsal, so these are batches 9 to 12, by their samples.
    if len(calls) in {bad}:
        marks.add(key)
    if key in marks and os.environ["RANK"] == "1":
        prepared.targets.fill_(float("nan"))
    return prepared
marks = set()
Preparation.__call__ = poisoned
"""
PASSING = """
from dmjd.train.state import Position
def init(self):
    self.step, self.passed_over = 0, ((7, 13),)
Position.__init__ = init
"""
LIMITS = ("guard.margin=2", "guard.max_skips=3", "checkpoint_every=5", "log_every=1")


def test_ranks_roll_back_together(assert_same_run: Same, tmp_path: Path, two: Two) -> None:
    # Batches 9 to 12 are bad at rank 1: step 10 is the first and step 13 the fourth, and two more before them go too.
    assert two(NAN.format(bad=(11, 12, 13, 14)), *LIMITS) == [0, 0]
    assert two(PASSING, *LIMITS, name="oracle") == [0, 0]
    assert_same_run(tmp_path / "run", tmp_path / "oracle")
    events = rows(tmp_path / "run", "guard")
    assert [event["event"] for event in events] == ["skipped"] * 4 + ["rollback"]
    assert [[row["rank"] for row in event["ranks"]] for event in events[:4]] == [[1]] * 4
    assert (events[4]["to"], events[4]["passed_over"]) == (5, [7, 13])


@pytest.mark.long  # test_several_hosts_stop_together does it with the launchers' agents
def test_torchrun_hands_the_signal_on_and_waits_for_the_checkpoint(tmp_path: Path, tiny: Words) -> None:
    signals = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", signals, "--shutdown-timeout=120"]
    words = tiny(tmp_path / "run", *EVERY, "engine=ddp", "workers=1", "epochs=100", "log_every=1")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", *torchrun, "-m", "dmjd", "pretrain", *words]
    log = tmp_path / "run" / "log.jsonl"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as agent:
        deadline = time.monotonic() + 120
        while not (log.is_file() and log.stat().st_size):
            assert agent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        agent.send_signal(signal.SIGUSR1)
        assert agent.wait(120) == 1, "torchrun says 1 whatever its workers say, so a launcher reads STOP_REASON"
    record = reason(tmp_path / "run")
    assert record["reason"] == "signal"
    assert "SIGUSR1 at rank 0 and SIGUSR1 at rank 1" in record["detail"]
    assert checkpoints(tmp_path / "run") == [record["step"]]
    rows = log.read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, record["step"] + 1))
