"""The doctor names what happened, the rank, the phase, and what to do."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from dmjd.cluster import doctor, flight
from dmjd.cluster.doctor import examine
from dmjd.cluster.job_log import PATTERNS
from dmjd.errors import ConfigError
from dmjd.runs.heartbeat import Beat, read_heartbeats

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


def mark(run: Path, ago: float = 0, **said: str) -> None:
    """A launch that was a run has ended."""
    when = datetime.fromtimestamp(time.time() - ago, timezone.utc).isoformat(timespec="seconds")
    (run / "STOP_REASON").write_text(json.dumps({**said, "step": 7, "total_steps": 20, "when": when}))


def speak(run: Path, word: str, ago: float = 0, launch: str = "7-0") -> None:
    """A launch of a job leaves its last word."""
    path = run / "slurm" / f"last_word-{launch}"
    path.write_text(word)
    os.utime(path, (time.time() - ago, time.time() - ago))


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


@pytest.mark.slow
def test_a_rank_that_hangs_a_run(
    tmp_path: Path,
    tiny: Callable[..., list[str]],
    launch_world: Callable[..., Any],
    dmjd: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    world = launch_world(2, ["pretrain", *tiny(run, "engine=ddp", "epochs=10000", "checkpoint_every=5")])

    def wait_for(happened: Callable[[list[Beat]], bool]) -> None:
        end = time.monotonic() + 120
        while not happened(read_heartbeats(run)):
            assert time.monotonic() < end
            assert all(process.exitcode is None for process in world)
            time.sleep(0.1)

    try:
        wait_for(lambda beats: len(beats) == 2 and min(beat.step for beat in beats) > 5)
        assert "running: step" in dmjd("doctor", str(run))[1]
        os.kill(world[1].pid, signal.SIGSTOP)
        patience = doctor.STALE_SECONDS
        monkeypatch.setattr(doctor, "STALE_SECONDS", 3.0)
        wait_for(lambda beats: time.time() - max(beat.time for beat in beats) > doctor.STALE_SECONDS)
        stuck = read_heartbeats(run)[1]
        code, found, _ = dmjd("doctor", str(run))
        assert code == 0
        assert (
            f"rank 1 (process {world[1].pid} on {HERE}), last heartbeat in {stuck.phase} of step {stuck.step}, "
            f"is stopped (SIGSTOP): all other ranks wait for it\n    -> on {HERE}: kill -CONT {world[1].pid}"
        ) in found
        assert "rank 0 (" not in found
        assert "newest checkpoint: step-" in found

        os.kill(world[1].pid, signal.SIGCONT)  # as the doctor said
        monkeypatch.setattr(doctor, "STALE_SECONDS", patience)  # on a busy machine a step may take three seconds
        wait_for(lambda beats: min(beat.step for beat in beats) > stuck.step + 1)
        assert "running: step" in dmjd("doctor", str(run))[1]

        os.kill(world[1].pid, signal.SIGKILL)
        world[0].join(60)
        _, found, _ = dmjd("doctor", str(run))
        assert re.search(r"run ended at step \d+ of \d+ \(lost\)", found)
        assert f"rank 1 (process {world[1].pid} on {HERE})" in found
        assert "has no exit record: it was killed" in found
    finally:
        for process in world:
            process.kill()
            process.join()


def test_a_process_that_is_gone(run: Path, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    beat(run, 0)
    beat(run, 1, pid=process.pid, phase="forward")
    assert "rank 1" in said(run)
    assert "forward of step 7, does not exist any more" in said(run)


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
    assert "running: step 7" in said(run)


def test_the_marker_outranks_signs_of_life(run: Path) -> None:
    beat(run, 0)
    mark(run, reason="time", detail="its time is over", next="the same command")
    assert "run ended at step 7 of 20 (time): its time is over -> the same command" in said(run)
    assert "quiet" not in said(run)


def launched(run: Path, ago: float, job: str = "7") -> None:
    when = datetime.fromtimestamp(time.time() - ago, timezone.utc)
    line = {"of": job, "job": job, "restart": 0, "step": 0, "nodes": "n1", "when": f"{when:%Y-%m-%dT%H:%M:%SZ}"}
    with (run / "slurm" / "launches.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_what_cannot_be_read_does_not_keep_the_doctor_from_the_rest(run: Path) -> None:
    beat(run, 0, ago=1)
    (run / "heartbeat" / "rank-00003.json").write_text("")
    launched(run, ago=500)
    with (run / "slurm" / "launches.jsonl").open("a") as file:
        file.write('{"of": "7", "jo')
    found = said(run)
    assert "running: step 7" in found
    assert "the heartbeat of rank(s) 3 is damaged" in found


@pytest.mark.parametrize("left", ["[]", "{}", '{"reason": "sig', '{"reason": [], "detail": "", "next": "", "when": 3}'])
def test_a_damaged_exit_record_and_an_empty_last_message_are_ignored(run: Path, left: str) -> None:
    (run / "STOP_REASON").write_text(left)
    assert "no exit record and no heartbeat" in said(run)
    (run / "STOP_REASON").unlink()
    launched(run, ago=10)
    speak(run, "")
    assert "no exit record and no heartbeat" in said(run)


@pytest.mark.parametrize("behind", [3600, 86400])
def test_a_clock_that_is_ahead_is_not_taken_for_a_sign_of_life(
    run: Path, process: subprocess.Popen[bytes], behind: int
) -> None:
    process.kill()
    process.wait()
    beat(run, 0, ago=-behind)
    beat(run, 1, ago=-behind, pid=process.pid)
    found = said(run)
    assert "running: step" not in found
    assert f"the clock of {HERE} is {behind} s ahead of the local one" in found
    assert (
        f"rank 1 (process {process.pid} on {HERE}), last heartbeat in step of step 7, does not exist any more" in found
    )


def test_a_second_job_that_was_refused_is_not_taken_for_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "slurm_state", {"7": "RUNNING", "9": "FAILED (NonZeroExitCode)"}.get)
    launched(run, ago=500, job="7")
    launched(run, ago=100, job="9")
    speak(run, "error: run=run is in use by process 3 on n1\n", ago=90, launch="9-0")
    beat(run, 0, ago=1)
    found = said(run)
    assert "running: step 7" in found
    assert "job 7 is RUNNING" in found
    assert "another launch was rejected meanwhile: error: run=run is in use by process 3 on n1" in found
    assert "run ended" not in found
    assert "job 9" not in found


def test_nodes_are_asked_by_their_short_names_and_may_say_more_than_they_are_asked(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says("RUNNING", monkeypatch)
    launched(run, ago=500)
    for rank in range(3):
        beat(run, rank, host=f"n{rank}.cluster.site", pid=100 + rank)
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        f"""#!/bin/bash
echo "$@" >>{tmp_path}/asked
echo "Welcome to this cluster"
echo
while [ $# -gt 1 ]; do shift; done
if [ $1 = 101 ]; then echo "101 T"; else echo "$1 S"; fi
"""
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{srun.parent}:{os.environ['PATH']}")
    assert "rank 1 (process 101 on n1.cluster.site), last heartbeat in step of step 7, is stopped" in said(run)
    assert sorted(re.findall(r"--nodelist=(\S+)", (tmp_path / "asked").read_text())) == ["n0", "n1", "n2"]


def test_a_log_of_any_size_is_read_from_its_end(run: Path) -> None:
    log = run / "slurm" / "job-1.out"
    with log.open("wb") as file:
        file.truncate(2**40)
        file.seek(0, os.SEEK_END)
        file.write(b"\n2026-11-28T06:46:20Z dmjd: not requeued: 3 launches in a row ended at step 5\n")
    assert "its job was not requeued: 3 launches" in said(run)


def slurm_says(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "slurm_state", lambda job: state)


def test_a_launch_that_starts_is_not_judged_by_what_an_earlier_one_said(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says("RUNNING", monkeypatch)
    launched(run, ago=500)
    beat(run, 0, ago=300)
    launched(run, ago=20)
    assert "starting" in said(run)
    assert "rank 0" not in said(run)


def test_of_a_job_that_has_ended_those_are_named_that_left_no_word(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_says("NODE_FAIL", monkeypatch)
    launched(run, ago=500)
    beat(run, 0, phase="stop")
    beat(run, 1, phase="forward", host="n1")
    beat(run, 2, phase="step", host="n2")
    found = said(run)
    assert "rank 1" in found
    assert "on n1), last heartbeat in forward of step 7, has no exit record: it was killed, like 1 more" in found
    assert "is behind" not in found


def test_a_job_that_was_suspended_is_not_taken_for_dead(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_says("SUSPENDED", monkeypatch)
    launched(run, ago=500)
    beat(run, 0)
    assert "killed" not in said(run)
    assert "job 7 is SUSPENDED -> scontrol resume 7" in said(run)


@pytest.mark.parametrize(
    ("state", "advice"),
    [
        ("OUT_OF_MEMORY (OutOfMemory)", "a node ran out of host memory: use fewer workers, or --mem=0"),
        ("CANCELLED", "a user or Slurm cancelled it: dmjd submit again resumes"),
    ],
)
def test_a_job_that_slurm_has_ended(run: Path, monkeypatch: pytest.MonkeyPatch, state: str, advice: str) -> None:
    slurm_says(state, monkeypatch)
    launched(run, ago=500)
    beat(run, 0)
    assert f"job 7 is {state} -> {advice}" in said(run)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("Priority", "wait: the job is queued"),
        (
            "launch_failed_requeued_held",
            "it does not start by itself: fix what the log reports, then scontrol release 7",
        ),
        ("JobHeldAdmin", "it does not start by itself: fix what the log reports, then scontrol release 7"),
        ("DependencyNeverSatisfied", "it never starts: scancel 7"),
        ("PartitionTimeLimit", "it exceeds a limit: scancel 7, and submit again with another time"),
        ("QOSMaxJobsPerUserLimit", "wait: the job is queued"),
        ("QOSMaxWallDurationPerJobLimit", "it exceeds a limit: scancel 7"),
    ],
)
def test_a_job_that_waits_in_vain_is_told_from_one_whose_turn_will_come(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, advice: str
) -> None:
    launched(run, ago=500)
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    answer = f"JobId=7 JobName=x\n   JobState=PENDING Reason={reason} Dependency=(null)\n   WorkDir=/caf".encode()
    (tmp_path / "answer").write_bytes(answer + b"\xe9\n")  # a name as old machines have it
    scontrol.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    assert f"Slurm: job 7 is PENDING ({reason}) -> {advice}" in said(run)


def test_a_crash_is_told_from_a_kill(run: Path) -> None:
    mark(run, reason="crashed", detail="rank 3 on n2: KeyError: 'lr'", next="go on")
    assert "run ended at step 7 of 20 (crashed): rank 3 on n2: KeyError: 'lr' -> go on" in said(run)


def test_ranks_that_crash_at_once_are_one_crash_of_this_run(run: Path) -> None:
    """The marker keeps one of them, the last word another, which is written after the second that the marker tells."""
    launched(run, ago=500)
    mark(run, ago=1, reason="crashed", detail="rank 0: no luck", next="the same command")
    speak(run, "crashed: rank 1: no luck\nthe same command\n", ago=0.5)
    for rank in range(2):
        beat(run, rank, phase="stop", ago=0)
    found = said(run)
    assert "run ended at step 7 of 20 (crashed): rank 0: no luck -> the same command" in found
    assert "running: step" not in found
    assert "rejected" not in found


def test_a_run_by_hand_after_a_job_is_not_beside_it(run: Path) -> None:
    launched(run, ago=500)
    speak(run, "time: its time is over\nthe same command\n", ago=100)
    beat(run, 0, ago=1)
    found = said(run)
    assert "running: step 7" in found
    assert "rejected" not in found


def test_a_launch_that_never_became_a_run(run: Path) -> None:
    mark(run, ago=500, reason="time", detail="its time is over", next="go on")
    launched(run, ago=100)
    assert "no exit record and no heartbeat" in said(run), "the marker is of the launch before"
    speak(run, "error: data.root=/x: is not a folder\n", ago=90)
    assert "run ended before its first step (error): data.root=/x: is not a folder -> fix that" in said(run)


def test_of_a_run_and_a_launch_beside_it_the_one_that_ended_last_speaks(run: Path) -> None:
    launched(run, ago=100)
    speak(run, "error: run=run is in use\n", ago=90)
    mark(run, ago=80, reason="finished", detail="all steps are done", next="dmjd report")
    assert "run ended at step 7 of 20 (finished)" in said(run)
    speak(run, "error: run=run is in use\n", ago=70)
    assert "run ended before its first step (error): run=run is in use" in said(run)
    speak(run, "finished: all steps are done\ndmjd report\n")
    assert "run ended at step 7 of 20 (finished): all steps are done -> dmjd report" in said(run)


def test_ranks_that_stopped_without_an_exit_record(run: Path) -> None:
    for rank in range(2):
        beat(run, rank, phase="stop")
    assert "all ranks stopped at step 7, without an exit record: " in said(run)
    assert "STOP_REASON is absent" in said(run)
    (run / "STOP_REASON").mkdir()
    assert "STOP_REASON is a folder" in said(run)


def test_the_newest_log_counts_and_not_the_last_by_name(run: Path) -> None:
    for job, text in (("9", "dmjd: not requeued: an old story"), ("10", "dmjd: back into the queue")):
        (run / "slurm" / f"job-{job}.out").write_text(f"2026-11-28T06:46:20Z {text}\n")
    os.utime(run / "slurm" / "job-9.out", (1, 1))
    assert "not requeued" not in said(run)


LINES = {
    "a GPU ran out of memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "the host ran out of memory": "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks",
    "ran out of shared memory": "ERROR: Unexpected bus error encountered in worker. This might be due to shared memory",
    "a disk was full": "OSError: [Errno 28] No space left on device: 'runs/x'",
    "a GPU failed": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "a collective timed out": "[rank3]:[E] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
    "the rendezvous of the nodes": "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "loopback address": "Gloo connectFullMesh failed with [/pytorch/third_party/gloo] timed out connecting",
    "port of the rendezvous": "RuntimeError: The server socket has failed to listen. EADDRINUSE, port: 29500",
    "connection to a rank": "[gloo/transport/tcp/pair.cc:545] Read error [10.0.0.2]:1: Connection reset by peer",
    "a node failed": "srun: error: Node failure on n2",
    "the time limit": "error: *** JOB 7 ON n1 CANCELLED AT 2026-11-28T06:46:49 DUE TO TIME LIMIT ***",
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
    processes = [
        context.Process(target=_record, args=(rank, str(tmp_path / "store"), str(run / "flight"))) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert {(last.rank, last.sequence) for last in flight.last_collectives(run)} == {(0, 3), (1, 2)}
    assert "1 rank(s) waited in all_reduce number 3" in said(run)
    assert "never entered by rank 1 (last in number 2)" in said(run)


def test_a_record_of_an_earlier_launch_says_nothing_of_this_one(run: Path) -> None:
    (run / "flight").mkdir()
    for rank in range(2):
        entry = {"collective_seq_id": 3 - rank, "profiling_name": "nccl:all_reduce", "state": "started", "pg_id": 0}
        (run / "flight" / f"rank_{rank}").write_bytes(pickle.dumps({"entries": [entry]}))
    assert "never entered by rank 1" in said(run)
    when = datetime.fromtimestamp(time.time() + 60, timezone.utc).isoformat(timespec="seconds")
    (run / "provenance.json").write_text(json.dumps({"started": when}))
    assert "never entered" not in said(run)


class _Trap:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("trapped",)


def test_a_record_cannot_run_code(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (run / "flight").mkdir()
    (run / "flight" / "rank_0").write_bytes(pickle.dumps({"entries": [_Trap()]}))
    assert flight.last_collectives(run) == []
    assert not (tmp_path / "trapped").exists()
    (run / "flight" / "rank_0").write_bytes(b"]NNs.")
    assert flight.last_collectives(run) == []


def test_what_is_no_run_is_refused(tmp_path: Path, dmjd: Callable[..., tuple[int, str, str]]) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        examine(tmp_path)
    code, _, error = dmjd("doctor", str(tmp_path))
    assert code == 2
    assert error.count("\n") == 1


def test_a_finished_run(finished_run: Path, dmjd: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = dmjd("doctor", str(finished_run))
    assert code == 0
    assert "run ended at step 11 of 11 (finished)" in out
    assert "newest checkpoint: step-00000011" in out
    assert "resumes" not in out


@pytest.mark.parametrize("when", ["{}", "5", '"0001-01-01T00:00:00"', '"9999-12-31T23:59:59"', "null"])
def test_a_launch_without_a_time_is_passed_over(run: Path, when: str) -> None:
    launch = f'{{"when": {when}, "job": "7", "restart": "0"}}'
    (run / "slurm" / "launches.jsonl").write_text(launch)
    assert [finding.what for finding in examine(run)][-1] == "no checkpoint: a new launch starts from scratch"


@pytest.mark.parametrize("name", ["launches.jsonl", "last_word-7-0"])
def test_no_record_of_a_job_is_read_without_a_limit(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = run / "slurm" / "launches.jsonl"
    launches.write_text('{"when": "2026-01-01T00:00:00Z", "job": "7", "restart": "0"}')
    with (run / "slurm" / name).open("r+b" if name == launches.name else "wb") as file:
        file.truncate(20 << 30)  # takes no place on the disk
    monkeypatch.setattr(Path, "read_text", lambda *arguments, **words: pytest.fail("read without a limit"))
    assert examine(run)


@pytest.mark.alone
def test_a_log_of_one_long_line_is_searched_in_time(run: Path) -> None:
    (run / "slurm" / "job.out").write_text("CUDA out of memory\n" + "Xid" * 60_000)
    before = time.perf_counter()
    found = examine(run)
    assert time.perf_counter() - before < 5
    assert any("a GPU ran out of memory" in finding.what for finding in found)


@pytest.mark.parametrize("name", ["x" * 5000, "/proc/self/stat", "/dev/zero"])
def test_a_log_that_is_none_is_passed_over(run: Path, name: str) -> None:
    launch = {"when": "2026-01-01T00:00:00Z", "job": "7", "restart": "0", "log": name}
    (run / "slurm" / "launches.jsonl").write_text(json.dumps(launch))
    assert examine(run)


def test_a_log_does_not_write_to_the_terminal(run: Path, dmjd: Callable[..., tuple[int, str, str]]) -> None:
    (run / "slurm" / "job.out").write_text("\x1b]0;title\x07CUDA out of memory\x1b[2J")
    code, out, _ = dmjd("doctor", str(run))
    assert code == 0
    assert "a GPU ran out of memory (job.out: \\x1b]0;title\\x07CUDA" in out
    assert "\x1b" not in out
