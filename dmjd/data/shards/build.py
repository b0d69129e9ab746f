"""``dmjd shards build``: write a source of images as a shard set.

The sizes of the source files decide which image goes into which tar, before any image is read. So any number of
processes can write the tars in any order, and a build that is killed and restarted gives the bytes of an uninterrupted
one. Every finished tar has a ``.part`` file in ``.parts``, which is removed at the end; ``build.json`` records the
source and options.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import reprlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import PIL
from PIL import features

from dmjd import __version__
from dmjd.config.data import ENDINGS
from dmjd.data.held_out import HeldOut
from dmjd.data.shards.encode import encode
from dmjd.data.shards.index import MANIFEST, Shard, load
from dmjd.data.shards.location import is_plain
from dmjd.data.shards.part import Part, Saved, as_records, count_rejects, record, reject, save_parts
from dmjd.data.shards.pool import available_workers, each
from dmjd.data.shards.sources import Item, Source, find_source, split_source
from dmjd.data.shards.tar import TarWriter
from dmjd.errors import BadImage, DataError, StorageError
from dmjd.files import at_home, read_at_most, replace_file
from dmjd.safe_load import parse_json

RECIPE = "build.json"
PARTS = ".parts"
MEGABYTE = 1_000_000

_MOST_RECIPE_BYTES = 1 << 20
_STEM_LENGTH = 80  # a key with number and ending has to fit 100 characters, the name field of a tar header


def build_shards(
    src: str,
    dst: str,
    workers: int | None = None,
    shard_mb: int = 256,
    channels: int = 3,
    held_out: HeldOut | None = None,
    endings: Sequence[str] = ENDINGS,
) -> list[Saved]:
    """Build a shard set at ``dst``, or ``dst/train`` and ``dst/val`` if the source has splits; continue if begun.

    Args:
        src: see :func:`dmjd.data.shards.sources.find_source`.
        dst: a folder that is empty, does not exist, or has a build of the same source with the same options.
        workers: number of processes; by default one per processor.
        shard_mb: megabytes of source images per tar.
        channels: 1 or 3, for readers; see :func:`dmjd.data.shards.encode.encode`.
        held_out: images of a source without a held-out split to store as ``dst/val``.
        endings: endings of image files in a folder.

    Raises:
        DataError: if the source is missing, has no usable image or no image of one split, or the destination has
            other files.
        StorageError: if the destination cannot be written; finished tars stay.
    """
    workers = workers or available_workers()
    src, folder = _resolved(src), Path(at_home(dst))
    _check_destination(Path(src), folder)
    source = find_source(src, workers, endings)
    kind = source.kind
    if held_out is not None:
        source, kind = split_source(source, src, held_out), f"{kind}, {held_out}:"
    odd = next((name for name in (src, *source.classes) if not is_plain(name)), None)
    if odd is not None:
        raise DataError(f"{odd!r} has control characters in its name; rename it")
    recipe = _recipe(f"{kind} {Path(src)}", source, shard_mb, channels)
    text = recipe["source"]
    divided = "val" in source.splits
    folders = {split: folder / split if divided else folder for split in source.splits}
    if _is_finished(folder, recipe, folders):
        return [_saved(path) for path in folders.values()]
    try:
        _begin(folder, recipe, list(folders.values()))
        parts = {}
        for split, path in folders.items():
            jobs = _jobs(split, source.splits[split], path, folder / PARTS, shard_mb * MEGABYTE, channels)
            parts[split] = _make_parts(jobs, workers, f"shards of {split}")
        _check_use(folder, parts)
        saved = [save_parts(path, parts[split], channels, source.classes, text) for split, path in folders.items()]
        shutil.rmtree(folder / PARTS)
    except OSError as error:
        raise _full(folder, error) from error
    return saved


def _resolved(src: str) -> str:
    """``src``, a path or a pattern, as an absolute path without links, so that a source has one name."""
    parts = Path(at_home(src)).parts
    # Components that exist are literal, even with brackets in them; the pattern begins after them.
    exists = sum(os.path.lexists(Path(*parts[:count])) for count in range(1, len(parts) + 1))
    path = os.path.realpath(Path(*parts[:exists]))
    return path if exists == len(parts) else os.path.join(glob.escape(path), *parts[exists:])


def _begin(folder: Path, recipe: dict[str, Any], folders: list[Path]) -> None:
    """Create the folders and ``build.json``, and remove the drafts of killed processes."""
    for path in (folder / PARTS, *folders):
        path.mkdir(parents=True, exist_ok=True)
    for path in {folder, folder / PARTS, *folders}:
        for draft in path.glob("*.tmp"):
            draft.unlink()
    replace_file(folder / RECIPE, json.dumps(recipe, indent=1) + "\n")


class _Job(NamedTuple):
    """One tar to write. ``first``: number of the first item in its split."""

    items: list[Item]
    first: int
    tar: Path
    parts: Path
    channels: int

    @property
    def part(self) -> Path:
        """The file that records the finished tar."""
        return self.parts / f"{self.tar.stem}.part"


def make_part(job: _Job) -> Part:
    """Write a tar, then its ``.part`` file."""
    rows, rejects = [], []
    try:
        with TarWriter(job.tar, job.parts) as tar:
            for number, item in enumerate(job.items, job.first):
                try:
                    image = encode(item.name, item.read(), job.channels)
                except BadImage as bad:
                    rejects.append(reject(bad))
                    continue
                offset = tar.add(_key(number, item.stem), item.label, image.data, image.ending)
                rows.append(record(offset, image.data, item.label, image.height, image.width))
        part = Part(Shard(job.tar.name, len(rows), tar.size, tar.sha256), as_records(rows), rejects)
        if not rows:
            job.tar.unlink()
        part.write(job.part)
    except OSError as error:
        raise _full(job.tar, error) from error
    return part


def _check_use(folder: Path, parts: dict[str, list[Part]]) -> None:
    """Raise DataError for a split without samples; if no split has any, empty the destination."""
    for split, made in parts.items():
        if any(part.shard.samples for part in made):
            continue
        if not any(part.shard.samples for others in parts.values() for part in others):
            shutil.rmtree(folder / PARTS)
            (folder / RECIPE).unlink()
            for path in {folder / name for name in parts if (folder / name).is_dir()}:
                path.rmdir()
        rejects = [line for part in made for line in part.rejects]
        raise DataError(
            f"none of the {len(rejects)} images of {split} can be used, "
            f"the first, {rejects[0]['name']}, {rejects[0]['reason']}"
        )


def _key(number: int, stem: str) -> str:
    """The key of a sample: its number in the split and the file name, reduced to letters, digits, _ and -."""
    return f"{number:09d}_{re.sub(r'[^A-Za-z0-9_-]', '_', stem)[:_STEM_LENGTH]}"


def _make_parts(jobs: list[_Job], workers: int, label: str) -> list[Part]:
    parts = {number: part for number, job in enumerate(jobs) if (part := _finished_part(job))}
    missing = [number for number in range(len(jobs)) if number not in parts]
    for position, part in each(make_part, [jobs[number] for number in missing], workers, label):
        parts[missing[position]] = part
    return [parts[number] for number in range(len(jobs))]


def _finished_part(job: _Job) -> Part | None:
    part = Part.read(job.part, job.tar.name)
    if part and part.shard.samples and not (job.tar.is_file() and job.tar.stat().st_size == part.shard.bytes):
        return None
    return part


def _jobs(split: str, items: list[Item], folder: Path, parts: Path, most_bytes: int, channels: int) -> list[_Job]:
    """Split the images into runs of up to ``most_bytes`` of source files, each at least one image."""
    starts, filled = [0], 0
    for number, item in enumerate(items):
        size = max(item.size, 0)
        if filled + size > most_bytes and number > starts[-1]:
            starts.append(number)
            filled = 0
        filled += size
    return [
        _Job(items[start:end], start, folder / f"{split}-{number:06d}.tar", parts, channels)
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(items)], strict=True))
    ]


def _recipe(text: str, source: Source, shard_mb: int, channels: int) -> dict[str, Any]:
    """Everything that determines the bytes of a set, versions of encoders included."""
    splits = {}
    for split, items in source.splits.items():
        digest = hashlib.sha256()
        for item in items:
            digest.update(json.dumps([item.name, item.offset, item.size, item.label]).encode())
        splits[split] = {"images": len(items), "listing_sha256": digest.hexdigest()}
    encoders = {"pillow": PIL.__version__, "jpeg": features.version("libjpeg_turbo"), "zlib": features.version("zlib")}
    options = {"source": text, "shard_mb": shard_mb, "channels": channels, "splits": splits}
    return {**options, "dmjd": __version__, **encoders}


def _check_destination(src: Path, folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; give a folder for the shards")
    if folder.is_dir() and any(folder.iterdir()) and not ((folder / RECIPE).is_file() or (folder / PARTS).is_dir()):
        raise DataError(f"{folder} has files that are not of a shard build; give an empty folder")
    if src.is_dir() and folder.resolve().is_relative_to(src.resolve()):
        raise DataError(f"{folder} is inside the source {src}; give a folder outside it")


def _is_finished(folder: Path, recipe: dict[str, Any], folders: dict[str, Path]) -> bool:
    if not (folder / RECIPE).is_file():
        return False
    try:
        begun = parse_json(read_at_most(folder / RECIPE, _MOST_RECIPE_BYTES))
    except ValueError:
        begun = {}
    begun = begun if isinstance(begun, dict) else {}
    for key in recipe:
        if begun.get(key) != recipe[key]:
            change = f"{key} was {_shown(begun.get(key))}, now {recipe[key]}"
            change = "the list of source files changed" if key == "splits" else change
            raise DataError(f"{folder} has another build: {change}; give another folder, or remove it first")
    return not (folder / PARTS).exists() and all((path / MANIFEST).is_file() for path in folders.values())


def _shown(value: object) -> str:
    return value if isinstance(value, str) and value.isprintable() else reprlib.repr(value)


def _saved(folder: Path) -> Saved:
    manifest = load(folder).manifest
    return Saved(folder, manifest.samples, len(manifest.shards), count_rejects(folder))


def _full(path: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        reason += "; another process may build there as well"
    return StorageError(f"cannot write {path}: {reason}; finished tars stay, and the same command continues")
