"""``dmjd shards index``: make a shard set of existing webdataset tars, in place."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dmjd.data.regular import only_files
from dmjd.data.shards.encode import measure
from dmjd.data.shards.index import MANIFEST, Shard
from dmjd.data.shards.location import is_remote, local_copy, sha256
from dmjd.data.shards.part import Part, Saved, as_records, record, reject, save_parts
from dmjd.data.shards.pool import available_workers, each
from dmjd.data.shards.sources import number_classes, tar_items
from dmjd.data.shards.tar import tar_samples
from dmjd.errors import BadImage, DataError, StorageError
from dmjd.files import open_regular
from dmjd.redact import redact


def index_tars(tars: Sequence[str], dst: str, workers: int | None = None, channels: int = 3) -> list[Saved]:
    """Write a manifest and an index of webdataset tars, which stay unchanged where they are.

    Images that cannot be used are left out of the index and listed in ``rejects.jsonl``. Exif blocks stay, so
    decoders that apply the orientation tag rotate such images.

    Args:
        tars: paths, patterns of paths, or URLs, which are downloaded temporarily.
        dst: a folder without a manifest; tars inside it are named relative to it.
        workers: number of processes; by default one per processor.
        channels: 1 or 3, for readers.

    Raises:
        DataError: if a tar is missing, compressed or truncated, no tar has a usable image, or ``dst`` has a manifest.
        StorageError: if ``dst`` cannot be written.
    """
    folder = Path(dst)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; give a folder for the index")
    if (folder / MANIFEST).exists():
        raise DataError(f"{folder} has a {MANIFEST} already; give another folder, or remove it first")
    locations = _expand(tars)
    parts = dict(each(index_tar, locations, workers or available_workers(), "tars"))
    ordered = [_relative(parts[number], folder) for number in range(len(locations))]
    if not any(part.shard.samples for part in ordered):
        raise DataError(f"{', '.join(tars)} have no usable image; give webdataset tars of images")
    classes = number_classes(int(part.records["label"].max()) for part in ordered if part.shard.samples)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [save_parts(folder, ordered, channels, classes, f"tars in place {' '.join(map(redact, tars))}")]
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {error.strerror}; the tars are unchanged") from error


def index_tar(location: str) -> Part:
    """Read a tar and decode each of its images once.

    Raises:
        DataError: if the tar is missing, compressed or truncated.
    """
    rows, rejects = [], []
    try:
        with local_copy(location) as path:
            for sample in tar_samples(str(path)):
                for item in tar_items(str(path), sample):
                    item = item._replace(name=item.name.replace(str(path), redact(location), 1))
                    try:
                        data = item.read()
                        rows.append(record(item.offset, data, item.label, *measure(item.name, data)))
                    except BadImage as bad:
                        rejects.append(reject(bad))
            with open_regular(path) as file:
                shard = Shard(location, len(rows), path.stat().st_size, sha256(file))
    except FileNotFoundError as error:
        raise DataError(f"{location} does not exist") from error
    return Part(shard, as_records(rows), rejects)


def _expand(tars: Sequence[str]) -> list[str]:
    locations: list[str] = []
    for tar in tars:
        matches = [] if is_remote(tar) else sorted(glob.glob(tar))
        paths = [tar] if not matches or matches == [tar] else only_files(matches, tar)
        locations += paths
    missing = next((path for path in locations if not is_remote(path) and not Path(path).is_file()), None)
    if missing:
        raise DataError(f"{missing} is not a tar; give paths, patterns or URLs of webdataset tars")
    if not locations:
        raise DataError(f"{', '.join(tars)} match no tar; give paths, patterns or URLs of webdataset tars")
    names = (path if is_remote(path) else str(Path(path).resolve()) for path in locations)
    (most, times), *_ = Counter(names).most_common(1)
    if times > 1:
        raise DataError(f"{most} is given {times} times; give every tar once")
    return locations


def _relative(part: Part, folder: Path) -> Part:
    if is_remote(part.shard.url):
        return part
    path, home = Path(part.shard.url).resolve(), folder.resolve()
    url = str(path.relative_to(home)) if path.is_relative_to(home) else str(path)
    shard = Shard(url, part.shard.samples, part.shard.bytes, part.shard.sha256)
    return part._replace(shard=shard)
