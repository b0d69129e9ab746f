"""Pictures of what a run is doing: views, targets and predictions of a few samples, and the loss curves."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dmjd.masking import MaskedViews
from dmjd.models.objective import Objective
from dmjd.targets import Tokenizer
from dmjd.train.pictures import disjoint_views, loss_curves, view_grid
from dmjd.train.preparation import Prepared
from dmjd.train.run_folder import RunFolder

SHOWN_IMAGES = 6
"""How many samples a picture has room for."""


def write_pictures(run: RunFolder, objective: Objective, prepared: Prepared, tokenizer: Tokenizer) -> dict[str, Path]:
    """Refresh ``pictures/`` from ``prepared`` (a handful of samples) and the log so far; the files by name."""
    views, images, crops, targets = prepared.masked_views.views, prepared.images, prepared.crops, prepared.targets
    tokens = targets.shape[1]
    everywhere = torch.arange(tokens, device=targets.device).expand(*views.mask.shape[:2], tokens)
    with torch.inference_mode():
        predictions = objective.model(images, MaskedViews(views, everywhere)).masked
    predictions = predictions.float().unflatten(0, views.mask.shape[:2]).cpu()
    if tokenizer.codes:
        predictions = predictions.argmax(-1, keepdim=True)
    views = views.map(Tensor.cpu)
    encoder = objective.model.encoder
    view_grid(
        crops.cpu(), views, targets.cpu(), predictions, tokenizer.render, encoder.grid, run.pictures / "views.png"
    )
    disjoint_views(crops.cpu()[:4], views.map(lambda part: part[:, :4]), encoder.grid, run.pictures / "masks.png")
    rows = [row for row in run.read_log() if "loss" in row]
    if rows:
        loss_curves(rows, run.pictures / "loss.png")
    return {path.stem: path for path in sorted(run.pictures.glob("*.png"))}
