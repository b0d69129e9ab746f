"""Checkpoints that count only once their manifest, written last, is in place.

A checkpoint is a folder ``step-XXXXXXXX``. All ranks write into it under a temporary name, each flushes and digests its
own files, and rank 0 adds a manifest that lists every file with its size and SHA-256, and renames. A run killed at any
instruction leaves the previous one intact.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from dmjd.errors import CheckpointError, StorageError, UserError
from dmjd.files import read_file, replace_file, standing_place
from dmjd.interop.state_file import SUFFIXES
from dmjd.parallel.engine import Write
from dmjd.parallel.world import World, alone
from dmjd.runs.paths import CHECKPOINTS
from dmjd.safe_load import TENSORS, load_torch, parse_json

logger = logging.getLogger("dmjd")

MANIFEST = "manifest.json"
LOOP_STATE = "loop.pt"
FOLDER = CHECKPOINTS
FORMAT = 2
_PREFIX, _DRAFT = "step-", ".tmp"
_OURS = re.compile(rf"{_PREFIX}(\d{{8,}})({re.escape(_DRAFT)})?")
"""What this module makes and may remove. ``step-00001000-best`` beside it is a copy of somebody's."""
_UNPICKLED = (".metadata", ".pt", ".distcp")
"""How the names of files end that somebody could have added, and that a reader would find by itself."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ONE_PROCESS = alone(torch.device("cpu"))


def begin(folder: Path, step: int) -> Path:
    """An empty draft of the checkpoint of ``step`` in ``folder``, the run's checkpoint folder, made if absent.

    Raises:
        StorageError: if it cannot be made; earlier checkpoints stand.
    """
    draft = folder / f"{_PREFIX}{step:08d}{_DRAFT}"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    except OSError as error:
        raise _cannot_write(draft, error) from error
    return draft


def commit(draft: Path, write: Write, keep: int, keep_every: int | None = None, world: World = _ONE_PROCESS) -> Path:
    """Write one checkpoint, then drop all but the newest ``keep``, those of every ``keep_every`` steps, and later ones.

    A later one is there only if it was damaged: the run then resumed before it and is now writing that stretch again.
    Collective over ``world``, whose ranks share the folder.

    Args:
        draft: what :func:`begin` gave to rank 0.
        write: puts this rank's files into the draft and names them.

    Returns:
        The committed folder.

    Raises:
        StorageError: on every rank if it cannot be written; the draft is removed and earlier checkpoints stand.
    """
    try:
        parts = world.gather(world.all_or_none(lambda: _written(draft, write)))
        final: Path = world.on_main(
            lambda: _seal(draft, {name: entry for part in parts for name, entry in part.items()})
        )
    except UserError:  # our own StorageError, or another rank's sentence
        if world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    if world.is_main:
        _sweep(final, keep, keep_every)
    return final


def _sweep(final: Path, keep: int, keep_every: int | None) -> None:
    """Drop what :func:`commit` says. What the disk does not give up waits for the next commit; the run goes on."""
    folder = final.parent
    folders = committed(folder)
    position = folders.index(final) + 1
    older = [path for path in folders[: max(0, position - keep)] if not keep_every or step_of(path) % keep_every]
    for torn in [path for path in folder.iterdir() if _OURS.fullmatch(path.name) and not (path / MANIFEST).is_file()]:
        shutil.rmtree(torn, ignore_errors=True)  # a draft, or what was being dropped, when an earlier launch was killed
    for path in older + folders[position:]:
        try:
            _drop(path)
        except OSError as error:
            logger.warning("cannot remove %s: %s; the next checkpoint tries again", path, error)


def drop_after(folder: Path, step: int) -> None:
    """Drop the checkpoints of more than ``step`` steps: the run has gone back, and they are no part of it any more.

    Raises:
        StorageError: if one stays. The run would resume from it.
    """
    for later in committed(folder):
        if step_of(later) > step:
            try:
                _drop(later)
            except OSError as error:
                raise StorageError(f"going back to step {step}, cannot remove {later}: {error}") from error


def _drop(path: Path) -> None:
    if path.is_symlink():  # where it leads to is somebody's archive
        path.unlink()
        return
    # The manifest goes first, so a half-deleted checkpoint does not count either.
    (path / MANIFEST).unlink(missing_ok=True)
    # Somebody may be reading it on a network disk: what can go goes, and then the rest says why it does not.
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        shutil.rmtree(path)


def step_of(path: Path) -> int:
    """The optimizer steps behind a checkpoint folder, whose manifest tells them where somebody has renamed it."""
    named = _OURS.fullmatch(path.name)
    return int(named[1]) if named else _manifest(path).step


class _Manifest(NamedTuple):
    """files: name inside the folder -> bytes and SHA-256."""

    step: int
    files: dict[str, tuple[int, str]]


def _manifest(folder: Path) -> _Manifest:
    """The manifest of ``folder``. Raises CheckpointError, with the rest of a line that begins with the folder."""
    try:
        found = parse_json(read_file(folder / MANIFEST))
        version, step, files = found["format"], found["step"], found["files"]
        if version != FORMAT:
            raise CheckpointError(f"its format is {str(version)[:20]}, this version reads {FORMAT}")
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{MANIFEST} cannot be read ({error})") from error
    if type(step) is not int or not 0 <= step < 1 << 53:
        raise CheckpointError(f"{MANIFEST} cannot be read (step={str(step)[:20]})")
    for name, (size, digest) in entries.items():
        # At most one folder deep, and one way to write each: what is compared is what readers open.
        plain = name.isprintable() and str(PurePosixPath(name)) == name and name.count("/") <= 1
        if not plain or {"", ".", ".."} & set(name.split("/")):
            raise CheckpointError(f"{MANIFEST} lists {name[:80]!r}, which is no name of a file in a checkpoint")
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise CheckpointError(f"{MANIFEST} has no size and SHA-256 of {name}")
    return _Manifest(step, entries)


def _written(draft: Path, write: Write) -> dict[str, dict[str, Any]]:
    """Manifest entries of this rank's files, which are on the disk by then."""
    try:
        files = write()
        for path in files:
            _flush(path)
        return {str(path.relative_to(draft)): _entry(path) for path in files}
    # torch.save reports a full disk as RuntimeError, without an errno.
    except (OSError, RuntimeError, StorageError) as error:
        raise _cannot_write(draft, error) from error


def _seal(draft: Path, files: dict[str, dict[str, Any]]) -> Path:
    """Give a complete draft its manifest and its name."""
    final = draft.with_suffix("")
    try:
        _put_manifest(draft, files)
        if os.path.lexists(final):  # its manifest did not hold: it was passed over when the run resumed
            _drop(final)
        draft.rename(final)
        _flush(final.parent)
    except OSError as error:
        raise _cannot_write(draft, error) from error
    return final


def add(folder: Path, path: Path) -> None:
    """Make the file ``path``, which lies in a committed checkpoint, part of it."""
    _flush(path)
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in _manifest(folder).files.items()}
    _put_manifest(folder, {**files, str(path.relative_to(folder)): _entry(path)})


def _put_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    replace_file(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step_of(folder), "files": files}, indent=1))
    for path in (folder / MANIFEST, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        _flush(path)


def _cannot_write(draft: Path, error: Exception) -> StorageError:
    free = ""
    with suppress(OSError):  # of a disk that is gone
        # Of a full one torch says that a position is unexpected.
        free = f" ({shutil.disk_usage(standing_place(draft)).free >> 20} MiB are free)"
    earlier = "earlier checkpoints are intact" if committed(draft.parent) else f"{draft.parent} holds no checkpoint"
    return StorageError(f"cannot write {draft.with_suffix('')}: {error}{free}; {earlier}")


def committed(folder: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first."""
    found = (path.parent for path in folder.glob(f"{_PREFIX}*/{MANIFEST}"))
    return sorted(path for path in found if _OURS.fullmatch(path.name) and path.suffix != _DRAFT)


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


def pack_loop_state(state: dict[str, Any]) -> bytes:
    """What the loop, not the engine, needs to continue, as the file's content: the state itself may go on changing."""
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def read_loop_state(path: Path) -> dict[str, Any]:
    """The inverse of :func:`pack_loop_state`. Raises CheckpointError if the file holds anything else."""
    try:
        state: dict[str, Any] = load_torch(path / LOOP_STATE, TENSORS)
    except ValueError as error:
        raise CheckpointError(f"{path / LOOP_STATE} cannot be read: {error}") from error
    return state


def _defects(path: Path) -> list[str]:
    try:
        files = _manifest(path).files
    except CheckpointError as error:
        return [str(error)]
    defects = []
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if name.endswith(_UNPICKLED) and name not in files:
            defects.append(f"{name} is not in {MANIFEST}; remove it")
    for name, (size, digest) in files.items():
        file = path / name
        try:
            found = file.stat()
            # A pipe or a device is not opened.
            if not stat.S_ISREG(found.st_mode) or found.st_size != size or _digest(file) != digest:
                defects.append(f"{name} is not the file that was saved")
            elif not file.resolve().is_relative_to(path.resolve()):
                defects.append(f"{name} leads out of the checkpoint; put a copy in its place")
        except FileNotFoundError:
            defects.append(f"{name} is missing")
        except OSError as error:  # a bad disk, or rights
            defects.append(f"{name} cannot be read ({error.strerror})")
    return defects


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def fingerprint(weights: Path) -> str:
    """SHA-256 of a file of weights, or of a checkpoint's manifest, which lists those of its files. Raises OSError."""
    file = weights / MANIFEST if weights.is_dir() else weights
    if not file.is_file():  # a pipe would be waited for
        raise FileNotFoundError(file)
    return _digest(file)


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


def weights_at(name: str, key: str) -> Path:
    """What a user calls ``name`` under ``key``: a file, or the checkpoint folder in what is called so.

    Raises:
        CheckpointError: if there is neither.
    """
    path = Path(name)
    if not path.exists():
        raise CheckpointError(f"{key}={name} is not there; name a file of weights, a run folder or a checkpoint in it")
    if path.is_file():
        return path
    try:
        return resolve(path, key)
    except CheckpointError:
        files = sorted(file for file in path.glob("*") if file.suffix in SUFFIXES)
        if not files or (path / MANIFEST).is_file() or (path / FOLDER).is_dir():
            raise
        raise CheckpointError(
            f"{key}={name} is a folder; name the file of weights in it, as {key}={files[0]}"
        ) from None
