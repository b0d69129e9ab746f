"""What the engines' benchmark makes of measured rows, by numbers worked out by hand."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # where its files import each other
    return importlib.import_module("scaling")


def row(engine: str, gpus: int, rate: float, **more: Any) -> dict[str, Any]:
    measured = {"images_per_second_per_gpu": rate, "step_ms": 1000 * 192 / rate, "peak_gib": [7.0] * gpus}
    named = {"model": "convvit_large", "engine": engine, "gpus": gpus, "micro_batch": 192, "input": "device"}
    where = {"card": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-28"}
    return named | measured | where | {"words": ["engine.compile=block", f"engine={engine}"]} | more


def cells(table: str, *columns: str) -> list[tuple[str, ...]]:
    """``columns`` of every line of the Markdown table in which the first of them stands."""
    tables = (part.splitlines() for part in table.split("\n\n"))
    lines = next(lines for lines in tables if f"| {columns[0]} " in lines[0])
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [tuple(line[head.index(column)] for column in columns) for line in body]


def test_efficiency_is_the_rate_of_a_gpu_beside_that_of_one_gpu_alone(scaling: ModuleType) -> None:
    alone, ddp = row("single", 1, 800), row("ddp", 8, 744)
    assert scaling.efficiency(ddp, [alone, ddp]) == pytest.approx(0.93)
    assert scaling.efficiency(alone, [alone, ddp]) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"model": "vit_large"},
        {"micro_batch": 64},
        {"input": "shards"},
        {"card": "NVIDIA H100"},
        {"engine": "ddp"},
        {"words": ["engine.compile=block", "engine.cuda_graphs=true", "engine=single"]},
        {"out_of_memory": "CUDA out of memory"},
    ],
)
def test_a_row_is_compared_with_nothing_but_its_like(scaling: ModuleType, other: dict[str, Any]) -> None:
    ddp = row("ddp", 8, 744)
    assert scaling.efficiency(ddp, [row("single", 1, 800) | other, ddp]) is None


def test_batches_were_on_the_device_before_rows_said_so(scaling: ModuleType) -> None:
    old = row("single", 1, 800)
    del old["input"]
    assert scaling.efficiency(row("ddp", 8, 400), [old]) == 0.5
    assert scaling.efficiency(row("ddp", 8, 400, input="pinned"), [old]) is None


def test_gpu_hours_are_images_by_rate(scaling: ModuleType) -> None:
    # 400 x 1,281,167 = 512,466,800 images; at 1000 a second 512,466.8 s, of which an hour has 3600.
    assert scaling.gpu_hours(1000) == pytest.approx(142.35189, abs=1e-5)


def test_the_summary_of_a_file(scaling: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"base:128": 500, "large:64": 250}
    measured = [{"way": "official", "case": case, "images_per_second": rate} for case, rate in rates.items()]
    official: dict[str, Any] = {"device": "NVIDIA H200", "rows": measured}
    (tmp_path / "convvit_step_h200.json").write_text(json.dumps(official))
    (tmp_path / "convvit_step_h100.json").write_text(json.dumps(official | {"device": "NVIDIA H100"}))
    monkeypatch.setattr(scaling, "RESULTS", tmp_path)
    file = tmp_path / "engines.jsonl"
    rows = [
        row("fsdp", 8, 640),
        row("single", 1, 800),
        row("hsdp", 8, 744, words=["engine.compile=block", "engine=hsdp", "engine.replicas=2"]),
        row("zero3", 8, 400, words=["engine.compile=block", "engine=zero3", "engine.compile=none"]),
        row("ddp", 8, 1) | {"out_of_memory": "CUDA out of memory"},
        row("ddp", 1, 9999, simulated=8),
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    text = scaling.summary([file])
    assert cells(text, "model", "engine", "GPUs", "images/s a GPU", "efficiency") == [
        ("convvit_large", "single", "1", "800", "100.0 %"),
        ("convvit_large", "fsdp", "8", "640", "80.0 %"),
        ("convvit_large", "hsdp 2 x 4", "8", "744", "93.0 %"),
        ("convvit_large", "zero3, compile=none", "8", "400", "50.0 %"),
        ("convvit_large", "ddp", "8", "out of memory", "-"),
    ]
    # 512,466,800 images at 800, 744 and 250 a second; the paper's 267 hours are of 8 GPUs.
    assert cells(text, "DMJD ConvViT-L, 400 x 1281167 images", "on", "GPU hours", "wall hours") == [
        ("ours, single, 192 images a GPU, input: device", "1 NVIDIA H200", "178", "178"),
        ("ours, hsdp 2 x 4, 192 images a GPU, input: device", "8 NVIDIA H200", "191", "23.9"),
        ("official code", "1 NVIDIA H200", "569", "569"),
        ("the paper's table", "8 A100 of 40 GB", "2136", "267"),
    ]


def test_a_step_is_as_slow_as_its_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    step_times = importlib.import_module("step_times")

    class Times:
        def milliseconds(self) -> list[float]:
            return [10, 20, 30]

        def own_milliseconds(self) -> list[float]:
            return [4, 5, 9]

    class TwoRanks:
        def gather(self, item: Any) -> list[Any]:
            return [item, [12, 15, 50] if isinstance(item, list) else item | {"data_wait_percent": 7.0}]

    spread = step_times.spread(Times(), 1.0, False, TwoRanks())
    assert (spread["fastest_ms"], spread["median_ms"], spread["slowest_ms"]) == (12, 20, 50)
    assert spread["data_wait_percent"] == 7
    assert spread["ranks"][0] == {"median_ms": 20, "slowest_ms": 30, "own_ms": 5, "data_wait_percent": 1}
    assert step_times.spread(Times(), 1.0, True, TwoRanks())["ranks"][0]["own_ms"] is None
