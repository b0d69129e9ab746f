"""A part of a set: one tar with the records of its samples and the images that were left out of it."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dmjd.data.shards.checksum import crc32
from dmjd.data.shards.index import INDEX, Records, Shard, save
from dmjd.errors import BadImage
from dmjd.files import replace_file

REJECTS = "rejects.jsonl"


class Part(NamedTuple):
    """``records`` are of the part alone, so their shard is 0; a reject has a name, a kind and a reason."""

    shard: Shard
    records: Records
    rejects: list[dict[str, str]]

    def write(self, path: Path) -> None:
        """Keep it, so that a build that is begun again need not make it again."""
        buffer = io.BytesIO()
        buffer.write(json.dumps({"shard": asdict(self.shard), "rejects": self.rejects}).encode() + b"\n")
        np.save(buffer, self.records)
        replace_file(path, buffer.getvalue())

    @classmethod
    def read(cls, path: Path) -> Part | None:
        """What :meth:`write` kept, or None where it did not come to that."""
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file:
                head = json.loads(file.readline())
                return cls(Shard(**head["shard"]), np.load(file, allow_pickle=False), head["rejects"])
        except (ValueError, EOFError):  # what a computer without power leaves of a file
            return None


class Saved(NamedTuple):
    """What has become of a split; ``rejects`` counts by kind."""

    folder: Path
    samples: int
    shards: int
    rejects: Counter[str]

    @property
    def sentence(self) -> str:
        """What to tell of it."""
        made = f"{self.folder}: {self.samples} samples in {self.shards} shard(s)"
        if not self.rejects:
            return f"{made}, no image rejected"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.rejects.most_common())
        return f"{made}; rejected {sum(self.rejects.values())} image(s) ({kinds}), listed in {self.folder / REJECTS}"


def reject(bad: BadImage) -> dict[str, str]:
    """A line of the report."""
    return {"name": bad.name, "kind": bad.kind, "reason": bad.fault}


def record(offset: int, image: bytes, label: int, height: int, width: int) -> tuple[int, ...]:
    """A row of :data:`dmjd.data.shards.index.INDEX`, of shard 0."""
    return 0, offset, len(image), label, crc32(image), height, width


def save_parts(folder: Path, parts: Sequence[Part], channels: int, classes: Sequence[str], source: str) -> Saved:
    """Make one set of them, in order, without those that have no sample, and list the rejects beside it."""
    rejects = [line for part in parts for line in part.rejects]
    full = [part for part in parts if part.shard.samples]
    records = np.concatenate([part.records for part in full])
    records["shard"] = np.repeat(np.arange(len(full)), [len(part.records) for part in full])
    if rejects:
        replace_file(folder / REJECTS, "".join(json.dumps(line) + "\n" for line in rejects))
    save(folder, [part.shard for part in full], records, channels, classes, source)
    return Saved(folder, len(records), len(full), Counter(line["kind"] for line in rejects))


def count_rejects(folder: Path) -> Counter[str]:
    """By kind, what the report beside a set lists."""
    path = folder / REJECTS
    return Counter(json.loads(line)["kind"] for line in path.read_text().splitlines()) if path.is_file() else Counter()


def as_records(rows: Sequence[tuple[int, ...]]) -> Records:
    """Rows of :func:`record` as an array."""
    return np.array(rows, dtype=INDEX)
