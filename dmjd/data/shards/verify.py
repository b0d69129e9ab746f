"""``dmjd shards verify``: compare the bytes of a shard set with its manifest and index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dmjd.data.shards.encode import measure
from dmjd.data.shards.index import Records, Shard, ShardSet
from dmjd.data.shards.location import local_copy, sha256
from dmjd.data.shards.pool import available_workers, each
from dmjd.data.shards.sample import crc32
from dmjd.errors import BadImage
from dmjd.files import open_regular


class TarCheck(NamedTuple):
    """The check of one tar. ``records``: index rows of its samples."""

    location: str
    shard: Shard
    records: Records
    decode: bool


def verify(shards: ShardSet, workers: int | None = None, decode: bool = False) -> list[str]:
    """Check size and sha256 of each tar, crc32 of each sample, and with ``decode`` its pixels; one line per fault.

    Manifest and index were checked by :func:`dmjd.data.shards.index.load`.
    """
    ends = np.searchsorted(shards.records["shard"], np.arange(len(shards.manifest.shards)), side="right").tolist()
    jobs = [
        TarCheck(shards.location(number), shard, np.array(shards.records[end - shard.samples : end]), decode)
        for number, (shard, end) in enumerate(zip(shards.manifest.shards, ends, strict=True))
    ]
    faults = dict(each(verify_tar, jobs, workers or available_workers(), "tars checked"))
    return [fault for number in range(len(jobs)) for fault in faults[number]]


def verify_tar(check: TarCheck) -> list[str]:
    """The faults of one tar."""
    try:
        with local_copy(check.location) as path, open_regular(path) as file:
            size = path.stat().st_size
            faults = []
            if size != check.shard.bytes:
                faults.append(f"{check.location} has {size} bytes, not the {check.shard.bytes} of the manifest")
            elif sha256(file) != check.shard.sha256:
                faults.append(f"{check.location} has another sha256 than in the manifest")
            for record in check.records:
                file.seek(int(record["offset"]))
                faults += _faults_of(check, record, file.read(int(record["size"])))
            return faults
    except FileNotFoundError:
        return [f"{check.location} is missing"]
    except OSError as error:
        return [f"{check.location} cannot be read ({error.strerror or error})"]


def _faults_of(check: TarCheck, record: np.void, data: bytes) -> Iterator[str]:
    name = f"{check.location}@{int(record['offset'])}"
    if crc32(data) != record["crc32"]:
        yield f"{name} has another crc32 than in the index"
    elif check.decode:
        try:
            size = measure(name, data)
        except BadImage as bad:
            yield str(bad)
            return
        if size != (record["height"], record["width"]):
            yield f"{name} has {size[0]}x{size[1]} pixels, not the {record['height']}x{record['width']} of the index"
