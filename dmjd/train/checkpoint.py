"""Checkpoints that count only once their manifest, written last, is in place.

A checkpoint is a folder ``step-XXXXXXXX``. It is written under a temporary name, flushed to disk, given a manifest that
lists every file with its size and SHA-256, and renamed. A run killed at any instruction leaves the previous one intact.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dmjd.errors import CheckpointError, StorageError

logger = logging.getLogger("dmjd")

MANIFEST = "manifest.json"
LOOP_STATE = "loop.pt"
CONFIG = "config.yaml"
FOLDER = "checkpoints"
FORMAT = 1
_PREFIX = "step-"


def commit(folder: Path, step: int, write: Callable[[Path], None], keep: int, keep_every: int | None = None) -> Path:
    """Write one checkpoint, then drop all but the newest ``keep``, those of every ``keep_every`` steps, and later ones.

    A later one is there only if it was damaged: the run then resumed before it and is now writing that stretch again.

    Args:
        folder: the run's checkpoint folder; made if absent.
        step: optimizer steps done.
        write: puts the files into the folder it is given.

    Returns:
        The committed folder.

    Raises:
        StorageError: if it cannot be written; the draft is removed and earlier checkpoints stand.
    """
    final = folder / f"{_PREFIX}{step:08d}"
    draft = folder / f"{final.name}.tmp"
    try:
        _write(draft, final, step, write)
    # torch.save reports a full disk as RuntimeError, without an errno.
    except (OSError, RuntimeError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise StorageError(f"cannot write {final}: {error}; earlier checkpoints are intact") from error
    folders = committed(folder)
    position = folders.index(final) + 1
    older = folders[: max(0, position - keep)]
    for torn in [path for path in folder.glob(f"{_PREFIX}*") if not (path / MANIFEST).is_file()]:
        shutil.rmtree(torn, ignore_errors=True)  # a draft, or what was being dropped, when an earlier launch was killed
    for old in [path for path in older if not keep_every or step_of(path) % keep_every]:
        _drop(old)
    drop_after(folder, step)
    return final


def drop_after(folder: Path, step: int) -> None:
    """Drop the checkpoints of more than ``step`` steps: the run has gone back, and they are no part of it any more."""
    for later in committed(folder):
        if step_of(later) > step:
            _drop(later)


def _drop(path: Path) -> None:
    # The manifest goes first, so a half-deleted checkpoint does not count either.
    # Somebody may be reading it on a network disk; what stays behind is swept with the next commit.
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    """The optimizer steps behind a checkpoint folder."""
    return int(path.name.removeprefix(_PREFIX))


def _write(draft: Path, final: Path, step: int, write: Callable[[Path], None]) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    write(draft)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in sorted(draft.iterdir())}
    for name in files:
        _flush(draft / name)
    manifest = draft / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1))
    _flush(manifest)
    _flush(draft)
    # A folder of this name is one whose manifest did not hold: it was passed over when the run resumed.
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    _flush(final.parent)


def committed(folder: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{_PREFIX}*/{MANIFEST}") if path.parent.suffix != ".tmp")


def newest(folder: Path, until: float = math.inf) -> Path | None:
    """The newest checkpoint whose files are all as its manifest says; None if there is none at all.

    Args:
        until: steps; later checkpoints do not count.

    Raises:
        CheckpointError: if there are some and all are damaged. Beginning anew is for the user to decide.
    """
    found = [path for path in committed(folder) if step_of(path) <= until]
    for path in reversed(found):
        defects = _defects(path)
        if not defects:
            return path
        logger.warning("passing over %s: %s", path, defects[0])
    if found:
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged; restore one, or delete the folder to begin anew"
        )
    return None


def resolve(path: Path, key: str = "checkpoint") -> Path:
    """A checkpoint folder from what a user names under ``key``: itself, a run folder, or the folder of checkpoints.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{key}={path} is not a folder; name a run folder or one of its checkpoints/step-XXXXXXXX"
        )
    path = path.resolve()  # its run folder is found by going up, which `.` would not allow
    if (path / MANIFEST).is_file():
        defects = _defects(path)
        if defects:
            raise CheckpointError(f"{path} is damaged: {defects[0]}")
        return path
    found = newest(path / FOLDER) or newest(path)
    if found is None:
        raise CheckpointError(f"{path} holds no complete checkpoint; a complete one has a {MANIFEST}")
    return found


def write_loop_state(folder: Path, state: dict[str, Any]) -> None:
    """What the loop, not the engine, needs to continue."""
    torch.save(state, folder / LOOP_STATE)


def read_loop_state(path: Path) -> dict[str, Any]:
    """The inverse of :func:`write_loop_state`."""
    state: dict[str, Any] = torch.load(path / LOOP_STATE, map_location="cpu", weights_only=True)
    return state


def _defects(path: Path) -> list[str]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    if manifest.get("format") != FORMAT:
        return [f"its format is {manifest.get('format')}, this version reads {FORMAT}"]
    defects = []
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            defects.append(f"{name} is missing")
        elif file.stat().st_size != expected["bytes"] or _digest(file) != expected["sha256"]:
            defects.append(f"{name} is not the file that was saved")
    return defects


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
