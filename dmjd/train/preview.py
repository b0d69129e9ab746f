"""Pictures of what a run is doing: views, targets and predictions of a few samples, and the loss curves."""

from __future__ import annotations

import json

import torch

from dmjd.masking import MaskedViews
from dmjd.models.objective import Objective
from dmjd.parallel.engine import Engine
from dmjd.targets import Tokenizer
from dmjd.train.pictures import disjoint_views, loss_curves, view_grid
from dmjd.train.preparation import Prepared
from dmjd.train.run_folder import RunFolder

SHOWN_IMAGES = 6


def write_pictures(run: RunFolder, engine: Engine, prepared: Prepared, tokenizer: Tokenizer) -> None:
    """Refresh ``pictures/`` from the first images of ``prepared`` and the log so far."""
    objective = engine.module
    assert isinstance(objective, Objective)
    masked_views = prepared.masked_views
    views = type(masked_views.views)(*(part[:, :SHOWN_IMAGES] for part in masked_views.views))
    images, crops, targets = (x[:SHOWN_IMAGES] for x in (prepared.images, prepared.crops, prepared.targets))
    tokens = targets.shape[1]
    everywhere = torch.arange(tokens, device=targets.device).expand(*views.mask.shape[:2], tokens)
    with torch.inference_mode(), engine.micro_batch(last=False):
        predictions = objective.model(images, MaskedViews(views, everywhere)).masked
    predictions = predictions.float().unflatten(0, views.mask.shape[:2]).cpu()
    views = type(views)(*(part.cpu() for part in views))
    encoder = objective.model.encoder
    view_grid(
        crops.cpu(), views, targets.cpu(), predictions, tokenizer.render, encoder.grid, run.pictures / "views.png"
    )
    disjoint_views(
        crops.cpu()[:4], type(views)(*(part[:, :4] for part in views)), encoder.grid, run.pictures / "masks.png"
    )
    rows = [json.loads(line) for line in run.log.read_text().splitlines()]
    if rows:
        loss_curves(rows, run.pictures / "loss.png")
