"""Atomic checkpoints: a checkpoint is complete once its manifest, written last, exists.

A checkpoint is a folder ``step-XXXXXXXX``. All ranks write into it under a temporary name, each flushes and hashes its
own files, and rank 0 adds a manifest that lists every file with its size and SHA-256, and renames the folder. A run
killed at any instruction leaves the previous checkpoint intact.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from dmjd.config.data import ENDINGS
from dmjd.errors import CheckpointError, StorageError, UserError
from dmjd.files import read_file, replace_file, standing_place
from dmjd.interop.state_file import OF_HUGGING_FACE, SUFFIXES, is_of_hugging_face
from dmjd.parallel.engine import Write
from dmjd.parallel.world import World, alone
from dmjd.runs.best import Validated, best_steps, read_best, write_best
from dmjd.runs.paths import CHECKPOINTS, CONFIG
from dmjd.safe_load import TENSORS, WEIGHT_INDEX, load_torch, parse_json, parse_weight_index

logger = logging.getLogger("dmjd")

MANIFEST = "manifest.json"
LOOP_STATE = "loop.pt"
FOLDER = CHECKPOINTS
FORMAT = 2
_PREFIX, _DRAFT, _REPLACED = "step-", ".tmp", ".old"
_OURS = re.compile(rf"{_PREFIX}(\d{{8,}})({re.escape(_DRAFT)}|{re.escape(_REPLACED)})?")
"""Names of the folders that this module creates and may remove; ``step-00001000-best`` is a user's copy."""
_UNPICKLED = (".metadata", ".pt", ".distcp")
"""Suffixes of files that a reader finds without the manifest, so an added one is an error."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_THREADS = 8
"""Files that are flushed and hashed at a time: a core hashes 1 to 2 GB/s."""
_ONE_PROCESS = alone(torch.device("cpu"))


def begin(folder: Path, step: int) -> Path:
    """Create an empty draft of the checkpoint of ``step`` in ``folder``, the checkpoint folder of the run.

    Raises:
        StorageError: if it cannot be created; earlier checkpoints stay intact.
    """
    draft = folder / f"{_PREFIX}{step:08d}{_DRAFT}"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    except OSError as error:
        raise _cannot_write(draft, error) from error
    return draft


def commit(
    draft: Path,
    write: Write,
    keep: int,
    keep_every: int | None = None,
    world: World = _ONE_PROCESS,
    best: Sequence[Validated] = (),
) -> Path:
    """Write one checkpoint, then remove the others except the newest ``keep``, those of every ``keep_every`` steps, and
    those that were the best when one of these was saved.

    Later checkpoints are removed too: they were damaged, so the run resumed before them and repeats their steps.
    Collective over ``world``, whose ranks share the folder.

    Args:
        draft: from :func:`begin` on rank 0.
        write: writes this rank's files into the draft and returns their paths.
        best: the best validations so far (:class:`~dmjd.runs.best.Best`); the last of them is recorded in ``best.json``
            of the run folder.

    Returns:
        The committed folder.

    Raises:
        StorageError: on every rank if it cannot be written; the draft is removed, earlier checkpoints stay intact.
    """
    try:
        parts = world.gather(world.all_or_none(lambda: _written(draft, write)))
        final: Path = world.on_main(
            lambda: _seal(draft, {name: entry for part in parts for name, entry in part.items()}, best)
        )
    except UserError:  # StorageError of this rank, or the error of another
        if world.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    if world.is_main:
        _sweep(final, keep, keep_every, best)
    return final


def _sweep(final: Path, keep: int, keep_every: int | None, best: Sequence[Validated]) -> None:
    """Remove the checkpoints that :func:`commit` names. One that stays is tried again at the next commit."""
    folder = final.parent
    folders = committed(folder)
    position = folders.index(final) + 1
    start = max(0, position - keep)
    kept = best_steps(best, map(step_of, folders[start:position]))
    older = [path for path in folders[:start] if not keep_every or step_of(path) % keep_every]
    older = [path for path in older if step_of(path) not in kept]
    own = [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]
    for torn in [path for path in own if not (path / MANIFEST).is_file() or _is_replaced(path)]:
        shutil.rmtree(torn, ignore_errors=True)  # an earlier launch was killed while it wrote or removed it
    for path in older + folders[position:]:
        try:
            _drop(path)
        except OSError as error:
            logger.warning("cannot remove %s: %s; the next checkpoint tries again", path, error)


def _is_replaced(path: Path) -> bool:
    """Whether ``path`` is the earlier of two checkpoints of one step."""
    return path.suffix == _REPLACED and (path.with_suffix("") / MANIFEST).is_file()


def drop_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of more than ``step`` steps after a rollback.

    Raises:
        StorageError: if one cannot be removed, since the run would resume from it.
    """
    for later in committed(folder):
        if step_of(later) > step:
            try:
                _drop(later)
            except OSError as error:
                raise StorageError(f"rolling back to step {step}, cannot remove {later}: {error}") from error


def _drop(path: Path) -> None:
    if path.is_symlink():  # its target is a user's archive
        path.unlink()
        return
    # The manifest first, so that a partly removed checkpoint is incomplete.
    (path / MANIFEST).unlink(missing_ok=True)
    # A file in use on a network disk may stay: remove the others, then raise its error.
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        shutil.rmtree(path)


def step_of(path: Path) -> int:
    """The optimizer steps of a checkpoint folder: from its name, or from its manifest if a user has renamed it."""
    named = _OURS.fullmatch(path.name)
    return int(named[1]) if named else _manifest(path).step


class _Manifest(NamedTuple):
    """files: name inside the folder -> bytes and SHA-256."""

    step: int
    files: dict[str, tuple[int, str]]


def _manifest(folder: Path) -> _Manifest:
    """The manifest of ``folder``. Raises CheckpointError, to be printed after the name of the folder."""
    try:
        found = parse_json(read_file(folder / MANIFEST))
        version, step, files = found["format"], found["step"], found["files"]
        if version != FORMAT:
            raise CheckpointError(f"its format is {str(version)[:20]}, this version reads {FORMAT}")
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error})") from error
    if type(step) is not int or not 0 <= step < 1 << 53:
        raise CheckpointError(f"{MANIFEST} cannot be read (step={str(step)[:20]})")
    for name, (size, digest) in entries.items():
        # At most one folder deep and in one spelling, so that the file checked is the file read.
        plain = name.isprintable() and str(PurePosixPath(name)) == name and name.count("/") <= 1
        if not plain or {"", ".", ".."} & set(name.split("/")):
            raise CheckpointError(f"{MANIFEST} lists {name[:80]!r}, which is not a name of a file in a checkpoint")
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise CheckpointError(f"{MANIFEST} has no size and SHA-256 of {name}")
    return _Manifest(step, entries)


def _written(draft: Path, write: Write) -> dict[str, dict[str, Any]]:
    """Write and flush this rank's files; returns their manifest entries."""
    try:
        files = write()
        with ThreadPoolExecutor(_THREADS) as threads:
            flushed, entries = threads.map(_flush, files), threads.map(_entry, files)
            list(flushed)
            return {str(path.relative_to(draft)): entry for path, entry in zip(files, entries, strict=True)}
    # torch.save reports a full disk as RuntimeError, without an errno.
    except (OSError, RuntimeError, StorageError) as error:
        raise _cannot_write(draft, error) from error


def _seal(draft: Path, files: dict[str, dict[str, Any]], best: Sequence[Validated]) -> Path:
    """Write the manifest of a complete draft and rename it; then record the best checkpoint, before others go."""
    final = draft.with_suffix("")
    try:
        _put_manifest(draft, files)
        replaced = final.with_suffix(_REPLACED)
        if os.path.lexists(final):  # it was damaged, or the evaluation after its step was not done
            if os.path.lexists(replaced):
                _drop(replaced)
            final.rename(replaced)
        draft.rename(final)
        _flush(final.parent)
        if os.path.lexists(replaced):
            with suppress(OSError):  # one that stays is removed at the next commit
                _drop(replaced)
        if best:
            write_best(final.parent.parent, best)
    except OSError as error:
        raise _cannot_write(draft, error) from error
    return final


def add(folder: Path, *paths: Path) -> None:
    """Add files that lie in the committed checkpoint ``folder`` to its manifest."""
    for path in paths:
        _flush(path)
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in _manifest(folder).files.items()}
    _put_manifest(folder, files | {str(path.relative_to(folder)): _entry(path) for path in paths})


def _put_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    replace_file(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step_of(folder), "files": files}, indent=1))
    for path in (folder / MANIFEST, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        _flush(path)


def _cannot_write(draft: Path, error: Exception) -> StorageError:
    free = ""
    with suppress(OSError):  # the disk may be unmounted
        # On a full disk torch reports an unexpected position, so the free space is added.
        free = f" ({shutil.disk_usage(standing_place(draft)).free >> 20} MiB are free)"
    earlier = "earlier checkpoints are intact" if committed(draft.parent) else f"{draft.parent} holds no checkpoint"
    return StorageError(f"cannot write {draft.with_suffix('')}: {error}{free}; {earlier}")


def committed(folder: Path) -> list[Path]:
    """Checkpoints with a manifest, oldest first."""
    found = (path.parent for path in folder.glob(f"{_PREFIX}*/{MANIFEST}"))
    ours = (path for path in found if _OURS.fullmatch(path.name) and path.suffix != _DRAFT)
    return sorted(path for path in ours if not _is_replaced(path))


def newest(folder: Path, until: float = math.inf) -> Path | None:
    """The newest checkpoint whose files all agree with its manifest; None if there are no checkpoints.

    Args:
        until: steps; later checkpoints are ignored.

    Raises:
        CheckpointError: if all of them are damaged; the user decides whether to start again.
    """
    found = [path for path in committed(folder) if step_of(path) <= until]
    for path in reversed(found):
        defect = _defect(path)
        if defect is None:
            return path
        logger.warning("skipping %s: %s", path, defect)
    if found:
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged; restore one, or delete the folder to start again"
        )
    return None


def resolve(path: Path, key: str = "checkpoint") -> Path:
    """The checkpoint folder for a user's path under ``key``: a checkpoint, a run folder or a folder of checkpoints.

    Raises:
        CheckpointError: if there is no checkpoint, or it is damaged.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{key}={path} is not a folder; name a run folder or one of its checkpoints/step-XXXXXXXX"
        )
    path = path.resolve()  # the run folder is found from its parents, which `.` has not
    if (path / MANIFEST).is_file():
        if defect := _defect(path):
            raise CheckpointError(f"{path} is damaged: {defect}")
        return path
    found = newest(path / FOLDER) or newest(path)
    if found is None:
        raise CheckpointError(f"{path} holds no complete checkpoint; a complete one has a {MANIFEST}")
    return found


def pack_loop_state(state: dict[str, Any]) -> bytes:
    """The content of ``loop.pt``: the state of the loop at the time of the call."""
    content = io.BytesIO()
    torch.save(state, content)
    return content.getvalue()


def read_loop_state(path: Path) -> dict[str, Any]:
    """The inverse of :func:`pack_loop_state`. Raises CheckpointError if the file cannot be read."""
    try:
        state: dict[str, Any] = load_torch(path / LOOP_STATE, TENSORS)
    except ValueError as error:
        raise CheckpointError(f"{path / LOOP_STATE} cannot be read: {error}") from error
    return state


def read_buffers(path: Path, *, average: bool = False) -> dict[str, torch.Tensor]:
    """The buffers of the model in a checkpoint folder, such as running statistics of BatchNorm, or their moving
    average; empty for a model without any. Raises CheckpointError if they cannot be read."""
    part = read_loop_state(path).get("buffers", {})
    found = part.get("averages" if average else "buffers", {}) if isinstance(part, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise CheckpointError(f"{path / LOOP_STATE} cannot be read: its buffers are not named tensors")
    return found


def _defect(path: Path) -> str | None:
    """The first difference between a checkpoint and its manifest."""
    try:
        files = _manifest(path).files
    except CheckpointError as error:
        return str(error)
    for file in sorted(path.rglob("*")):
        name = str(file.relative_to(path))
        if name.endswith(_UNPICKLED) and name not in files:
            return f"{name} is not in {MANIFEST}; remove it"
    with ThreadPoolExecutor(_THREADS) as threads:
        defects = threads.map(lambda name: _file_defect(path, name, *files[name]), files)
        return next(filter(None, defects), None)


def _file_defect(path: Path, name: str, size: int, digest: str) -> str | None:
    file = path / name
    try:
        found = file.stat()
        # A pipe or a device must not be opened.
        if not stat.S_ISREG(found.st_mode) or found.st_size != size or _digest(file) != digest:
            return f"{name} is not the file that was saved"
        if not file.resolve().is_relative_to(path.resolve()):
            return f"{name} leads out of the checkpoint; put a copy in its place"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:  # a disk error, or permissions
        return f"{name} cannot be read ({error.strerror})"
    return None


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def fingerprint(weights: Path) -> str:
    """SHA-256 of a file of weights, of an index with its files, or of a checkpoint's manifest. Raises OSError."""
    file = weights / MANIFEST if weights.is_dir() else weights
    if not file.is_file():  # reading a pipe would wait
        raise FileNotFoundError(file)
    names = set[str]()
    if file.name.endswith(WEIGHT_INDEX):
        with suppress(ValueError):  # reading the weights raises the error
            names.update(parse_weight_index(read_file(file)).values())
    digests = [_digest(each) for each in (file, *map(file.with_name, sorted(names))) if each.is_file()]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


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


def best_checkpoint(run: Path) -> Path:
    """The best checkpoint of a fine-tuned run. Raises CheckpointError if it has none, or it is gone or damaged."""
    step = read_best(run).step
    path = run / FOLDER / f"{_PREFIX}{step:08d}"
    if not path.is_dir():
        raise CheckpointError(f"{path} is gone, the best checkpoint of {run}; use the newest one, which=newest")
    return resolve(path)


def _holds_images(path: Path) -> bool:
    """Whether one of the first 1,000 entries of each level of a class folder's tree is an image."""
    levels = (islice(path.glob(level), 1000) for level in ("*", "*/*", "*/*/*"))
    return any(file.suffix.lower() in ENDINGS for file in chain.from_iterable(levels))


def weights_at(name: str, key: str, which: str = "newest") -> Path:
    """The weights for a user's path ``name`` under ``key``: a file, a checkpoint folder as :func:`resolve` finds it, or
    the file or index of weights in a folder of Hugging Face.

    Args:
        which: of a run folder the "newest" checkpoint, or the "best" one.

    Raises:
        CheckpointError: if there are none.
    """
    path = Path(name)
    if which == "best":
        if not os.path.isdir(path / FOLDER):
            raise CheckpointError(
                f"which=best needs a run folder, and {key}={name} is not one; set one, or remove which"
            )
        return best_checkpoint(path)
    if not os.path.exists(path):  # Path.exists() raises an error for a name that is too long
        raise CheckpointError(
            f"{key}={name} does not exist; set a run folder, a checkpoint folder or a file of weights"
        )
    if path.is_file():
        return path
    try:
        return resolve(path, key)
    except CheckpointError:
        if (path / MANIFEST).is_file() or (path / FOLDER).is_dir() or (path / CONFIG).is_file():
            raise
        weights = [path / f"{name}{end}" for name in OF_HUGGING_FACE for end in ("", WEIGHT_INDEX)]
        if found := next((file for file in weights if file.is_file() and is_of_hugging_face(file)), None):
            return found
        indexes = sorted(path.glob(f"*{WEIGHT_INDEX}"))
        files = indexes or sorted(file for file in path.glob("*") if file.suffix in SUFFIXES)
        if not files and _holds_images(path):
            raise CheckpointError(
                f"{key}={name} is a folder of images, which data.root names; {key} names a run folder, a checkpoint in "
                "it or a file of weights"
            ) from None
        if not files:
            raise
        raise CheckpointError(
            f"{key}={name} is a folder; name the file of weights in it, as {key}={files[0]}"
        ) from None
