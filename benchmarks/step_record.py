"""Rows of measured training steps in a JSON file, which a later call goes on with; the search for the best batch."""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import timing
import torch

Measure = Callable[[int], dict[str, Any]]
"""Images -> a row with ``images_per_second`` and ``peak_gib``."""

GAIN = 1.02
"""A batch of twice the images must be this much faster, or the search ends."""


class Record:
    """Rows of one card and torch; written after each row. Rows of another card or torch are replaced."""

    def __init__(self, path: Path, benchmark: str, device: str, again: bool = False) -> None:
        self.path, self.again = path, again
        self.head = {
            "benchmark": benchmark,
            "device": timing.device_name(device),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        }
        self.rows: list[dict[str, Any]] = []
        if path.is_file():
            stored = json.loads(path.read_text())
            if all(stored.get(key, value) == value for key, value in self.head.items()):
                self.rows = stored["rows"]

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record of any card."""
        stored = json.loads(path.read_text())
        record = cls(path, stored["benchmark"], "cpu")
        record.rows = stored.pop("rows")
        record.head = stored
        return record

    def has(self, **key: Any) -> bool:
        return not self.again and self.row(**key) is not None

    def row(self, **key: Any) -> dict[str, Any] | None:
        """The first row with these values."""
        return next((row for row in self.rows if all(row.get(name) == value for name, value in key.items())), None)

    def add(self, row: dict[str, Any], *key: str) -> None:
        """Add ``row`` in place of the one with the same values of ``key``."""
        self.rows = [each for each in self.rows if any(each.get(name) != row.get(name) for name in key)]
        self.rows.append(row | {"date": date.today().isoformat()})
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n")


@dataclass
class Deadline:
    """Seconds after which no other row is begun."""

    seconds: float
    began: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return time.monotonic() - self.began > self.seconds


def parse(parser: argparse.ArgumentParser, benchmark: str) -> tuple[argparse.Namespace, str, Path]:
    """The arguments, with those of every table of rows added; the device; and the file of rows."""
    name = f"benchmarks/results/{benchmark}"
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="begin no other row after")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"rows; default: {name}_CARD.json")
    parser.add_argument("--again", action="store_true", help="measure rows that FILE holds")
    parser.add_argument("--plan", action="store_true", help="add the estimates of `dmjd plan` to FILE")
    parser.add_argument("--table", action="store_true", help="print FILE as a table")
    parser.add_argument("--tiny", action="store_true", help="try all rows with small models, without a GPU too")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not (options.tiny or options.plan or options.table):
        parser.error("there is no GPU; --tiny tries all rows on a CPU")
    card = timing.device_name(device).lower().replace("nvidia ", "").split()[0] if device == "cuda" else "h200"
    return options, device, options.json or Path(f"{name}_{card}.json")


def next_images(rows: list[dict[str, Any]], first: int, memory_gib: float = math.inf) -> int | None:
    """Images of the next batch to measure, given the rows of one case with ``images``; None if the search has ended.

    It doubles ``first`` until the rate grows by less than 2 %, a row has ``out_of_memory``, or the next peak, on the
    line of the last two, exceeds ``memory_gib``.
    """
    known = {row["images"]: row for row in rows}
    images = first
    while images in known:
        row, half = known[images], known.get(images // 2)
        if row.get("out_of_memory"):
            return None
        if half is not None:
            if row["images_per_second"] < GAIN * half["images_per_second"]:
                return None
            if row["peak_gib"] and 3 * row["peak_gib"] - 2 * half["peak_gib"] > memory_gib:
                return None
        images *= 2
    return images


def card_gib() -> float:
    """Memory of the GPU; of a computer without one infinite."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else math.inf


def best(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of the highest rate; None where none fits."""
    fitting = [row for row in rows if not row.get("out_of_memory")]
    return max(fitting, key=lambda row: row["images_per_second"], default=None)


def measured(measure: Measure, images: int) -> dict[str, Any]:
    """The row of ``images``, without what the step before compiled and allocated."""
    clean()
    try:
        return {"images": images, **measure(images)}
    except torch.OutOfMemoryError:
        return {"images": images, "out_of_memory": True}


def clean() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
