"""What a shard set is: ``manifest.json``, which says what there is, and ``index.npy``, which says where each sample is.

The manifest is written last, so a folder without one holds no shard set. Readers take the image bytes of a sample at an
offset of its tar and never parse a tar, so a truncated one cannot silently shorten an epoch.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dmjd import __version__
from dmjd.data.regular import open_regular
from dmjd.data.shards.location import is_remote, join, sha256
from dmjd.data.shards.network import PATIENCE, Patience, read
from dmjd.errors import DataError
from dmjd.files import replace_file
from dmjd.redact import redact

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
    _validate(str(folder / MANIFEST), manifest, records)
    replace_file(folder / RECORDS, content)
    replace_file(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1) + "\n")
    return manifest


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
        if is_remote(path):
            return _parse(path, read(path, patience))
        with open_regular(path) as file:
            return _parse(path, file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from error


def _with_records(folder: str, manifest: Manifest, patience: Patience) -> ShardSet:
    path = join(folder, MANIFEST)
    records = _load_records(join(folder, RECORDS), path, manifest, patience)
    _validate(path, manifest, records)
    return ShardSet(folder, manifest, records)


def _parse(path: str, content: bytes) -> Manifest:
    try:
        entries: dict[str, Any] = json.loads(content)
        number = entries.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{path} is damaged, or is no manifest of shards; restore it or build the set again") from error
    if number != FORMAT:
        raise DataError(f"{path} has format {number}, and this dmjd reads format {FORMAT}; build the set again")
    try:
        shards = tuple(Shard(**shard) for shard in entries.pop("shards"))
        manifest = Manifest(shards=shards, classes=tuple(entries.pop("classes")), **entries)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} lacks or has too many fields ({error}); restore it or build the set again") from error
    _require_types(path, manifest)
    for shard in shards:
        _require_types(path, shard)
    if not all(isinstance(name, str) for name in manifest.classes):
        raise DataError(f"{path} has class names that are no text; restore it or build the set again")
    return manifest


def _require_types(path: str, item: Manifest | Shard) -> None:
    """Refuse what somebody's editor or script has left of a number or a text."""
    for entry in fields(item):
        value = getattr(item, entry.name)
        if entry.type == "int" and not (type(value) is int and 0 <= value < 1 << 63):
            raise DataError(f"{path} has {entry.name}={value!r}, which must be an integer of at least 0; restore it")
        if entry.type == "str" and type(value) is not str:
            raise DataError(f"{path} has {entry.name}={value!r}, which must be text; restore it")


def _load_records(location: str, manifest_path: str, manifest: Manifest, patience: Patience) -> Records:
    """The index, once it is the one that the manifest was written with."""
    remote = is_remote(location)
    try:
        with io.BytesIO(read(location, patience)) if remote else open_regular(location) as file:
            if sha256(file) != manifest.index_sha256:
                raise DataError(f"{location} is not the index that {manifest_path} was written with; restore both")
            file.seek(0)
            return np.load(file if remote else location, mmap_mode=None if remote else "r", allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"{location} is missing, though {manifest_path} is there; restore it") from error
    except OSError as error:
        raise DataError(f"{location} cannot be read ({error.strerror or error})") from error


def _validate(path: str, manifest: Manifest, records: Records) -> None:
    """Refuse what does not fit together, so that no reader has to doubt an offset."""
    if records.dtype != INDEX or records.ndim != 1:
        raise DataError(f"{path} has an index of other columns than this dmjd reads; build the set again")
    if len(records) != manifest.samples:
        raise DataError(f"{path} counts {manifest.samples} samples, and its index {len(records)}; build the set again")
    counts = np.bincount(records["shard"], minlength=len(manifest.shards))
    if len(counts) > len(manifest.shards):
        raise DataError(f"{path} lists {len(manifest.shards)} shards, and its index knows more; build the set again")
    if np.any(np.diff(records["shard"].astype(np.int64)) < 0):
        raise DataError(f"{path} has an index that is not in the order of the shards; build the set again")
    for shard, count in zip(manifest.shards, counts.tolist(), strict=True):
        if shard.samples != count:
            raise DataError(
                f"{path} counts {shard.samples} samples in {shard.url}, and its index {count}; build the set again"
            )
    ends = records["offset"] + records["size"].astype(np.int64)
    sizes = np.array([shard.bytes for shard in manifest.shards], dtype=np.int64)
    outside = np.flatnonzero((records["offset"] < 0) | (ends > sizes[records["shard"]]))
    if len(outside):
        shard = manifest.shards[int(records["shard"][outside[0]])]
        raise DataError(f"{path} has sample {outside[0]} end beyond the {shard.bytes} bytes of {shard.url}")
    labels = records["label"]
    if len(labels) and (labels.min() < -1 or labels.max() >= len(manifest.classes)):
        raise DataError(
            f"{path} names {len(manifest.classes)} classes, and its index has labels {labels.min()} to {labels.max()}"
        )
    if manifest.channels not in (1, 3):
        raise DataError(f"{path} has channels={manifest.channels}, which must be 1 or 3")
