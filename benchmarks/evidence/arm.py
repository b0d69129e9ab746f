"""One training with its scores, in a process of its own. See pool.py.

python -m evidence.arm [compile] reads the path of JOB.json from its standard input after its imports, and writes the
result and its output beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmjd.builders import build_objective, step
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.evaluate import encoder
from dmjd.evaluate.knn import knn_accuracy, neighbours_for
from dmjd.evaluate.linprobe import LinprobeConfig
from dmjd.evaluate.sweep import batch_size_for, cached_probe, epochs_for, held_out_rows
from dmjd.masking import MaskedViews
from dmjd.models.objective import Losses, Objective
from dmjd.ops.tokens import gather_tokens
from dmjd.runs.folder import RunFolder
from dmjd.train.loop import finetune, pretrain
from evidence import elpv

ENCODED = 1024
"""Images per forward pass of the scores."""


class Misaligned(Objective):
    """The official code's visible branch: predictions in a random order of tokens, targets in raster order.

    Which order is shuffled makes no difference to the loss, so the targets are, anew in each step.
    """

    def forward(
        self, images: Tensor, masked_views: MaskedViews, targets: Tensor, branch_scales: Tensor | None = None
    ) -> Losses:
        prediction = self.model(images, masked_views, branch_scales)
        masked = self.mim_loss(prediction.masked.float(), gather_tokens(targets, masked_views.predicted))
        visible_targets = gather_tokens(targets, masked_views.views.visible)
        order = torch.rand(visible_targets.shape[:2], device=targets.device).argsort(dim=1)
        shuffled = visible_targets.take_along_dim(order.unsqueeze(-1), dim=1)
        visible = self.visible_loss(prediction.visible.float(), shuffled)
        return Losses(visible + self.mim_weight * masked, masked, visible)


class Floored(Objective):
    """Pixels normalised by patch with a floor below the deviation, so that noise of almost flat patches stays small;
    for targets without normalisation, whose mean deviation is .3 in patches of Fashion-MNIST."""

    floor = 0.2

    def forward(
        self, images: Tensor, masked_views: MaskedViews, targets: Tensor, branch_scales: Tensor | None = None
    ) -> Losses:
        variance, mean = torch.var_mean(targets, dim=-1, keepdim=True)
        floored = (targets - mean) / (variance + self.floor**2).sqrt()
        return super().forward(images, masked_views, floored, branch_scales)


def build_paired(config: PretrainConfig, target_dim: int) -> Objective:
    """:func:`dmjd.builders.build_objective`, with initial weights of the encoder that depend on the backbone and the
    seed alone: decoder and branches draw from the same generator before them."""
    objective = build_objective(config, target_dim)
    other = deepcopy(config)
    other.method.visible_branch.enabled = False
    other.method.decoder.dim, other.method.decoder.depth, other.method.decoder.num_heads = 16, 1, 1
    objective.model.encoder.load_state_dict(build_objective(other, 1).model.encoder.state_dict())
    return objective


def build_as(config: PretrainConfig, target_dim: int, objective: type[Objective]) -> Objective:
    """:func:`build_paired` with the loss of ``objective``."""
    built = build_paired(config, target_dim)
    built.__class__ = objective
    return built


OBJECTIVES = {
    "": build_paired,
    "misaligned": partial(build_as, objective=Misaligned),
    "floored": partial(build_as, objective=Floored),
}


def classified(config: LinprobeConfig, workers: int) -> dict[str, float]:
    """Top-1 of ``dmjd linprobe protocol=cached`` and of ``dmjd knn``, the images being encoded once for both."""
    frozen = encoder.load_encoder(config)
    train, test = frozen.dataset("train"), frozen.dataset("test")
    bank, queries = (frozen.features(images, "mean", ENCODED, workers) for images in (train, test))
    kept = int((~held_out_rows(bank.labels, config.seed)).sum())
    size = batch_size_for(kept)
    probe = cached_probe(
        *(bank, queries, train.num_classes),
        epochs=epochs_for(kept, size),
        batch_size=size,
        seed=config.seed,
        device=frozen.device,
    )
    neighbours = neighbours_for(len(train), train.num_classes)
    knn = knn_accuracy(bank, queries, train.num_classes, device=frozen.device, k=neighbours)
    return {"probe": probe.top1, "knn": knn.top1}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train and score; the row without its key.

    Args:
        job: ``folder``, ``keys`` of dmjd pretrain, ``source``, ``data`` (root), ``objective``, ``workers``,
            ``finetune`` (keys, or null), ``untrained``, ``seed``.
    """
    folder, began = Path(job["folder"]), time.monotonic()
    for module in (step, encoder):  # the latter builds the encoder before training again
        module.build_objective = OBJECTIVES[job["objective"]]  # type: ignore[attr-defined]
    common = [f"data.root={job['data']}", f"seed={job['seed']}", f"workers={job['workers']}", "time_budget=null"]
    common += ["checkpoint_every=1000000000"]
    pretraining = compose("pretrain", [*job["keys"], *common, f"run={folder / 'pretrain'}"])
    trained = pretrain(pretraining)
    _check_finished(trained)
    seconds = {"pretrain": time.monotonic() - began}
    row = speed(trained, pretraining.batch_size)
    config = compose("linprobe", [f"checkpoint={trained.path}"])
    score, workers = (elpv.scores, job["workers"]) if job["source"] == "elpv" else (classified, 0)
    scores = score(config, workers)
    if job["untrained"]:
        before = score(replace(config, weights="untrained"), workers)
        scores |= {f"untrained_{name}": value for name, value in before.items()}
    seconds["scores"] = time.monotonic() - began - seconds["pretrain"]
    if job["finetune"] is not None:
        tuned = finetune(
            compose("finetune", [f"init={trained.path}", *job["finetune"], *common, f"run={folder / 'finetune'}"])
        )
        _check_finished(tuned)
        scores["finetune"] = tuned.read_log()[-1]["val_top1"]
        seconds["finetune"] = time.monotonic() - began - sum(seconds.values())
    return {"scores": scores, "seconds": {name: round(value, 2) for name, value in seconds.items()}, **row}


def _check_finished(run: RunFolder) -> None:
    reason = run.read_stop_reason()
    if reason.get("reason") != "finished":
        raise SystemExit(f"{run.path} did not finish: {reason}")


def speed(run: RunFolder, batch_size: int) -> dict[str, Any]:
    """Images per second after the first fifth of the steps, when that was, the seconds before it, and the loss."""
    rows = run.read_rows(run.timing)
    first, last = next(row for row in rows if 5 * row["step"] >= rows[-1]["step"]), rows[-1]
    seconds = last["seconds"] - first["seconds"]
    ended = run.timing.stat().st_mtime
    return {
        "images_per_second": round((last["step"] - first["step"]) * batch_size / seconds, 1),
        "window": [round(ended - seconds, 2), round(ended, 2)],
        "seconds_before": round(first["seconds"], 2),
        "data_wait_percent": round(max(row["data_wait_percent"] for row in rows[len(rows) // 2 :]), 2),
        "loss": [row["loss"] for row in run.read_log() if "loss" in row][-1],
    }


def main() -> None:
    if sys.argv[1:] == ["compile"]:
        import_module("torch._inductor.compile_fx")  # as torch.compile does in the first step

    path = Path(sys.stdin.readline().strip())
    if not path.name:
        return  # the pool has no training for this process
    with path.with_suffix(".txt").open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    job = json.loads(path.read_text())
    try:
        row = run(job)
    finally:
        shutil.rmtree(job["folder"], ignore_errors=True)
    path.with_suffix(".row").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
