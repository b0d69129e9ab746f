"""The files that describe a shard set: ``manifest.json`` lists the tars, ``index.npy`` locates every sample.

The manifest is written last, so a folder without one is not a shard set. Readers read a sample at its offset and do not
parse the tars, so a truncated tar cannot silently shorten an epoch.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dmjd import __version__
from dmjd.data.shards.location import MOST_BYTES, check_name, is_plain, is_remote, join, sha256
from dmjd.data.shards.network import PATIENCE, Patience, read
from dmjd.errors import DataError
from dmjd.files import open_regular, read_at_most, replace_file
from dmjd.redact import redact
from dmjd.safe_load import JSON_BYTES, parse_json, read_npy

FORMAT = 1
MANIFEST = "manifest.json"
RECORDS = "index.npy"
SPLITS = ("train", "val")

INDEX = np.dtype(
    [
        ("shard", "<u4"),  # number in the manifest
        ("offset", "<i8"),  # of the image's first byte in the tar
        ("size", "<u4"),  # of the image in bytes
        ("label", "<i4"),  # -1: no label
        ("crc32", "<u4"),  # zlib's, of the image's bytes
        ("height", "<u2"),
        ("width", "<u2"),
    ]
)
Records = npt.NDArray[np.void]

MOST_SAMPLES = 1 << 31
MOST_CLASSES = 1 << 20
MOST_IMAGE_BYTES = 1 << 30
_MOST_IN_MEMORY = 8 << 30  # of a remote index

_HEADER_BYTES = 8192  # limit of the .npy header

_MOST = {"samples": MOST_SAMPLES, "bytes": MOST_BYTES, "channels": 3, "format": 1 << 31}
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Shard:
    """One tar. ``url``: a path relative to the manifest's folder, an absolute path, or a URL; ``bytes``: file size."""

    url: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The manifest. ``classes``: names of the labels, empty without labels; ``source``: origin of the images."""

    shards: tuple[Shard, ...]
    samples: int
    channels: int
    classes: tuple[str, ...]
    index_sha256: str
    source: str
    dmjd: str = __version__

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the content, independent of the names and places of the tars."""
        content = [self.index_sha256, str(self.channels), *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()


class ShardSet(NamedTuple):
    """A loaded set. ``records``: read-only :data:`INDEX` array ``[samples]``, memory-mapped if the set is local."""

    folder: str
    manifest: Manifest
    records: Records

    def location(self, shard: int) -> str:
        """Path or URL of a tar."""
        return join(self.folder, self.manifest.shards[shard].url)

    def name(self, index: int) -> str:
        """The name of a sample: its tar and its offset there.

        Independent of the place of the set, since a run's quarantine list identifies images by name.
        """
        record = self.records[index]
        return f"{redact(self.manifest.shards[int(record['shard'])].url)}@{int(record['offset'])}"


def save(
    folder: Path,
    shards: Sequence[Shard],
    records: Records,
    channels: int,
    classes: Sequence[str],
    source: str,
) -> Manifest:
    """Write the index, then the manifest, of finished tars.

    Raises:
        DataError: if :func:`load` would reject them, for a name that a manifest cannot hold.
    """
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(records, dtype=INDEX), allow_pickle=False)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    manifest = Manifest(tuple(shards), len(records), channels, tuple(classes), digest, source)
    path = str(folder / MANIFEST)
    try:
        for shard in manifest.shards:
            _check_shard(shard, str(folder))
        _check(manifest)
    except ValueError as error:
        raise DataError(f"{path} is not written, since it {error}; rename the file") from error
    _validate(path, manifest, records)
    replace_file(folder / RECORDS, content)
    replace_file(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1) + "\n")
    return manifest


def load(root: str | Path, patience: Patience = PATIENCE) -> ShardSet:
    """Load the shard set at ``root``, a folder or a URL.

    Raises:
        DataError: if there is none, it has another format, manifest and index do not match, or a server fails for
            longer than ``patience``.
    """
    manifest = _read_manifest(str(root), patience)
    if manifest is None:
        raise DataError(f"{root} is not a shard set: it has no {MANIFEST}; make one with: dmjd shards build SRC {root}")
    return _with_records(str(root), manifest, patience)


def load_splits(root: str | Path, patience: Patience = PATIENCE) -> dict[str, ShardSet]:
    """Load the shard sets of ``root`` by split: ``root/train`` and ``root/val``, or ``root`` itself as "train".

    Raises:
        DataError: as :func:`load` does.
    """
    folders = {split: join(str(root), split) for split in SPLITS}
    manifests = {split: _read_manifest(folder, patience) for split, folder in folders.items()}
    found = {split: manifest for split, manifest in manifests.items() if manifest is not None}
    if not found:
        return {"train": load(root, patience)}
    return {split: _with_records(folders[split], manifest, patience) for split, manifest in found.items()}


def _read_manifest(folder: str, patience: Patience) -> Manifest | None:
    """The manifest in ``folder``; None if the file does not exist, and an error if it cannot be read."""
    path = join(folder, MANIFEST)
    try:
        content = read(path, patience, JSON_BYTES) if is_remote(path) else read_at_most(path, JSON_BYTES)
        return _parse(content, folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path} {error}; restore it or build the set again") from error


def _with_records(folder: str, manifest: Manifest, patience: Patience) -> ShardSet:
    path = join(folder, MANIFEST)
    records = _load_records(join(folder, RECORDS), path, manifest, patience)
    _validate(path, manifest, records)
    return ShardSet(folder, manifest, records)


def _parse(content: bytes, folder: str) -> Manifest:
    """Parse an untrusted manifest in ``folder``. ValueErrors continue a message that begins with its path."""
    try:
        entries = parse_json(content)
    except ValueError as error:
        raise ValueError(f"is damaged or not a manifest of shards ({error})") from error
    if not isinstance(entries, dict) or "format" not in entries:
        raise ValueError("is damaged or not a manifest of shards")
    if entries["format"] != FORMAT or type(entries["format"]) is not int:
        raise ValueError(f"has format {reprlib.repr(entries['format'])}, and this dmjd reads format {FORMAT}")
    values = _fields(Manifest, {key: value for key, value in entries.items() if key != "format"})
    shards, classes = values["shards"], values["classes"]
    if not isinstance(shards, list) or not isinstance(classes, list):
        raise ValueError("has shards or classes that are not lists")
    if len(classes) > MOST_CLASSES or not all(type(name) is str for name in classes):
        raise ValueError(f"has class names that are not text, or more than {MOST_CLASSES}")
    values["shards"], values["classes"] = tuple(parse_shard(entry, folder) for entry in shards), tuple(classes)
    manifest = Manifest(**values)
    _check(manifest)
    return manifest


def parse_shard(entry: object, folder: str) -> Shard:
    """Parse a shard of an untrusted manifest in ``folder``; ValueErrors as in :func:`_parse`."""
    shard = Shard(**_fields(Shard, entry))
    _check_shard(shard, folder)
    return shard


def _check_shard(shard: Shard, folder: str) -> None:
    _require_digest("sha256", shard.sha256)
    try:
        check_name(shard.url, folder)
    except ValueError as error:
        raise ValueError(f"has url={reprlib.repr(shard.url)}, which must be {error}") from error


def _check(manifest: Manifest) -> None:
    """Check that the fields of a manifest are valid and agree with each other."""
    _require_digest("index_sha256", manifest.index_sha256)
    if manifest.channels not in (1, 3):
        raise ValueError(f"has channels={manifest.channels}, which must be 1 or 3")
    odd = next((text for text in (manifest.source, manifest.dmjd, *manifest.classes) if not is_plain(text)), None)
    if odd is not None:
        raise ValueError(f"has the text {reprlib.repr(odd)}, which must have no control characters")
    urls = {shard.url for shard in manifest.shards}
    if len(urls) < len(manifest.shards):
        raise ValueError(f"lists {len(manifest.shards)} shards under {len(urls)} names")
    total = sum(shard.samples for shard in manifest.shards)
    if total != manifest.samples:
        raise ValueError(f"has samples={manifest.samples}, but its shards have {total}")


def _require_digest(name: str, value: str) -> None:
    """Check a digest, which names a file of the cache."""
    if not _SHA256.fullmatch(value):
        raise ValueError(f"has {name}={reprlib.repr(value)}, which must be 64 hexadecimal digits in lower case")


def _fields(record: type[Manifest | Shard], entry: object) -> dict[str, Any]:
    """``entry``, checked to have exactly the fields of ``record``, with their types and limits."""
    known = {field.name: field.type for field in fields(record)}
    if not isinstance(entry, dict) or entry.keys() != known.keys():
        found = sorted(map(reprlib.repr, entry)) if isinstance(entry, dict) else reprlib.repr(entry)
        raise ValueError(f"lacks or has too many fields ({reprlib.repr(found)} for {', '.join(known)})")
    for name, kind in known.items():
        value = entry[name]
        if kind == "int" and not (type(value) is int and 0 <= value <= _MOST[name]):
            raise ValueError(f"has {name}={reprlib.repr(value)}, which must be an integer from 0 to {_MOST[name]}")
        if kind == "str" and type(value) is not str:
            raise ValueError(f"has {name}={reprlib.repr(value)}, which must be text")
    return dict(entry)


def _load_records(location: str, manifest_path: str, manifest: Manifest, patience: Patience) -> Records:
    """Read the index and verify its sha256; memory-mapped if it is local."""
    remote = is_remote(location)
    limit = _HEADER_BYTES + manifest.samples * INDEX.itemsize
    if remote and limit > _MOST_IN_MEMORY:
        raise DataError(
            f"{location} has {manifest.samples} samples, too many to hold in memory; copy the set to a disk"
        )
    try:
        with io.BytesIO(read(location, patience, limit)) if remote else open_regular(location) as file:
            if sha256(file, limit) != manifest.index_sha256:
                raise DataError(f"{location} is not the index of {manifest_path}: its sha256 differs; restore both")
            file.seek(0)
            return read_npy(file, INDEX, mapped=not remote)
    except FileNotFoundError as error:
        raise DataError(f"{location} is missing, but {manifest_path} exists; restore it") from error
    except OSError as error:
        raise DataError(f"{location} cannot be read ({error.strerror or error})") from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{location} is not an index that this dmjd reads: {error}; build the set again") from error


def _validate(path: str, manifest: Manifest, records: Records) -> None:
    """Check that manifest and index agree, so that readers can trust every offset."""
    fault = _disagreement(manifest, records)
    if fault is not None:
        raise DataError(f"{path} {fault}; restore both files or build the set again")


def _disagreement(manifest: Manifest, records: Records) -> str | None:
    shards, numbers = manifest.shards, records["shard"]
    if len(records) != manifest.samples:
        return f"has samples={manifest.samples}, but its index has {len(records)}"
    if not len(records):
        return None
    if int(numbers.max()) >= len(shards):
        return f"has {len(shards)} shards, but its index has shard number {numbers.max()}"
    if np.any(numbers[1:] < numbers[:-1]):
        return "has an index that is not sorted by shard"
    for shard, count in zip(shards, np.bincount(numbers, minlength=len(shards)).tolist(), strict=True):
        if shard.samples != count:
            return f"has samples={shard.samples} for {shard.url}, but its index has {count}"
    # The greatest valid offset; comparing ends could overflow 2**63.
    last = np.array([shard.bytes for shard in shards], dtype=np.int64)[numbers] - records["size"]
    outside = np.flatnonzero((records["offset"] < 0) | (records["offset"] > last))
    if len(outside):
        shard = shards[int(numbers[outside[0]])]
        return f"has sample {outside[0]} beyond the {shard.bytes} bytes of {shard.url}"
    if int(records["size"].max()) > MOST_IMAGE_BYTES:
        return f"has an image of {records['size'].max()} bytes in its index, more than {MOST_IMAGE_BYTES}"
    if not (records["height"].all() and records["width"].all()):
        return "has an image without pixels in its index"
    low, high = int(records["label"].min()), int(records["label"].max())
    if low < -1 or high >= len(manifest.classes):
        return f"has {len(manifest.classes)} classes, but its index has labels {low} to {high}"
    return None
