"""``dmjd demo``: pre-train a small model, score it and an untrained encoder, and write the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.data.build import build_dataset, resolve_auto
from dmjd.evaluate import evaluate
from dmjd.evaluate.knn import KnnConfig
from dmjd.evaluate.linprobe import LinprobeConfig
from dmjd.report import write_report
from dmjd.train.loop import pretrain

EXPERIMENTS = {"digits": "demo_digits"}
"""Data set -> its experiment; ``demo`` for all others."""

TRAIN_IMAGES = {"demo": 10000}
"""Experiment -> training images used for the scores; all for the others."""
PROBE: dict[str, dict[str, Any]] = {
    "demo": {"augment": False, "batch_size": 256, "base_lr": 5.0, "epochs": 20, "warmup_epochs": 1},
    "demo_digits": {"augment": False, "batch_size": 256, "base_lr": 5.0, "epochs": 100, "warmup_epochs": 5},
}
"""Experiment -> settings of its linear probe."""


def demo(overrides: Sequence[str]) -> None:
    """Pre-train with ``experiment=demo`` and ``overrides``, score, and write the report; prints each result.

    Raises:
        UserError: as the commands pretrain, knn, linprobe and report.
    """
    config: PretrainConfig = compose("pretrain", ["experiment=demo", *overrides])
    data = resolve_auto(config.data)
    experiment = EXPERIMENTS.get(data.name, "demo")
    config = compose("pretrain", [f"experiment={experiment}", *overrides])
    config.data.name, config.data.pad = data.name, data.pad
    build_dataset(config.data, "test")  # raise its errors before the training
    run = pretrain(config)
    record = run.read_stop_reason()
    if record.get("reason") != "finished":
        detail = record.get("detail", "another launch has resumed it")
        print(f"{run.path}: stopped, {detail}; next: run the same command to continue")
        return
    common: dict[str, Any] = {"checkpoint": str(run.path), "workers": 0, "device": config.engine.device}
    common["untrained"] = False  # a record of its own
    common["train_images"] = TRAIN_IMAGES.get(experiment)
    scores: list[tuple[str, Callable[[str], float]]] = [
        ("kNN", lambda weights: evaluate("knn", KnnConfig(**common, weights=weights))["top1"]),
        (
            "linear probe",
            lambda weights: evaluate("linprobe", LinprobeConfig(**common, **PROBE[experiment], weights=weights))[
                "top1"
            ],
        ),
    ]
    for name, score in scores:
        before, after = score("untrained"), score("trained")
        print(f"{name} top-1: untrained {before:.2f} %, pre-trained {after:.2f} % ({after - before:+.2f} points)")
    print(write_report(run.path))
