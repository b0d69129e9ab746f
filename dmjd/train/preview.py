"""Pictures of what a run is doing: views, targets and predictions of a few samples, and the loss curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dmjd.builders.preparation import Prepared
from dmjd.masking import MaskedViews
from dmjd.models.objective import Objective
from dmjd.ops.views import Views
from dmjd.runs.folder import RunFolder
from dmjd.targets import Tokenizer
from dmjd.train.pictures import disjoint_views, loss_curves, view_grid

SHOWN_IMAGES = 6
"""How many samples a picture has room for."""


@dataclass(frozen=True)
class Samples:
    """Samples to draw, in CPU memory of their own: training goes on meanwhile.

    Shapes as :func:`~dmjd.train.pictures.view_grid` takes them.
    """

    crops: Tensor
    views: Views
    targets: Tensor
    predictions: Tensor
    grid: tuple[int, int]


def predict(objective: Objective, prepared: Prepared, tokenizer: Tokenizer) -> Samples:
    """Predict every token of ``prepared`` (a handful of samples); of codes the likeliest."""
    views, targets = prepared.masked_views.views, prepared.targets
    tokens = targets.shape[1]
    everywhere = torch.arange(tokens, device=targets.device).expand(*views.mask.shape[:2], tokens)
    with torch.inference_mode():
        predictions = objective.model(prepared.images, MaskedViews(views, everywhere)).masked
    predictions = predictions.float().unflatten(0, views.mask.shape[:2])
    if tokenizer.codes:
        predictions = predictions.argmax(-1, keepdim=True)
    return Samples(
        _copy(prepared.crops), views.map(_copy), _copy(targets), _copy(predictions), objective.model.encoder.grid
    )


def write_pictures(run: RunFolder, step: int, samples: Samples, tokenizer: Tokenizer) -> dict[str, Path]:
    """Refresh ``pictures/`` from ``samples`` and the log up to ``step``; the files by name. Runs on the CPU alone."""
    crops, views, grid, folder = samples.crops, samples.views, samples.grid, run.pictures
    view_grid(crops, views, samples.targets, samples.predictions, tokenizer.render, grid, folder / "views.png")
    disjoint_views(crops[:4], views.map(lambda part: part[:, :4]), grid, folder / "masks.png")
    rows = [row for row in run.read_log() if "loss" in row and row["step"] <= step]
    if rows:
        loss_curves(rows, folder / "loss.png")
    return {path.stem: path for path in sorted(folder.glob("*.png"))}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)
