"""The doctor names what happened, the rank, the phase, and what to do."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pickle
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dmjd.cluster import flight
from dmjd.cluster.doctor import PATTERNS, examine
from dmjd.cluster.heartbeat import Beat, Heartbeat, read_heartbeats
from dmjd.errors import ConfigError

HERE = platform.node()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "slurm").mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    return folder


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        yield sleeper
        sleeper.kill()


def beat(
    run: Path, rank: int, step: int = 7, phase: str = "step", ago: float = 300, pid: int = 0, host: str = HERE
) -> None:
    (run / "heartbeat").mkdir(exist_ok=True)
    said = Beat(rank, step, phase, time.time() - ago, host, pid or os.getpid(), seconds=0.0, lost=0.0)
    (run / "heartbeat" / f"rank-{rank:05d}.json").write_text(json.dumps(asdict(said)))


def said(run: Path) -> str:
    return "\n".join(f"{finding.what} -> {finding.advice}" for finding in examine(run))


def test_a_stopped_process_is_told_from_those_that_wait_for_it(run: Path, process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    beat(run, 0)
    beat(run, 1, step=6, pid=process.pid)
    found = said(run)
    assert f"rank 1 (process {process.pid} on {HERE})" in found
    assert "is stopped (SIGSTOP)" in found
    assert f"kill -CONT {process.pid}" in found
    assert "rank 0 (" not in found


def _step_on(rank: int, store: str, run: str) -> None:
    """Steps that need both ranks, and a heartbeat of each, for ever."""
    import torch
    import torch.distributed as dist

    file = dist.FileStore(store, 2)  # type: ignore[attr-defined]  # public, and missing in the list of exports
    dist.init_process_group("gloo", store=file, rank=rank, world_size=2)
    with Heartbeat(Path(run), rank) as heartbeat:
        for step in itertools.count():
            heartbeat.beat(step, "data", 0.0, 0.0)
            time.sleep(0.02)
            heartbeat.beat(step, "forward", 0.0, 0.0)
            dist.all_reduce(torch.ones(3))


def test_a_rank_that_hangs_a_job(run: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_step_on, args=(rank, str(tmp_path / "store"), str(run))) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        end = time.monotonic() + 120
        while len(beats := read_heartbeats(run)) < 2 or min(beat.step for beat in beats) < 3:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert "it is running" in said(run)
        assert ranks[1].pid is not None
        os.kill(ranks[1].pid, signal.SIGSTOP)
        stood = -1
        while stood != (stood := read_heartbeats(run)[0].step):  # until rank 0 has come to wait for it
            time.sleep(1.5)
        found = "\n".join(f"{finding.what} -> {finding.advice}" for finding in examine(run, now=time.time() + 120))
        assert f"rank 1 (process {ranks[1].pid} on {HERE})" in found
        assert "is stopped (SIGSTOP): all others wait for it" in found
        assert f"kill -CONT {ranks[1].pid}" in found
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_a_process_that_is_gone(run: Path, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    beat(run, 0)
    beat(run, 1, pid=process.pid, phase="forward")
    assert "rank 1" in said(run)
    assert "forward of step 7, is gone" in said(run)


def test_of_ranks_elsewhere_the_one_that_got_least_far_is_named(run: Path) -> None:
    for rank in range(4):
        beat(run, rank, host=f"n{rank}", phase="data" if rank == 2 else "step")
    found = said(run)
    assert "rank 2" in found
    assert "is behind: in data of step 7" in found
    assert "workers" in found


def test_a_run_that_is_well_is_left_alone(run: Path) -> None:
    beat(run, 0, ago=1)
    beat(run, 1, ago=2)
    assert "it is running: step 7" in said(run)


def test_the_marker_outranks_signs_of_life(run: Path) -> None:
    beat(run, 0)
    marker = {"reason": "time", "detail": "its time is over", "step": 7, "total_steps": 20, "next": "the same command"}
    (run / "STOP_REASON").write_text(json.dumps(marker))
    assert "it was asked to stop (time) at step 7 of 20: its time is over -> the same command" in said(run)
    assert "quiet" not in said(run)


LINES = {
    "a GPU ran out of memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "the host ran out of memory": "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks",
    "get shared memory": "ERROR: Unexpected bus error encountered in worker. This might be due to shared memory",
    "a disk was full": "OSError: [Errno 28] No space left on device: 'runs/x'",
    "a GPU failed": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "until a time-out": "[rank3]:[E] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
    "did not find each other": "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "loopback address": "Gloo connectFullMesh failed with [/pytorch/third_party/gloo] timed out connecting",
    "port of the rendezvous": "RuntimeError: The server socket has failed to listen. EADDRINUSE, port: 29500",
    "a rank died": "RuntimeError: [gloo/transport/tcp/pair.cc:545] Read error [10.0.0.2]:1: Connection reset by peer",
    "a node failed": "srun: error: Node failure on n2",
    "the time limit came": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-28T06:46:49 DUE TO TIME LIMIT ***",
}


def test_every_pattern_has_a_line_here() -> None:
    assert len(LINES) == len(PATTERNS)


@pytest.mark.parametrize("meaning", LINES)
def test_a_cause_of_death_in_the_log_of_the_last_launch(meaning: str, run: Path) -> None:
    head = "2026-11-28T06:46:20Z dmjd: job 1 on n[1-2], launch {} of it, from step 0 of run\n"
    log = run / "slurm" / "job-1.out"
    log.write_text(head.format(1) + LINES[meaning] + "\n" + head.format(2))
    assert meaning not in said(run), "that was an earlier launch"
    log.write_text(head.format(1) + head.format(2) + LINES[meaning] + "\nTraceback\n")
    (finding,) = [finding for finding in examine(run) if meaning in finding.what]
    assert LINES[meaning][:60] in finding.what
    assert finding.advice


def _record(rank: int, store: str, folder: str) -> None:
    """Two collectives together; the third is rank 0's alone."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    file = dist.FileStore(store, 2)  # type: ignore[attr-defined]  # public, and missing in the list of exports
    dist.init_process_group("gloo", store=file, rank=rank, world_size=2)
    for _ in range(2):
        dist.all_reduce(torch.ones(3))
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
    Path(folder, f"rank_{rank}").write_bytes(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    dist.distributed_c10d._get_default_store().set(f"done{rank}", "")
    dist.distributed_c10d._get_default_store().wait([f"done{1 - rank}"])
    os._exit(0)


def test_the_rank_that_never_entered_a_collective(run: Path, tmp_path: Path) -> None:
    (run / "flight").mkdir()
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=_record, args=(rank, str(tmp_path / "store"), str(run / "flight"))) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert {(stand.rank, stand.sequence) for stand in flight.read_stands(run)} == {(0, 3), (1, 2)}
    assert "1 rank(s) waited in all_reduce number 3" in said(run)
    assert "never entered by rank 1 (last in number 2)" in said(run)


class _Trap:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("trapped",)


def test_a_record_cannot_run_code(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (run / "flight").mkdir()
    (run / "flight" / "rank_0").write_bytes(pickle.dumps({"entries": [_Trap()]}))
    assert flight.read_stands(run) == []
    assert not (tmp_path / "trapped").exists()


def test_what_is_no_run_is_refused(tmp_path: Path, dmjd: Callable[..., tuple[int, str, str]]) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        examine(tmp_path)
    code, _, error = dmjd("doctor", str(tmp_path))
    assert code == 2
    assert error.count("\n") == 1


def test_a_finished_run(finished_run: Path, dmjd: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = dmjd("doctor", str(finished_run))
    assert code == 0
    assert "it is finished at step 11 of 11" in out
    assert "newest checkpoint: step-00000011" in out
