"""``dmjd shards verify``: whether every byte of a set is the one that was written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dmjd.data.shards.checksum import crc32
from dmjd.data.shards.encode import measure
from dmjd.data.shards.index import Records, Shard, ShardSet
from dmjd.data.shards.location import local_copy, sha256
from dmjd.data.shards.pool import available_workers, each
from dmjd.errors import BadImage
from dmjd.files import open_regular


class TarCheck(NamedTuple):
    """What to check of one tar: ``records`` are those of its samples."""

    location: str
    shard: Shard
    records: Records
    decode: bool


def verify(shards: ShardSet, workers: int | None = None, decode: bool = False) -> list[str]:
    """A sentence for every fault: size and sha256 of each tar, crc32 of each sample, and whether it decodes if asked.

    Manifest and index were checked when the set was loaded.
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
                faults.append(f"{check.location} has {size} bytes, and the manifest says {check.shard.bytes}")
            elif sha256(file) != check.shard.sha256:
                faults.append(f"{check.location} has another sha256 than the manifest says")
            for record in check.records:
                file.seek(int(record["offset"]))
                faults += _faults_of(check, record, file.read(int(record["size"])))
            return faults
    except FileNotFoundError:
        return [f"{check.location} is not there"]
    except OSError as error:
        return [f"{check.location} cannot be read ({error.strerror or error})"]


def _faults_of(check: TarCheck, record: np.void, data: bytes) -> Iterator[str]:
    name = f"{check.location}@{int(record['offset'])}"
    if crc32(data) != record["crc32"]:
        yield f"{name} has another crc32 than the index says"
    elif check.decode:
        try:
            size = measure(name, data)
        except BadImage as bad:
            yield str(bad)
            return
        if size != (record["height"], record["width"]):
            yield f"{name} is {size[0]}x{size[1]}, and the index says {record['height']}x{record['width']}"
