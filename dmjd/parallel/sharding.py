"""What each engine keeps of a model on one GPU: arithmetic on the number of parameters.

Parameters, gradients and AdamW's two moments are float32, whatever is computed in; the engines differ in which of them
every GPU holds whole.
"""

from __future__ import annotations

from typing import NamedTuple

from dmjd.config import EngineConfig

ENGINES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")

SHARDED = ("fsdp", "hsdp")
"""Engines that work on a mesh, of one process if need be."""

FLOAT = 4
"""Bytes of a parameter, a gradient and a moment."""

_SHARDED = {  # weights, gradients, optimizer state: whole (False) or one part of each GPU's
    "single": (False, False, False),
    "ddp": (False, False, False),
    "fsdp": (True, True, True),
    "hsdp": (True, True, True),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
}


ZERO3_LIVE = 1_000_000_000
"""Parameters that stage 3 leaves whole from forward to backward, once they have been gathered."""

ZERO_BUCKET = 50_000_000
"""Gradients that DeepSpeed reduces at once, from memory of their own."""

_BUCKETS = {"zero2": 2, "zero3": 1}  # one is filled while the other is reduced


class StateBytes(NamedTuple):
    """Bytes on one GPU. gathered: what is whole within a step only, of the unit at work and of the next, or of all, and
    what is on its way to the other GPUs."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float


def state_bytes(engine: str, parameters: int, largest_unit: int, shards: int) -> StateBytes:
    """Of a model with so many ``parameters``.

    Args:
        engine: one of :data:`ENGINES`.
        largest_unit: the most parameters that are gathered at once, a block's or those of several.
        shards: GPUs that share what ``engine`` divides: all, or those of one copy for "hsdp".
    """
    weights, gradients, optimizer = (
        parameters * FLOAT * moments / (shards if sharded else 1)
        for moments, sharded in zip((1, 1, 2), _SHARDED[engine], strict=True)
    )
    weights_parted, gradients_parted, _ = _SHARDED[engine]
    # Two units' weights are there while the next is fetched, and a unit's gradients until they are reduced.
    whole = max(2 * largest_unit, min(parameters, ZERO3_LIVE) if engine == "zero3" else 0) if weights_parted else 0
    leaving = gradients_parted * largest_unit + _BUCKETS.get(engine, 0) * ZERO_BUCKET
    return StateBytes(weights, gradients, optimizer, FLOAT * (whole + leaving))


def replicas(engine: EngineConfig, size: int, local_size: int) -> int:
    """How many copies of the sharded model HSDP keeps: as many as asked for, or one on each host."""
    return engine.replicas or max(1, size // local_size)
