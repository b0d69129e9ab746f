"""What a shard set is: ``manifest.json``, which says what there is, and ``index.npy``, which says where each sample is.

The manifest is written last, so a folder without one holds no shard set. Readers take the image bytes of a sample at an
offset of its tar and never parse a tar, so a truncated one cannot silently shorten an epoch.
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
        ("label", "<i4"),  # -1: none
        ("crc32", "<u4"),  # zlib's, of the image's bytes
        ("height", "<u2"),
        ("width", "<u2"),
    ]
)
Records = npt.NDArray[np.void]

MOST_SAMPLES = 1 << 31
MOST_CLASSES = 1 << 20
MOST_IMAGE_BYTES = 1 << 30
_MOST_IN_MEMORY = 8 << 30  # of an index behind a URL

_HEADER_BYTES = 8192  # of an index, and more than it has

_MOST = {"samples": MOST_SAMPLES, "bytes": MOST_BYTES, "channels": 3, "format": 1 << 31}
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Shard:
    """A tar: ``url`` is relative to the manifest's folder, an absolute path, or a URL; ``bytes`` is the file's size."""

    url: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``classes`` names the labels, and is empty where there are none; ``source`` says what the set was made from."""

    shards: tuple[Shard, ...]
    samples: int
    channels: int
    classes: tuple[str, ...]
    index_sha256: str
    source: str
    dmjd: str = __version__

    @property
    def fingerprint(self) -> str:
        """sha256 of the content, whatever the tars are called and wherever they are."""
        content = [self.index_sha256, str(self.channels), *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()


class ShardSet(NamedTuple):
    """``records`` is a read-only array of :data:`INDEX` ``[samples]``, mapped from the disk where it lies there."""

    folder: str
    manifest: Manifest
    records: Records

    def location(self, shard: int) -> str:
        """Path or URL of a tar."""
        return join(self.folder, self.manifest.shards[shard].url)

    def name(self, index: int) -> str:
        """What to call a sample in a sentence: its tar, and at which byte of it.

        The same wherever the set lies, since a run's list of bad images tells them apart by name.
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
    """Write the index and then the manifest; the tars are there already."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(records, dtype=INDEX), allow_pickle=False)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    manifest = Manifest(tuple(shards), len(records), channels, tuple(classes), digest, source)
    _check_own(folder, manifest, records)
    replace_file(folder / RECORDS, content)
    replace_file(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1) + "\n")
    return manifest


def _check_own(folder: Path, manifest: Manifest, records: Records) -> None:
    """Write nothing that :func:`load` would not read."""
    path = str(folder / MANIFEST)
    try:
        for shard in manifest.shards:
            _check_shard(shard, str(folder))
        _check(manifest)
    except ValueError as error:
        raise DataError(f"{path} is not written, for it {error}; rename the file") from error
    _validate(path, manifest, records)


def load(root: str | Path, patience: Patience = PATIENCE) -> ShardSet:
    """The shard set in a folder, or below a URL.

    Raises:
        DataError: if there is none, its format is another one, manifest and index do not fit together, or a server
            outlasts ``patience``.
    """
    manifest = _read_manifest(str(root), patience)
    if manifest is None:
        raise DataError(
            f"{root} is no shard set, for it has no {MANIFEST}; make one with: dmjd shards build SRC {root}"
        )
    return _with_records(str(root), manifest, patience)


def load_splits(root: str | Path, patience: Patience = PATIENCE) -> dict[str, ShardSet]:
    """The shard sets below ``root`` by split: those in ``train`` and ``val``, or the one of ``root`` as "train".

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
    """None where there is none, which is not to be confused with a server that does not answer."""
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
    """The manifest in ``folder``. Raises ValueError with the rest of a message that begins with its path."""
    try:
        entries = parse_json(content)
    except ValueError as error:
        raise ValueError(f"is damaged, or is no manifest of shards ({error})") from error
    if not isinstance(entries, dict) or "format" not in entries:
        raise ValueError("is damaged, or is no manifest of shards")
    if entries["format"] != FORMAT or type(entries["format"]) is not int:
        raise ValueError(f"has format {reprlib.repr(entries['format'])}, and this dmjd reads format {FORMAT}")
    values = _fields(Manifest, {key: value for key, value in entries.items() if key != "format"})
    shards, classes = values["shards"], values["classes"]
    if not isinstance(shards, list) or not isinstance(classes, list):
        raise ValueError("has shards or classes that are no lists")
    if len(classes) > MOST_CLASSES or not all(type(name) is str for name in classes):
        raise ValueError(f"has class names that are no text, or more than {MOST_CLASSES}")
    values["shards"], values["classes"] = tuple(parse_shard(entry, folder) for entry in shards), tuple(classes)
    manifest = Manifest(**values)
    _check(manifest)
    return manifest


def parse_shard(entry: object, folder: str) -> Shard:
    """A shard of the manifest in ``folder``; raises ValueError with the rest of a message."""
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
    """Require what a manifest says of itself to agree."""
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
        raise ValueError(f"counts {manifest.samples} samples, and its shards {total}")


def _require_digest(name: str, value: str) -> None:
    """Digests name files of the cache."""
    if not _SHA256.fullmatch(value):
        raise ValueError(f"has {name}={reprlib.repr(value)}, which must be 64 hexadecimal digits in lower case")


def _fields(record: type[Manifest | Shard], entry: object) -> dict[str, Any]:
    """``entry`` if it has exactly the fields of ``record``, of their types and within their limits."""
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
    """The index, once it is the one that the manifest was written with; mapped where it lies on a disk."""
    remote = is_remote(location)
    limit = _HEADER_BYTES + manifest.samples * INDEX.itemsize
    if remote and limit > _MOST_IN_MEMORY:
        raise DataError(f"{location} is of {manifest.samples} samples, too many to hold in memory; copy the set here")
    try:
        with io.BytesIO(read(location, patience, limit)) if remote else open_regular(location) as file:
            if sha256(file, limit) != manifest.index_sha256:
                raise DataError(f"{location} is not the index that {manifest_path} was written with; restore both")
            file.seek(0)
            return read_npy(file, INDEX, mapped=not remote)
    except FileNotFoundError as error:
        raise DataError(f"{location} is missing, though {manifest_path} is there; restore it") from error
    except OSError as error:
        raise DataError(f"{location} cannot be read ({error.strerror or error})") from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{location} is no index that this dmjd reads: {error}; build the set again") from error


def _validate(path: str, manifest: Manifest, records: Records) -> None:
    """Require that manifest and index agree, so that no reader has to doubt an offset."""
    fault = _disagreement(manifest, records)
    if fault is not None:
        raise DataError(f"{path} {fault}; restore both files or build the set again")


def _disagreement(manifest: Manifest, records: Records) -> str | None:
    shards, numbers = manifest.shards, records["shard"]
    if len(records) != manifest.samples:
        return f"counts {manifest.samples} samples, and its index {len(records)}"
    if not len(records):
        return None
    if int(numbers.max()) >= len(shards):
        return f"lists {len(shards)} shards, and its index has one of number {numbers.max()}"
    if np.any(numbers[1:] < numbers[:-1]):
        return "has an index that is not in the order of the shards"
    for shard, count in zip(shards, np.bincount(numbers, minlength=len(shards)).tolist(), strict=True):
        if shard.samples != count:
            return f"counts {shard.samples} samples in {shard.url}, and its index {count}"
    # Where the last byte may begin; an end could be beyond 2**63.
    last = np.array([shard.bytes for shard in shards], dtype=np.int64)[numbers] - records["size"]
    outside = np.flatnonzero((records["offset"] < 0) | (records["offset"] > last))
    if len(outside):
        shard = shards[int(numbers[outside[0]])]
        return f"has sample {outside[0]} end beyond the {shard.bytes} bytes of {shard.url}"
    if int(records["size"].max()) > MOST_IMAGE_BYTES:
        return f"has an image of {records['size'].max()} bytes in its index, more than {MOST_IMAGE_BYTES}"
    if not (records["height"].all() and records["width"].all()):
        return "has an image without pixels in its index"
    low, high = int(records["label"].min()), int(records["label"].max())
    if low < -1 or high >= len(manifest.classes):
        return f"names {len(manifest.classes)} classes, and its index has labels {low} to {high}"
    return None
