"""Transforms that a model knows nothing about, applied from outside and in this order:

1. activation checkpointing, per block or per block's MLP, whose hidden layer is most of what a block keeps;
2. ``torch.compile``, per transformer block, around the checkpointed forward (the other way round loses the saving);
3. sharding, which is the engine's.

Both leave a module's parameters where they are, so their names, and with them checkpoints, do not change.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dmjd.config import EngineConfig
from dmjd.models.masked_image_model import MaskedImageModel
from dmjd.models.recompute import recompute


def blocks(model: MaskedImageModel) -> Iterator[nn.Module]:
    """The units of recomputation and compilation: the encoder's and the decoder's transformer blocks."""
    yield from model.encoder.blocks
    if model.decoder is not None:
        yield from model.decoder.blocks


def apply(model: MaskedImageModel, config: EngineConfig) -> None:
    """Transform ``model`` in place as ``config`` asks."""
    for block in blocks(model):
        recomputed = {"none": None, "mlp": block.mlp, "full": block}[config.activation_checkpointing]
        if isinstance(recomputed, nn.Module):
            recompute(recomputed)
        if config.compile:
            block.compile(fullgraph=True)
