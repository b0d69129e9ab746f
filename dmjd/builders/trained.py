"""The model of a checkpoint folder of a run, as its configuration describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dmjd.builders.model import BACKBONES
from dmjd.builders.tasks import builders_of
from dmjd.config import FinetuneConfig, PretrainConfig, TrainConfig
from dmjd.errors import CheckpointError, ConfigError
from dmjd.models.objective import Trainable
from dmjd.parallel import native_files, store
from dmjd.runs.checkpoint import read_buffers
from dmjd.runs.paths import CONFIG
from dmjd.safe_load import one_line


def check_described(folder: Path, trained: TrainConfig) -> None:
    """Raise CheckpointError unless the configuration in ``folder`` describes the tensors beside it.

    The model is built on the meta device, so a configuration from outside cannot allocate memory.
    """
    saved, backbone = store.shapes(folder), trained.backbone
    blocks = BACKBONES[backbone.name].blocks(backbone)
    if isinstance(trained, PretrainConfig) and trained.method.decoder.name == "mae":
        blocks += trained.method.decoder.depth
    if blocks > len(saved):
        raise CheckpointError(f"{folder / CONFIG} has {blocks} blocks, but there are {len(saved)} tensors beside it")
    try:
        with torch.device("meta"):
            bare = builders_of(trained).objective(trained, _classes(folder, trained))
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{folder / CONFIG} does not describe a model: {one_line(error)}") from error
    native_files.check_same_model({name: value.shape for name, value in bare.named_parameters()}, saved, folder)


def trained_objective(folder: Path, trained: TrainConfig, weights: str = "trained") -> Trainable:
    """The model with its losses on the CPU, of the checkpoint ``folder`` whose configuration is ``trained``.

    Args:
        weights: "trained", "ema" (the average of all parameters, which fine-tuning, segmentation and detection have),
            or "untrained" (as initialised from the seed). Buffers, such as running statistics, belong to each of them.

    Raises:
        CheckpointError: if the checkpoint holds another model. ConfigError: if it has no average.
    """
    check_described(folder, trained)
    objective = builders_of(trained).objective(trained, _classes(folder, trained))
    if weights != "untrained":
        found = store.read_average(folder) if weights == "ema" else store.read_model(folder)
        if not found:
            raise ConfigError(
                f"weights=ema, but {folder} has no EMA weights; train with ema_decay=..., or use weights=trained"
            )
        if objective.state_dict().keys() - dict(objective.named_parameters()).keys():
            found |= read_buffers(folder, average=weights == "ema")
        store.load_strictly(objective, found, folder)
    return objective


def _classes(folder: Path, trained: Any) -> int:
    """Classes of the head of the model in ``folder``; 0 for pre-training."""
    if isinstance(trained, PretrainConfig):
        return 0
    if isinstance(trained, FinetuneConfig):
        bias = store.shapes(folder).get("model.head.bias")
        if bias is None or len(bias) != 1:
            raise CheckpointError(f"{folder} is of a fine-tuning, and has no model.head.bias")
        return bias[0]
    if trained.head.num_classes is None:
        raise CheckpointError(f"{folder / CONFIG} has no head.num_classes, which a run stores at its start")
    classes: int = trained.head.num_classes
    return classes
