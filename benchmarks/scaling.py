"""Scaling tables from rows of ``engines.py``: efficiency relative to one GPU, checkpoint stall, GPU hours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dmjd.config.pretrain import IMAGENET
from dmjd.report.cost import PAPER_GPUS
from dmjd.report.format import ABSENT, hours
from dmjd.report.table import Column, Table

Row = dict[str, Any]

RESULTS = Path(__file__).with_name("results")
DMJD_LARGE, EPOCHS, IMAGES = "convvit_large", 400, IMAGENET
PAPER_WALL_HOURS = 267
"""Of DMJD ConvViT-L with HOG, 800 effective epochs, that is 400 of two views, on 8 A100 of 40 GB: "Gh." of the paper's
comparison with the state of the art."""


def summary(paths: Sequence[Path]) -> str:
    """Markdown tables of the rows in ``paths``, those of simulated worlds left out."""
    rows = [row for path in paths for row in read(path) if "simulated" not in row]
    cells = list(dict.fromkeys((row["model"], row["micro_batch"]) for row in rows))
    rows.sort(key=lambda row: (cells.index((row["model"], row["micro_batch"])), row["gpus"]))
    official = [
        json.loads(path.read_text())
        for pattern in ("convvit_step*.json", "official_step*.json")
        for path in sorted(RESULTS.glob(pattern))
    ]
    return "\n\n".join(part for part in _parts(rows, official) if part)


def read(path: Path) -> list[Row]:
    """A JSON list, or a row a line."""
    text = path.read_text()
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]


def efficiency(row: Row, rows: Sequence[Row]) -> float | None:
    """Weak scaling: images a second of a GPU, as a share of what the single process does with the same model, images a
    GPU, input and card, and with CUDA graphs if the row has them; None where that was not measured."""

    def alike(one: Row) -> list[Any]:
        keys = ("model", "micro_batch", "input", "card")
        return [*(_get(one, key) for key in keys), _overrides(one).get("engine.cuda_graphs", "false")]

    alone = [other for other in rows if other["engine"] == "single" and alike(other) == alike(row) and _ran(other)]
    if not alone or not _ran(row):
        return None
    return row["images_per_second_per_gpu"] / alone[-1]["images_per_second_per_gpu"]


def gpu_hours(images_per_second: float) -> float:
    """Of :data:`EPOCHS` epochs of ImageNet-1k where each GPU does so many images a second."""
    return EPOCHS * IMAGES / images_per_second / 3600


def _parts(rows: Sequence[Row], official: Sequence[Row]) -> Iterator[str]:
    cards = ", ".join(dict.fromkeys(f"{row.get('card', 'CPU')}, torch {row['torch']}, {row['date']}" for row in rows))
    shared = _common_overrides(rows)
    yield "; ".join([cards, *shared])
    yield _speed(rows, shared)
    saving = [row for row in rows if "save" in row]
    if saving:
        yield _saves(saving, shared)
    ours = [row for row in rows if row["model"] == DMJD_LARGE and _ran(row)]
    if ours:
        yield _hours(ours, official, shared)


def _speed(rows: Sequence[Row], shared: Sequence[str]) -> str:
    def column(title: str, cell: Callable[[Row], str], numeric: bool = True) -> Column:
        return Column(title, [cell(row) for row in rows], numeric=numeric)

    def number(key: str, digits: int = 0) -> Callable[[Row], str]:
        return lambda row: ABSENT if row.get(key) is None else f"{row[key]:.{digits}f}"

    columns = [
        *_naming(rows, shared),
        column(
            "images/s a GPU", lambda row: number("images_per_second_per_gpu")(row) if _ran(row) else "out of memory"
        ),
        column("views/s a GPU", number("views_per_second_per_gpu")),
        column("MFU, %", number("mfu_percent", 1)),
        column("efficiency", lambda row: _percent(efficiency(row, rows))),
        column("mean step, ms", number("step_ms", 1)),
        column("fastest", number("fastest_ms", 1)),
        column("median", number("median_ms", 1)),
        column("slowest", number("slowest_ms", 1)),
        column("own work of ranks, ms", _own_work),
        column("waiting for data, %", number("data_wait_percent", 2)),
        column("peak GiB", _peak),
    ]
    return Table([each for each in columns if set(each.cells) != {ABSENT}], []).markdown()


def _saves(rows: Sequence[Row], shared: Sequence[str]) -> str:
    columns = _naming(rows, shared)
    for way in ("async", "sync"):
        for index, which in enumerate(("first", "second")):
            stalls = [_get(row["save"], way, [{}] * 2)[index].get("stall_ms") for row in rows]
            cells = ["rejected" if stall is None else f"{stall:.0f}" for stall in stalls]
            columns.append(Column(f"{which} {way} stall, ms", cells))
    sizes = [_get(row["save"], "gib") for row in rows]
    columns.append(Column("checkpoint, GiB", [ABSENT if size is None else f"{size:.2f}" for size in sizes]))
    return Table(columns, []).markdown()


def _hours(rows: Sequence[Row], official: Sequence[Row], shared: Sequence[str]) -> str:
    """The fastest row of every number of GPUs and input, with the paper and the official code beside them."""
    fastest: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row["images_per_second_per_gpu"]):
        fastest[row["gpus"], _get(row, "input"), row.get("card")] = row
    chosen = [row for row in rows if any(row is best for best in fastest.values())]
    lines = [
        (
            f"ours, {_engine(row, shared)}, {row['micro_batch']} images a GPU, input: {_get(row, 'input')}",
            f"{row['gpus']} {row.get('card', 'CPU')}",
            row["images_per_second_per_gpu"],
            gpu_hours(row["images_per_second_per_gpu"]),
            gpu_hours(row["images_per_second_per_gpu"]) / row["gpus"],
            "computed from the measured rate",
        )
        for row in chosen
    ]
    for card in dict.fromkeys(row.get("card") for row in chosen):
        rate = official_rate(card, official)
        if rate is not None:
            cost = gpu_hours(rate)
            lines.append(("official code", f"1 {card}", rate, cost, cost, "computed from the measured rate"))
    paper = f"{PAPER_GPUS} A100 of 40 GB"
    lines.append(("the paper's table", paper, None, PAPER_GPUS * PAPER_WALL_HOURS, PAPER_WALL_HOURS, "as published"))
    names, where, rates, costs, walls, labels = zip(*lines, strict=True)
    return Table(
        [
            Column(f"DMJD ConvViT-L, {EPOCHS} x {IMAGES} images", list(names), numeric=False),
            Column("on", list(where), numeric=False),
            Column("images/s a GPU", [ABSENT if rate is None else f"{rate:.0f}" for rate in rates]),
            Column("GPU hours", [hours(cost) for cost in costs]),
            Column("wall hours", [hours(wall) for wall in walls]),
            Column("", list(labels), numeric=False),
        ],
        [],
    ).markdown()


def official_rate(card: str | None, records: Sequence[Row]) -> float | None:
    """Images a second of the official code's ConvViT-L on one ``card``, the best that ``official_step.py`` measured."""
    rates = [
        row["images_per_second"]
        for record in records
        if record["device"] == card
        for row in record["rows"]
        if row["way"] == "official" and row["case"].startswith(("large:", "convvit_large:"))
    ]
    return max(rates, default=None)


def _naming(rows: Sequence[Row], shared: Sequence[str]) -> list[Column]:
    columns = [
        Column("model", [row["model"] for row in rows], numeric=False),
        Column("images a GPU", [str(row["micro_batch"]) for row in rows]),
        Column("engine", [_engine(row, shared) for row in rows], numeric=False),
        Column("GPUs", [str(row["gpus"]) for row in rows]),
    ]
    kinds = [_get(row, "input") for row in rows]
    if set(kinds) != {"device"}:
        columns.insert(3, Column("input", kinds, numeric=False))
    return columns


def _engine(row: Row, shared: Sequence[str]) -> str:
    """Its name, the shape of its mesh, and overrides that other rows do not have."""
    overrides = _overrides(row)
    copies = overrides.pop("engine.replicas", None)
    name = row["engine"] if copies is None else f"{row['engine']} {copies} x {row['gpus'] // int(copies)}"
    own = [
        f"{key.removeprefix('engine.')}={value}" for key, value in overrides.items() if f"{key}={value}" not in shared
    ]
    return ", ".join([name, *own])


def _overrides(row: Row) -> dict[str, str]:
    """Its overrides without the engine's name; later ones replace earlier ones."""
    pairs = dict(item.split("=", 1) for item in row["words"])
    pairs.pop("engine", None)
    return pairs


def _common_overrides(rows: Sequence[Row]) -> list[str]:
    """Words that all rows were asked for, if an engine then had to go without one of them or not."""
    asked = [{item for item in row["words"] if not item.startswith("engine=")} for row in rows]
    return sorted(set.intersection(*asked)) if asked else []


def _get(row: Row, key: str, absent: Any = None) -> Any:
    return row.get(key, "device" if key == "input" else absent)  # which was the only one once


def _ran(row: Row) -> bool:
    return "out_of_memory" not in row


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.1f} %"


def _peak(row: Row) -> str:
    peaks = [peak for peak in row.get("peak_gib", []) if peak is not None]
    return f"{max(peaks):.1f}" if peaks else ABSENT


def _own_work(row: Row) -> str:
    """The least and the most of the ranks."""
    own = [rank["own_ms"] for rank in row.get("ranks", []) if rank["own_ms"] is not None]
    return f"{min(own):.1f} to {max(own):.1f}" if own else ABSENT
