"""Pictures of a run in progress: views, targets and predictions of a few samples, and the loss curves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmjd.builders.preparation import Preparation, Prepared
from dmjd.data.batch import Batch
from dmjd.masking import MaskedViews
from dmjd.models.objective import Trainable
from dmjd.ops.views import Views
from dmjd.runs.folder import RunFolder
from dmjd.targets import Tokenizer
from dmjd.targets.pixels import PixelTarget

if TYPE_CHECKING:
    from dmjd.train.pictures import Render

SHOWN_IMAGES = 6
"""Samples in one picture."""

_MASKED_TOKENS = (
    "A masked token shows the prediction of the first view that masks it; tokens that no view masks show the target."
)
_SCALE = " Target and prediction have the scale of the image."
_NORMALISATION = (
    " The model predicts pixels normalised per patch; they are shown with the mean and the standard deviation of the "
    "true patch."
)

logger = logging.getLogger("dmjd")


@dataclass(frozen=True)
class Samples:
    """Samples to draw, copied to CPU memory, since training continues meanwhile.

    Shapes as for :func:`~dmjd.train.pictures.view_grid`.
    """

    crops: Tensor
    views: Views
    targets: Tensor
    predictions: Tensor
    grid: tuple[int, int]


def predict(objective: Trainable, prepare: Preparation, batch: Batch, epoch: int) -> Samples:
    """Predict every token of the first images of ``batch``, which is on the device."""
    eager = replace(prepare, compiled=False, compiled_target=False)  # no compilation for a few images
    prepared = eager(batch.map(lambda field: field[:SHOWN_IMAGES]), epoch)
    return predict_prepared(objective, prepared, prepare.tokenizer)


def predict_prepared(objective: Trainable, prepared: Prepared, tokenizer: Tokenizer) -> Samples:
    """Predict every token in each view; of codes, the most likely one."""
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
    """Write ``pictures/`` from ``samples`` and the log up to ``step``; returns the files by name. Uses the CPU only."""
    from dmjd.train.pictures import disjoint_views, loss_curves, view_grid  # matplotlib takes half a second to import

    crops, views, grid, folder = samples.crops, samples.views, samples.grid, run.pictures
    targets, predictions, render, scale = in_scale_of_images(tokenizer, crops, samples.targets, samples.predictions)
    view_grid(crops, views, targets, predictions, render, grid, folder / "views.png", _MASKED_TOKENS + scale)
    disjoint_views(crops[:4], views.map(lambda part: part[:, :4]), grid, folder / "masks.png")
    rows = [row for row in run.read_log() if "loss" in row and row["step"] <= step]
    if rows:
        loss_curves(rows, folder / "loss.png")
    own = (folder / f"{name}.png" for name in ("loss", "masks", "views"))  # not those of dmjd show
    return {path.stem: path for path in own if path.exists()}


def in_scale_of_images(
    tokenizer: Tokenizer, crops: Tensor, targets: Tensor, predictions: Tensor
) -> tuple[Tensor, Tensor, Render, str]:
    """Targets, predictions, their render function and its description. Pixels normalised per patch get the mean and
    the standard deviation of the patches of ``crops``; other targets stay as they are.

    Shapes as for :func:`~dmjd.train.pictures.view_grid`.
    """
    if not isinstance(tokenizer, PixelTarget):
        return targets, predictions, tokenizer.render, ""
    if tokenizer.norm != "patch":
        return targets, predictions, tokenizer.render, _SCALE
    targets, predictions = (tokenizer.denormalise(values, crops) for values in (targets, predictions))
    return targets, predictions, replace(tokenizer, norm="none").render, _SCALE + _NORMALISATION


class PictureThread:
    """Draws pictures on a thread, so that training continues meanwhile; one set at a time.

    Args:
        on_drawn: called by :meth:`collect` with the step and the files by name.
    """

    def __init__(self, on_drawn: Callable[[int, Mapping[str, Path]], None]) -> None:
        self._on_drawn = on_drawn
        self._thread = ThreadPoolExecutor(1, "pictures")
        self._drawing: tuple[int, Future[dict[str, Path]]] | None = None

    def submit(self, step: int, draw: Callable[[], dict[str, Path]]) -> None:
        """Begin to draw the pictures of ``step``, after those before were collected."""
        self.collect(wait=True)
        self._drawing = step, self._thread.submit(draw)

    def collect(self, wait: bool = False) -> None:
        """Pass on pictures that are drawn. Files that cannot be written cost a warning; other errors are raised."""
        if self._drawing is None or not (wait or self._drawing[1].done()):
            return
        (step, drawing), self._drawing = self._drawing, None
        try:
            self._on_drawn(step, drawing.result())
        except OSError as error:
            logger.warning("no pictures at step %d: %s", step, error)

    def close(self) -> None:
        """Wait until nothing is drawn any more."""
        self._thread.shutdown()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)
