"""Transforms applied to a model from outside, in this order:

1. activation checkpointing of each block: of all of it, of all but its expensive ops, or of its MLP, whose
   hidden layer is most of what a block keeps;
2. ``torch.compile`` around the checkpointed forward (the other way round loses the saving): per transformer block,
   which is short to compile and leaves room for hooks between blocks, or of the model as one graph, where residual
   additions and casts fuse across blocks;
3. sharding, which is the engine's.

Both leave a module's parameters where they are, so their names, and with them checkpoints, do not change.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from dmjd.config import EngineConfig
from dmjd.models.masked_image_model import Model
from dmjd.models.mlp import recompute_hidden
from dmjd.models.recompute import keep_expensive, recompute

MODES = ("none", "selective", "mlp", "full")
"""Of activation checkpointing, by the memory that they leave in use where MLPs are as wide as a ConvViT's. None of them
changes a result."""


def blocks(model: Model) -> Iterator[nn.Module]:
    """The units of recomputation and compilation: the encoder's and the decoder's residual blocks.

    An architecture takes part by having ``blocks`` in the order of computation, each with its ``mlp`` (ViT: a list;
    ConvViT: three stages, convolutions first).
    """
    for (block,) in units(model, 1):
        yield block


def units(model: Model, size: int) -> Iterator[list[nn.Module]]:
    """The blocks, ``size`` consecutive ones at a time and what remains, the encoder's apart from the decoder's."""
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stacked = list(stack.blocks)
            yield from (stacked[start : start + size] for start in range(0, len(stacked), size))


def apply(model: Model, config: EngineConfig, *, hooks_outside: bool = False) -> None:
    """Transform ``model`` in place as ``config`` sets.

    Args:
        hooks_outside: compile the ``forward`` of a block, so that hooks on the block run around the graph. Otherwise
            the call is compiled, with its hooks.
    """
    inductor = {"options": {"triton.cudagraphs": True}} if config.cuda_graphs else {}
    for block in blocks(model):
        checkpoint_block(block, config.activation_checkpointing)
        if config.compile == "block" and hooks_outside:
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        elif config.compile == "block":
            block.compile(fullgraph=True, dynamic=False, **inductor)
    if config.compile == "model":
        model.compile(fullgraph=True, dynamic=False, **inductor)
    if config.compile != "none":
        from torch._dynamo import config as dynamo  # takes a second

        # Under DDP torch splits the compiled graph at buckets, to overlap reduction with the backward pass. Compiled
        # blocks overlap without splits, which would only prevent fusion.
        dynamo.optimize_ddp = config.compile == "model"
        # Static shapes: dynamic ones slow kernels down, and compiling a Swin's blocks of seven shapes does not end.
        # The default limit of 8 leaves none for a second batch size.
        dynamo.recompile_limit = 32


def checkpoint_block(block: nn.Module, mode: str) -> None:
    """Recompute in the backward pass what ``mode`` (``EngineConfig.activation_checkpointing``) names."""
    if mode == "mlp":
        assert isinstance(block.mlp, nn.Module)
        recompute_hidden(block.mlp)
    elif mode == "selective":
        recompute(block, policy=keep_expensive)
    elif mode == "full":
        recompute(block)
