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
FINETUNE_CONFIG: dict[str, Any] = {
    "command": "finetune",
    "typed": ["preset=mae_vit_base", "init"],
    "seed": 0,
    "epochs": 4,
    "batch_size": 1024,
    "ema_decay": None,
    "weights": "trained",
    "freeze": 0,
    "backbone": VIT_B | {"drop_path": 0.1},
    "data": {"name": "folder", "image_size": [224, 224]},
    "optim": {"base_lr": 5e-4, "layer_decay": 0.65, "weight_decay": 0.05},
    "head": {"pooling": "mean", "norm": "pooled", "dropout": 0.0, "num_classes": 10},
    "augment": {"randaugment": "rand-m9-mstd0.5-inc1", "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1}
    | {"erase_prob": 0.25},
}  # fmt: skip
GROUPS = [
    {"name": "embeddings", "layers": 0, "lr_scale": 0.65**13, "weight_decay": 0.05, "tensors": 3, "parameters": 590592},
    {"name": "head <b>", "layers": 13, "lr_scale": 1.0, "weight_decay": 0.0, "tensors": 2, "parameters": 1538},
]
FINETUNE_SETTINGS = {"data": "folder in photos, 224x224", "epochs": 4, "seed": 0, "run": "ft"}


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


@pytest.fixture
def make_finetune(tmp_path: Path) -> Callable[..., Path]:
    """``make_finetune(name, **config)``: the folder of a fine-tuning run of 4 epochs of 10 steps."""

    def make(name: str, validated: dict[int, dict[str, Any]] | None = None, **config: Any) -> Path:
        folder = tmp_path / name
        (folder / "evaluations").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(FINETUNE_CONFIG | config))
        (folder / "provenance.json").write_text(json.dumps({"device": "NVIDIA H200", "world_size": 1}))
        (folder / "groups.json").write_text(json.dumps(GROUPS))
        scores = {epoch: {"val_top1": 70.0 + epoch % 3, "val_top5": 90.0 + epoch, "val_loss": 1 / epoch}
                  for epoch in range(1, 5)}  # fmt: skip
        rows = [{"step": 10 * epoch, "epoch": epoch, "loss": 4.0 / epoch, "lr": 1e-3} for epoch in range(1, 5)]
        rows += [{"step": 10 * epoch, "epoch": epoch, **each} for epoch, each in (validated or scores).items()]
        write_lines(folder / "log.jsonl", sorted(rows, key=lambda row: row["step"]))
        write_lines(folder / "timing.jsonl", [{"step": 40, "seconds": 360.0}])
        record = {"verb": "finetune", "weights": "trained", "step": 40, "top1": 72.0, "top5": 94.0}
        record |= {
            "balanced_top1": 71.0,
            "chance": 10.0,
            "majority": 12.0,
            "settings": FINETUNE_SETTINGS | {"seed": config.get("seed", 0), "run": name},
        }
        (folder / "evaluations" / "finetune-0.json").write_text(json.dumps(record))
        return folder

    return make
