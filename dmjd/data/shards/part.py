"""A part of a shard set: one tar, the index records of its samples, and the images rejected from it."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dmjd.data.shards.index import INDEX, Records, Shard, parse_shard, save
from dmjd.data.shards.sample import crc32
from dmjd.errors import BadImage, DataError
from dmjd.files import open_regular, read_at_most, replace_file
from dmjd.safe_load import JSON_BYTES, parse_json, read_npy

REJECTS = "rejects.jsonl"

_MOST_REPORT_BYTES = 1 << 30


class Part(NamedTuple):
    """One tar. ``records``: index rows with shard number 0; ``rejects``: dicts of name, kind and reason."""

    shard: Shard
    records: Records
    rejects: list[dict[str, str]]

    def write(self, path: Path) -> None:
        """Store the part, so that a restarted build does not repeat it."""
        buffer = io.BytesIO()
        buffer.write(json.dumps({"shard": asdict(self.shard), "rejects": self.rejects}).encode() + b"\n")
        np.save(buffer, self.records, allow_pickle=False)
        replace_file(path, buffer.getvalue())

    @classmethod
    def read(cls, path: Path, tar: str) -> Part | None:
        """The part of the tar named ``tar`` as :meth:`write` stored it; None if absent or damaged."""
        try:
            with open_regular(path) as file:
                head = parse_json(file.readline(JSON_BYTES + 1))
                shard, rejects = parse_shard(head["shard"], str(path.parent)), [_reject(row) for row in head["rejects"]]
                records = read_npy(file, INDEX, mapped=False)
        except (OSError, ValueError, KeyError, TypeError):  # absent, or damaged by a power failure
            return None
        return cls(shard, records, rejects) if shard.url == tar and not records["shard"].any() else None


class Saved(NamedTuple):
    """A shard set that was written; ``rejects``: number of rejected images by kind."""

    folder: Path
    samples: int
    shards: int
    rejects: Counter[str]

    @property
    def summary(self) -> str:
        """One line: folder, samples, shards and rejects."""
        made = f"{self.folder}: {self.samples} samples in {self.shards} shard(s)"
        if not self.rejects:
            return f"{made}, no image rejected"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.rejects.most_common())
        return f"{made}; rejected {sum(self.rejects.values())} image(s) ({kinds}), listed in {self.folder / REJECTS}"


def reject(bad: BadImage) -> dict[str, str]:
    """A line of ``rejects.jsonl``."""
    return {"name": bad.name, "kind": bad.kind, "reason": bad.fault}


def record(offset: int, image: bytes, label: int, height: int, width: int) -> tuple[int, ...]:
    """A row of :data:`dmjd.data.shards.index.INDEX` with shard number 0."""
    return 0, offset, len(image), label, crc32(image), height, width


def save_parts(folder: Path, parts: Sequence[Part], channels: int, classes: Sequence[str], source: str) -> Saved:
    """Write the index and manifest of ``parts`` in order, without empty parts, and the list of rejects."""
    rejects = [line for part in parts for line in part.rejects]
    full = [part for part in parts if part.shard.samples]
    records = np.concatenate([part.records for part in full])
    records["shard"] = np.repeat(np.arange(len(full)), [len(part.records) for part in full])
    if rejects:
        replace_file(folder / REJECTS, "".join(json.dumps(line) + "\n" for line in rejects))
    save(folder, [part.shard for part in full], records, channels, classes, source)
    return Saved(folder, len(records), len(full), Counter(line["kind"] for line in rejects))


def count_rejects(folder: Path) -> Counter[str]:
    """Number of rejected images by kind, from the ``rejects.jsonl`` of a set.

    Raises:
        DataError: if it is damaged.
    """
    path = folder / REJECTS
    try:
        lines = read_at_most(path, _MOST_REPORT_BYTES).splitlines()
        return Counter(_reject(parse_json(line))["kind"] for line in lines)
    except FileNotFoundError:
        return Counter()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged or not a list of rejected images ({error}); delete it") from error


def _reject(row: object) -> dict[str, str]:
    """``row``, checked to be as :func:`reject` makes it. Raises ValueError."""
    if not isinstance(row, dict) or row.keys() != {"name", "kind", "reason"}:
        raise ValueError("a line must have name, kind and reason and nothing else")
    if not all(isinstance(value, str) for value in row.values()) or not row["kind"].isprintable():
        raise ValueError("a line has a value that is not text of one line")
    return row


def as_records(rows: Sequence[tuple[int, ...]]) -> Records:
    """Rows of :func:`record` as an array."""
    return np.array(rows, dtype=INDEX)
