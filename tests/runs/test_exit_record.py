"""A launch that ends by an error leaves word of the cause, whichever rank met it and whatever became of the others."""

from __future__ import annotations

import json
import platform
import shlex
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dmjd import cli
from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError, UserError
from dmjd.runs.exit_record import LONGEST, NEXT, ExitRecord, exit_reason
from dmjd.runs.folder import RunFolder
from dmjd.runs.paths import RunPaths
from dmjd.train import loop
from dmjd.train.callbacks import Callback
from dmjd.train.stop import OUT_OF_TIME

HERE = platform.node()


@pytest.mark.parametrize(
    ("error", "reason", "detail"),
    [
        (ConfigError("epochs must be above 0"), "error", "epochs must be above 0"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
        (AssertionError(), "crashed", f"rank 3 on {HERE}: AssertionError"),
        (KeyError("lr"), "crashed", f"rank 3 on {HERE}: KeyError: 'lr'"),
        (
            RuntimeError("CUDA error: device-side\n  assert"),
            "crashed",
            f"rank 3 on {HERE}: RuntimeError: CUDA error: device-side assert",
        ),
        # As gloo, NCCL and the store of torch 2.14 say it.
        (RuntimeError("[pair.cc:545] Read error [10.0.0.2]:1: Connection reset by peer"), "lost", None),
        (RuntimeError("[pair.cc:538] Connection closed by peer [10.231.7.2]:3939"), "lost", None),
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"), "lost", None),
        (RuntimeError("ncclRemoteError: possibly a network error or a remote process exited"), "lost", None),
        (RuntimeError("Connection was likely closed. Did the remote server shutdown or crash?"), "lost", None),
    ],
)
def test_the_cause_of_an_error(error: BaseException, reason: str, detail: str | None) -> None:
    found = exit_reason(error, rank=3)
    assert found[0] == reason
    assert found[0] in NEXT
    assert detail is None or found[1] == detail


@pytest.mark.parametrize("reason", NEXT)
@pytest.mark.parametrize("name", ["run", "a b", "dmjd"])
def test_a_record_names_the_folder_in_which_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    ExitRecord(Path(name, "STOP_REASON"), lambda: 5, 9, 0).write(reason, "so it is")
    assert RunPaths(Path(name)).read_stop_reason()["next"] == NEXT[reason].replace("RUN", shlex.quote(name))
    moved = Path(name).rename("new place")
    assert RunPaths(moved).read_stop_reason()["next"] == NEXT[reason].replace("RUN", "'new place'")


def test_a_page_of_frames_is_cut() -> None:
    _, detail = exit_reason(RuntimeError("no kernel\n" + "frame #1\n" * 1000), rank=0)
    assert "no kernel frame #1" in detail
    assert "\n" not in detail
    assert len(detail) < LONGEST + 50


FAULT = """
import signal
import dmjd.train.loop as loop
import torch
update = loop.Trainer.log_finished
def fault(self):
    if self.position.step == 5 and self.world.rank == {rank}:
        {act}
    return update(self)
loop.Trainer.log_finished = fault
"""


@pytest.mark.parametrize(
    ("rank", "act", "reason", "says"),
    [
        (
            1,
            "raise RuntimeError('the sums do not\\n agree')",
            "crashed",
            "rank 1 on {}: RuntimeError: the sums do not agree",
        ),
        (0, "assert self.position.step == 0, self.position.step", "crashed", "rank 0 on {}: AssertionError: 5"),
        (1, "raise torch.OutOfMemoryError('2.00 GiB')", "error", "rank 1 ran out of the memory in a step"),
        (1, "os.kill(os.getpid(), signal.SIGKILL)", "lost", "rank 0 on {}: RuntimeError: "),
    ],
    ids=["crash", "crash of rank 0", "memory", "kill"],
)
def test_of_two_ranks_the_cause_is_left_and_not_what_followed(
    rank: int,
    act: str,
    reason: str,
    says: str,
    tmp_path: Path,
    tiny: Callable[..., list[str]],
    launch_world: Callable[..., Any],
) -> None:
    words = tiny(tmp_path / "run", "batch_size=64", "engine=ddp", "checkpoint_every=3", "log_every=1")
    prelude = f"sys.stderr = open({str(tmp_path / 'said')!r}, 'a')\n" + FAULT.format(rank=rank, act=act)
    processes = launch_world(2, ["pretrain", *words], prelude)
    for process in processes:
        process.join(120)
    assert all(process.exitcode for process in processes)
    assert (processes[rank].exitcode == -signal.SIGKILL) == (reason == "lost")
    record = json.loads((tmp_path / "run" / "STOP_REASON").read_text())
    assert (record["reason"], record["step"]) == (reason, 5)
    assert record["detail"].startswith(says.format(HERE))
    assert "\n" not in record["detail"]


def test_what_ends_before_there_is_a_run_has_a_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmjd: Callable[..., tuple[int, str, str]]
) -> None:
    def told() -> UserError:
        error = UserError("rank 0 says it")
        error.reported = True
        return error

    def say(error: Exception) -> None:
        def verb(words: object) -> None:
            raise error

        monkeypatch.setitem(cli.COMMANDS, "pretrain", verb)
        with suppress(RuntimeError):
            dmjd("pretrain")

    say(RuntimeError("nobody asked"))
    word = tmp_path / "word"
    monkeypatch.setenv("DMJD_EXIT_RECORD", str(word))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    say(told())
    assert not word.exists()
    say(RuntimeError("no such device"))
    assert word.read_text() == f"crashed: rank 1 on {HERE}: RuntimeError: no such device\n"
    say(ConfigError("the first word stands"))
    assert word.read_text().startswith("crashed")
    word.unlink()
    say(ConfigError("data.root=/x is not a folder"))
    assert word.read_text() == "error: data.root=/x is not a folder\n"
    word.unlink()
    monkeypatch.delenv("DMJD_EXIT_RECORD")
    monkeypatch.setenv("DMJD_LAST_WORD", str(word))  # the former name, which launchers of users set
    say(ConfigError("data.root=/y is not a folder"))
    assert word.read_text() == "error: data.root=/y is not a folder\n"
    # Where there is no place for it, the error is still the one that is told.
    say(RuntimeError("no such device"))
    monkeypatch.setenv("DMJD_EXIT_RECORD", str(tmp_path / "removed" / "word"))
    with pytest.raises(RuntimeError, match="no such device"):
        dmjd("pretrain")


def test_the_next_launch_clears_the_marker_away_and_leaves_the_last_word(
    tmp_path: Path,
    tiny: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    dmjd: Callable[..., tuple[int, str, str]],
) -> None:
    """A job that has waited for the folder begins before the script of the one before has looked why that one ended."""
    run, first, second = (tmp_path / name for name in ("run", "first", "second"))
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: {})
    pretrain = loop.pretrain

    def followed(config: PretrainConfig, callbacks: Sequence[Callback]) -> RunFolder:
        folder = pretrain(config, callbacks)
        monkeypatch.setenv("DMJD_EXIT_RECORD", str(second))
        monkeypatch.setattr(loop.Trainer, "train", lambda self: marked.append(folder.stop_reason.exists()))
        pretrain(config)  # it has the folder, and is under way when the first one looks
        return folder

    marked: list[bool] = []
    monkeypatch.setattr(loop, "pretrain", followed)
    monkeypatch.setenv("DMJD_EXIT_RECORD", str(first))
    code, out, error = dmjd("pretrain", *tiny(run, "time_budget=0:00:00"))
    assert marked == [False]
    assert (code, error.count("rror")) == (0, 0)
    assert out.startswith(f"{run}: ended; {run}/STOP_REASON is missing")
    assert first.read_text() == f"time: {OUT_OF_TIME}\n{NEXT['time']}\n"
    assert not second.exists()
