"""The search for the best batch, and rows that a later call goes on with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def step_record(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("step_record")


def search(
    step_record: ModuleType, first: int, rate: Callable[[int], float], memory_gib: float = 1e9
) -> list[dict[str, Any]]:
    def measure(images: int) -> dict[str, Any]:
        return {"images_per_second": rate(images), "peak_gib": 2 + images / 8}

    rows: list[dict[str, Any]] = []
    while (images := step_record.next_images(rows, first, memory_gib)) is not None:
        rows.append(step_record.measured(measure, images))
    return rows


def test_batches_double_until_the_rate_grows_by_less_than_two_percent(step_record: ModuleType) -> None:
    rates = {64: 1000.0, 128: 1100.0, 256: 1121.0}
    rows = search(step_record, 64, rates.__getitem__)
    assert [row["images"] for row in rows] == [64, 128, 256]
    assert step_record.best(rows)["images"] == 256
    rates = {64: 1000.0, 128: 1021.0, 256: 900.0}
    assert step_record.best(search(step_record, 64, rates.__getitem__))["images"] == 128


def test_batches_double_until_memory_ends(step_record: ModuleType) -> None:
    def rate(images: int) -> float:
        if images > 128:
            raise torch.OutOfMemoryError
        return float(images)

    rows = search(step_record, 64, rate)
    assert rows[-1] == {"images": 256, "out_of_memory": True}
    assert step_record.best(rows)["images"] == 128
    assert step_record.best(search(step_record, 512, rate)) is None


def test_a_batch_that_cannot_fit_is_not_tried(step_record: ModuleType) -> None:
    """The peaks are 10, 18, 34 and 66 GiB."""
    assert [row["images"] for row in search(step_record, 64, float, 65)] == [64, 128, 256]
    assert [row["images"] for row in search(step_record, 64, float, 67)] == [64, 128, 256, 512]
    assert [row["images"] for row in search(step_record, 64, float, 20)] == [64, 128]
    rows = [{"images": images, "images_per_second": float(images), "peak_gib": None} for images in (64, 128)]
    assert step_record.next_images(rows, 64, 1.0) == 256, "a CPU has no peak"


def test_stored_rows_of_the_same_card_are_kept_and_replaced_by_their_key(
    step_record: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "steps.json"
    record = step_record.Record(file, "steps", "cpu")
    for images, rate in ((64, 1.0), (128, 2.0), (64, 3.0)):
        record.add({"case": "a", "images": images, "rate": rate}, "case", "images")
    again = step_record.Record(file, "steps", "cpu")
    assert [(row["images"], row["rate"]) for row in again.rows] == [(128, 2.0), (64, 3.0)]
    assert again.has(case="a", images=64)
    assert not again.has(case="b", images=64)
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert step_record.Record(file, "steps", "cpu").rows == []
