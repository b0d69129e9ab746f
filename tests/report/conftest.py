from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmjd.report.curves import Convergence

STEPS_PER_EPOCH = 100
VIT_B = {"name": "vit", "patch_size": 16, "embed_dim": 768, "depth": 12}
A100 = "NVIDIA A100-SXM4-40GB"

MakeRun = Callable[..., Path]


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without charts, which take longer to draw than all the rest."""
    monkeypatch.setattr("dmjd.report.curves.run_charts", lambda run: [])
    empty = Convergence("caption", b"", [])
    monkeypatch.setattr("dmjd.report.curves.convergence", lambda runs, baseline, labels: empty)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run(name, ...)``: a run folder in ``tmp_path`` that took ``hours`` for ``done`` epochs at an even pace.

    curve: (epoch, online kNN score) pairs.
    evaluations: (verb, weights, epoch, top1, settings) of what ``dmjd knn`` and its like left.
    launches: (device, world size) of every launch.
    """

    def make(
        name: str,
        *,
        method: str = "mae",
        views: int = 1,
        pattern: str = "uniform",
        epochs: int = 100,
        done: float | None = None,
        hours: float = 100.0,
        rates: tuple[float, float] = (0.75, 0.75),
        curve: Iterable[tuple[float, float]] = (),
        evaluations: Iterable[tuple[str, str, float, float, dict[str, Any]]] = (),
        launches: Iterable[tuple[str, int]] = ((A100, 8),),
        config: dict[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / name
        (folder / "evaluations").mkdir(parents=True)
        mask = {"views": views, "pattern": pattern, "regulation": "disjoint"}
        settings = {"epochs": epochs, "method": {"name": method}, "mask": mask, **(config or {})}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        records = [{"device": device, "world_size": size} for device, size in launches]
        (folder / "provenance.json").write_text(json.dumps(records[-1] | {"launches": records}))
        reached = epochs if done is None else done
        logged = [reached * tenth / 10 for tenth in range(1, 11)]
        rows: list[dict[str, Any]] = [
            {"epoch": epoch, "loss": 1 / (1 + epoch), "mim": 1 / (1 + epoch), "lr": 1e-3, "grad_norm": 2.0}
            | {"m_corr": rates[0], "m_pred": rates[1]}
            for epoch in logged
        ]
        rows += [{"epoch": epoch, "knn_top1": score} for epoch, score in curve]
        rows.sort(key=lambda row: row["epoch"])
        write_lines(folder / "log.jsonl", [{"step": round(row["epoch"] * STEPS_PER_EPOCH), **row} for row in rows])
        write_lines(
            folder / "timing.jsonl",
            [
                {
                    "step": round(epoch * STEPS_PER_EPOCH),
                    "seconds": 3600 * hours * epoch / reached,
                    "images_per_second": 9,
                }
                for epoch in logged
            ],
        )
        for index, (verb, weights, epoch, top1, how) in enumerate(evaluations):
            record = {"verb": verb, "weights": weights, "step": round(epoch * STEPS_PER_EPOCH), "top1": top1}
            (folder / "evaluations" / f"{index}.json").write_text(json.dumps(record | {"settings": how}))
        return folder

    return make


@pytest.fixture
def pattern_runs(make_run: MakeRun) -> list[Path]:
    """Runs with the numbers of the paper's table of masking patterns, all to a fine-tuning accuracy of 83.6 %."""

    def row(name: str, epochs: int, hours: float, views: int, pattern: str, rates: tuple[float, float]) -> Path:
        judged = [("finetune", "trained", epochs, 83.6, dict[str, Any]())]
        model = {"backbone": VIT_B, "target": {"name": "pixels", "norm": "patch"}}
        shape = {"views": views, "pattern": pattern, "epochs": epochs, "hours": hours, "rates": rates}
        return make_run(name, **shape, evaluations=judged, config=model)

    return [
        row("mae_vit_base", 1600, 227, 1, "uniform", (147 / 196, 147 / 196)),
        row("mae_dm_uniform_vit_base", 800, 127, 2, "uniform", (147 / 196, 1.0)),
        row("mae_dm_vit_base", 400, 70, 2, "block", (30 / 49, 1.0)),
    ]
