"""Disks that are full or read-only, and folders in use: one sentence each, and the last good checkpoint loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dmjd.errors import ConfigError
from dmjd.runs import checkpoint, lock
from tests.compare import checkpoints, telling

Words = Callable[..., list[str]]
Command = Callable[..., tuple[int, str, str]]
WORDS = ("batch_size=64", "checkpoint_every=4", "keep_checkpoints=100")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: three checkpoints of the tiny run fit."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk needs root: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_ends_the_run_in_one_sentence(small_disk: Path, tiny: Words, dmjd: Command) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: {})
        code, _, errors = dmjd("pretrain", *tiny(small_disk / "run", *WORDS))
    assert code == 2
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "cannot write" in said[0]
    assert "(0 MiB are free); earlier checkpoints are intact" in said[0]
    folder = small_disk / "run" / "checkpoints"
    assert checkpoint.newest(folder) is not None
    assert not list(folder.glob("*.tmp")), "the draft gives its space back"


def test_a_run_goes_on_where_the_disk_was_full(small_disk: Path, tmp_path: Path, tiny: Words, dmjd: Command) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmjd.train.loop.write_pictures", lambda *arguments: {})
        assert dmjd("pretrain", *tiny(small_disk / "run", *WORDS))[0] == 2
        shutil.copytree(small_disk / "run", tmp_path / "roomy")
        assert dmjd("pretrain", *tiny(tmp_path / "roomy", *WORDS))[0] == 0
        assert dmjd("pretrain", *tiny(tmp_path / "whole", *WORDS))[0] == 0
    assert (tmp_path / "roomy" / "log.jsonl").read_bytes() == (tmp_path / "whole" / "log.jsonl").read_bytes()


def test_a_read_only_folder_is_refused(small_disk: Path, tiny: Words, dmjd: Command) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    code, _, errors = dmjd("pretrain", *tiny(small_disk / "run"))
    assert code == 2
    assert errors.startswith("error: run=")
    assert "cannot be written to" in errors
    assert len(errors.splitlines()) == 1


def test_a_folder_in_use_is_refused_and_left_alone(
    tmp_path: Path, tiny: Words, dmjd: Command, launch: Callable[..., Any]
) -> None:
    words = tiny(tmp_path / "run", "epochs=50", "checkpoint_every=1000")
    first = launch(["pretrain", *words])
    try:
        for _ in range(200):
            first.join(0.1)
            if (tmp_path / "run" / "log.jsonl").is_file():
                break
        before = (tmp_path / "run" / "provenance.json").read_bytes()
        code, _, errors = dmjd("pretrain", *words)
        assert code == 2
        assert f"is in use by process {first.pid}" in errors
        assert len(errors.splitlines()) == 1
        assert (tmp_path / "run" / "provenance.json").read_bytes() == before
    finally:
        first.kill()
        first.join()
    assert dmjd("pretrain", *tiny(tmp_path / "run", "epochs=1"))[0] == 0, "the kernel let go of the lock"


def test_a_job_waits_for_whoever_still_holds_its_folder(
    tmp_path: Path, tiny: Words, dmjd: Command, launch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch(["pretrain", *tiny(tmp_path / "run", "epochs=50", "checkpoint_every=1000")])
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 3:  # the node that was cut off is found, and its processes end
            first.kill()
            first.join()

    try:
        for _ in range(200):
            first.join(0.1)
            if (tmp_path / "run" / "log.jsonl").is_file():
                break
        monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        code, _, errors = dmjd("pretrain", *tiny(tmp_path / "run", "epochs=1"))
    finally:
        first.kill()
        first.join()
    assert code == 0
    assert polls == [lock.POLL_SECONDS] * 3
    assert f"is in use by process {first.pid}" in errors
    assert errors.count("waiting up to 300 s for it to end") == 1


def test_a_job_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with lock.RunLock(tmp_path):
        for job, wait, said in (("7", 40.0, "after waiting 40 s"), ("7", 0.0, ""), (None, 40.0, "")):
            if job is None:
                monkeypatch.delenv("SLURM_JOB_ID")
            else:
                monkeypatch.setenv("SLURM_JOB_ID", job)
            clock[0] = 0.0
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on .*{said}"):
                lock.RunLock(tmp_path, wait).__enter__()
            assert clock[0] == (40.0 if said else 0.0)
        monkeypatch.setenv("DMJD_FULL_WORLD_SIZE", "2")  # rank 0 of the start before may be on a node that was cut off
        with pytest.raises(ConfigError, match="after waiting 40 s"):
            lock.RunLock(tmp_path, 40.0).__enter__()


def test_processes_that_srun_started_side_by_side_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a run of its own: the first one trained alone, and the others waited for it to end."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in {"JOB_ID": "7", "STEP_ID": "0", "STEP_NUM_TASKS": "8"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with lock.RunLock(tmp_path):
        with pytest.raises(
            ConfigError, match=r"of step 7\.0 in launch 1, which is in the same Slurm step .* with torchrun"
        ):
            lock.RunLock(tmp_path, 40.0).__enter__()
        assert clock == [0.0]
        # The job was requeued while this process was on a node that was cut off, or this is another srun's.
        for name, value in (("SLURM_RESTART_COUNT", "1"), ("SLURM_STEP_ID", "1"), ("SLURM_STEP_NUM_TASKS", "1")):
            clock[0] = 0.0
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                with pytest.raises(ConfigError, match="after waiting 40 s"):
                    lock.RunLock(tmp_path, 40.0).__enter__()
            assert clock == [40.0]


def test_a_rank_waits_for_a_folder_no_longer_than_the_others_wait_for_it(
    tmp_path: Path, tiny: Words, launch_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    words = tiny(
        tmp_path / "run", "batch_size=64", "engine=ddp", "engine.start_timeout=0.3", "data.timeout=0.2", "lock_wait=300"
    )
    (tmp_path / "run").mkdir()
    with lock.RunLock(tmp_path / "run"):
        ranks = launch_world(2, ["pretrain", *words])
        for rank in ranks:
            rank.join(120)
    assert [rank.exitcode for rank in ranks] == [2, 2], "a refusal, and no rank in a collective that timed out"


def between_checkpoints(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """``act()`` once, while the run goes on after its first checkpoint."""
    acts = iter([act])

    def pictures(*arguments: Any) -> dict[str, Path]:
        next(acts, lambda: None)()
        return {}

    monkeypatch.setattr("dmjd.train.loop.write_pictures", pictures)


def test_a_log_removed_under_a_run_is_whole_at_its_end(
    tmp_path: Path, tiny: Words, dmjd: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [tmp_path / name / "log.jsonl" for name in ("run", "alone")]
    between_checkpoints(monkeypatch, lambda: logs[0].unlink())
    for log in logs:
        code, _, errors = dmjd("pretrain", *tiny(log.parent, *WORDS, "log_every=2"))
        assert code == 0
        assert errors.count("was removed or replaced while the run wrote it") == int(log is logs[0])
    assert logs[0].read_bytes() == logs[1].read_bytes()


@pytest.mark.parametrize("anew", [False, True])
def test_a_run_whose_folder_is_removed_ends_and_leaves_the_next_ones_alone(
    tmp_path: Path, tiny: Words, dmjd: Command, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    run = tmp_path / "run"

    def remove() -> None:
        shutil.rmtree(run)
        if anew:
            run.mkdir()
            (run / ".lock").touch()

    between_checkpoints(monkeypatch, remove)
    code, _, errors = dmjd("pretrain", *tiny(run, *WORDS, "checkpoint_async=false"))
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert (code, len(said)) == (2, 1)
    assert said[0].startswith(f"error: run={run}: the folder, or its .lock, ")
    assert not run.exists() or {path.name for path in run.iterdir()} <= {".lock", "heartbeat"}


FREEZES = """
import subprocess
import dmjd.runs.checkpoint as checkpoint
commit, frozen = checkpoint.commit, []
def freezing(draft, *rest):
    path = commit(draft, *rest)
    if os.environ["RANK"] == "0" and not frozen:
        frozen.append(path)
        subprocess.run(["chattr", "+i", path], check=True)
    return path
checkpoint.commit = freezing
"""


def test_ranks_go_on_where_an_old_checkpoint_cannot_be_removed(
    tmp_path: Path, tiny: Words, launch_world: Callable[..., Any], freeze: Callable[[Path], None]
) -> None:
    probe = tmp_path / "probe"
    probe.mkdir()
    freeze(probe)  # can it be done here? Rank 0 does it below
    words = ["pretrain", *tiny(tmp_path / "run", *WORDS, "engine=ddp", "keep_checkpoints=1")]
    old = tmp_path / "run" / "checkpoints" / "step-00000004"
    try:
        ranks = launch_world(2, words, telling(tmp_path / "said") + FREEZES)
        for rank in ranks:
            rank.join(120)
        assert [rank.exitcode for rank in ranks] == [0, 0]
        assert checkpoints(tmp_path / "run") == [4, 22]
        assert f"cannot remove {old}: " in (tmp_path / "said").read_text()
    finally:
        subprocess.run(["chattr", "-i", old], check=True)
