from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dmjd.errors import CheckpointError, StorageError
from dmjd.runs.checkpoint import (
    MANIFEST,
    add,
    begin,
    commit,
    committed,
    drop_after,
    newest,
    pack_loop_state,
    read_loop_state,
    resolve,
    step_of,
)

Launch = Callable[..., Any]


def save(folder: Path, *steps: int, keep: int = 10) -> list[Path]:
    def commit_one(step: int) -> Path:
        draft = begin(folder, step)

        def write() -> list[Path]:
            model, loop = draft / "model.pt", draft / "loop.pt"
            model.write_text(str(step))
            loop.write_bytes(pack_loop_state({"step": step}))
            return [model, loop]

        return commit(draft, write, keep)

    return [commit_one(step) for step in steps]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_is_what_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    (path,) = save(folder, 7)
    assert path == folder / "step-00000007" == newest(folder)
    assert (path / "model.pt").read_text() == "7"
    assert read_loop_state(path) == {"step": 7}
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["step"] == 7
    assert set(manifest["files"]) == {"model.pt", "loop.pt"}
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_checkpoints_are_in_the_order_of_steps(tmp_path: Path) -> None:
    save(tmp_path, 20, 900, 1000)
    assert [path.name for path in committed(tmp_path)] == ["step-00000020", "step-00000900", "step-00001000"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent") is None
    assert committed(tmp_path) == []
    (tmp_path / "step-00000001").mkdir()
    assert newest(tmp_path) is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    paths = save(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    assert sorted(tmp_path.iterdir()) == paths[-keep:]


@pytest.mark.parametrize("part", ["", "shards"])
def test_what_cannot_be_removed_is_told_and_tried_again(
    tmp_path: Path, freeze: Callable[[Path], None], caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """All of a checkpoint, or a folder in it: then the rest goes, and with the manifest it ends to be one."""
    (old,) = save(tmp_path, 1)
    (old / "shards").mkdir()
    (old / "shards" / "open").write_text("somebody reads it")
    freeze(old / part)
    _, third = save(tmp_path, 2, 3, keep=1)
    told = [record.getMessage() for record in caplog.records]
    assert all(line.startswith(f"cannot remove {old}: ") for line in told)
    assert len(told) == (2 if part == "" else 1), "of what is no checkpoint any more there is nothing left to say"
    assert committed(tmp_path) == ([old, third] if part == "" else [third])
    assert newest(tmp_path) == third
    assert tree(old).keys() == ({"model.pt", "loop.pt", MANIFEST, "shards/open"} if part == "" else {"shards/open"})


def test_going_back_needs_what_is_later_gone(tmp_path: Path, freeze: Callable[[Path], None]) -> None:
    first, second = save(tmp_path, 1, 2)
    freeze(second)
    with pytest.raises(StorageError, match=rf"rolling back to step 1, cannot remove {second}: "):
        drop_after(tmp_path, 1)
    assert committed(tmp_path) == [first, second]


def test_an_archive_that_a_link_leads_to_is_not_dropped(tmp_path: Path) -> None:
    (old,) = save(tmp_path / "run", 1)
    archived = old.rename(tmp_path / "archived")
    old.symlink_to(archived)
    before = tree(archived)
    (second,) = save(tmp_path / "run", 2, keep=1)
    assert list((tmp_path / "run").iterdir()) == [second]
    assert tree(archived) == before


def test_a_write_that_raises_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = tree(tmp_path)

    draft = begin(tmp_path, 2)

    def full_disk() -> list[Path]:
        (draft / "model.pt").write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(
        StorageError, match=r"cannot write .*step-00000002: No space .*; earlier checkpoints are intact"
    ):
        commit(draft, full_disk, keep=1)
    assert newest(tmp_path) == tmp_path / "step-00000001"
    assert {name: data for name, data in tree(tmp_path).items() if name in before} == before
    (second,) = save(tmp_path, 2, keep=1)
    assert newest(tmp_path) == second
    assert (second / "model.pt").read_text() == "2"
    assert list(tmp_path.iterdir()) == [second]


def test_a_disk_that_is_gone_is_a_sentence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    draft = begin(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", gone)
    with pytest.raises(StorageError, match=r"^cannot write .*: \[Errno 116\] Stale file handle; .* no checkpoint"):
        commit(draft, gone, keep=1)


def killing(at: str, folder: Path) -> str:
    """A program that commits step 1, then dies in the commit of step 2 at the call of ``at``."""
    return f"""
import os, pathlib, shutil, signal
from dmjd.runs import checkpoint

folder = pathlib.Path({str(folder)!r})

def write(draft):
    (draft / "model.pt").write_text("x" * 100_000)
    return [draft / "model.pt"]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def slow(draft):
    with (draft / "model.pt").open("w") as file:
        file.write("half")
        file.flush()
        die()

def commit(step, write):
    draft = checkpoint.begin(folder, step)
    checkpoint.commit(draft, lambda: write(draft), keep=1)

commit(1, write)
if {at!r} != "write":
    {at} = die
commit(2, slow if {at!r} == "write" else write)
"""


@pytest.mark.parametrize("at", ["write", "os.fsync", "checkpoint.json.dumps", "pathlib.Path.rename", "shutil.rmtree"])
def test_a_run_killed_inside_a_commit_has_its_previous_checkpoint(tmp_path: Path, launch: Launch, at: str) -> None:
    process = launch([], killing(at, tmp_path))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found = newest(tmp_path)
    assert found == tmp_path / "step-00000001"
    assert (found / "model.pt").read_text() == "x" * 100_000
    (second,) = save(tmp_path, 2, keep=1)
    assert newest(tmp_path) == second
    assert sorted(tmp_path.iterdir()) == [second], "what the killed run left is gone"


def test_a_run_killed_while_it_drops_the_old_has_the_new(tmp_path: Path, launch: Launch) -> None:
    process = launch([], killing("pathlib.Path.unlink", tmp_path))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert newest(tmp_path) == tmp_path / "step-00000002"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "file missing": lambda path: (path / "model.pt").unlink(),
    "file truncated": lambda path: os.truncate(path / "model.pt", 1),
    "file longer": lambda path: (path / "model.pt").write_text("22x"),
    "a bit flipped": lambda path: (path / "model.pt").write_text("23"),
    "manifest missing": lambda path: (path / MANIFEST).unlink(),
    "manifest empty": lambda path: (path / MANIFEST).write_text(""),
    "manifest truncated": lambda path: os.truncate(path / MANIFEST, 40),
    "manifest of zeros": lambda path: (path / MANIFEST).write_bytes(bytes(100)),
    "manifest of another format": lambda path: (path / MANIFEST).write_text('{"format": 99}'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_checkpoint_is_passed_over_and_replaced(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    first, second = save(tmp_path, 11, 22)
    damage(second)
    assert newest(tmp_path) == first
    assert resolve(tmp_path) == first
    if (second / MANIFEST).exists():
        with pytest.raises(CheckpointError, match="step-00000022 is damaged: ") as caught:
            resolve(second)
        assert "\n" not in str(caught.value)
    save(tmp_path, 22)
    assert newest(tmp_path) == second
    assert (second / "model.pt").read_text() == "22"


def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_earlier_one(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 22)
    replaced = path.rename(path.with_suffix(".old"))  # killed before the draft had its name
    assert newest(tmp_path) == replaced
    assert step_of(replaced) == 22
    assert save(tmp_path, 22, keep=1) == [path] == committed(tmp_path)
    assert not replaced.exists()


def test_a_checkpoint_that_the_disk_does_not_give_back_is_passed_over(tmp_path: Path) -> None:
    first, second = save(tmp_path, 11, 22)
    (second / "empty.bin").touch()
    add(second, second / "empty.bin")
    assert newest(tmp_path) == second
    (second / "empty.bin").unlink()
    (second / "empty.bin").symlink_to("/proc/self/mem")  # a file of no bytes, and reading it is an error of the device
    assert newest(tmp_path) == first
    with pytest.raises(CheckpointError, match=r"step-00000022 is damaged: empty\.bin cannot be read \(Input/output"):
        resolve(second)


def test_a_damaged_archive_that_a_link_leads_to_is_replaced_and_left(tmp_path: Path) -> None:
    _, second = save(tmp_path, 1, 2)
    archive = second.rename(tmp_path / "archive")
    second.symlink_to(archive)
    (archive / "model.pt").write_text("damaged")
    assert save(tmp_path, 2) == [second] == [newest(tmp_path)]
    assert not second.is_symlink()
    assert (archive / "model.pt").read_text() == "damaged"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_checkpoint_does_not_push_a_sound_one_out(tmp_path: Path, keep: int) -> None:
    # A run that resumed from 10 because 30 is damaged, with checkpoints at other steps than before.
    save(tmp_path, 10, 30)
    (tmp_path / "step-00000030" / "model.pt").write_text("damaged")
    (written,) = save(tmp_path, 20, keep=keep)
    assert written.is_dir()
    assert newest(tmp_path) == written


def test_a_checkpoint_is_named_by_itself_its_run_or_their_folder(tmp_path: Path) -> None:
    first, second = save(tmp_path / "checkpoints", 1, 2)
    assert resolve(first) == first
    assert resolve(tmp_path / "checkpoints") == second
    assert resolve(tmp_path) == second


def test_what_is_no_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint=.*absent is not a folder; name a run folder"):
        resolve(tmp_path / "absent")
    (tmp_path / "model.pt").write_text("x")
    with pytest.raises(CheckpointError, match=r"model\.pt is not a folder"):
        resolve(tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"holds no complete checkpoint.*manifest\.json"):
        resolve(tmp_path)


def test_copies_beside_the_checkpoints_are_neither_taken_for_one_nor_removed(tmp_path: Path) -> None:
    _, second = save(tmp_path, 1, 2)
    best, half = tmp_path / "step-00000002-best", tmp_path / "step-00000002.copy"
    shutil.copytree(second, best)
    shutil.copytree(second, half, ignore=shutil.ignore_patterns(MANIFEST))
    kept = tree(best), tree(half)
    assert newest(tmp_path) == second
    (third,) = save(tmp_path, 3, keep=1)
    drop_after(tmp_path, 1)
    assert (tree(best), tree(half)) == kept
    assert not third.exists()


def test_a_renamed_checkpoint_knows_its_steps(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 7)
    best = path.rename(tmp_path / "best")
    assert resolve(best) == best
    assert step_of(best) == 7
    (best / "more.bin").write_text("more")
    add(best, best / "more.bin")
    assert step_of(best) == 7
    (best / "more.bin").write_text("less")
    with pytest.raises(CheckpointError, match=r"more\.bin is not the file that was saved"):
        resolve(best)


def test_a_half_written_checkpoint_cannot_be_named(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1)
    draft = tmp_path / "step-00000002.tmp"
    shutil.copytree(path, draft)
    assert newest(tmp_path) == path
    (draft / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        resolve(draft)


def test_a_run_that_goes_back_finds_and_keeps_what_is_old_enough(tmp_path: Path) -> None:
    save(tmp_path, 4, 8, 12)
    assert newest(tmp_path, until=11) == tmp_path / "step-00000008"
    assert newest(tmp_path, until=8) == tmp_path / "step-00000008"
    assert newest(tmp_path, until=3) is None
    drop_after(tmp_path, 8)
    assert [step_of(path) for path in committed(tmp_path)] == [4, 8]
