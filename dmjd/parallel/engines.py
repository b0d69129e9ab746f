"""The engines: one record each, of all that the rest of the code may know about an engine before it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dmjd.config import EngineConfig, OptimConfig
from dmjd.models.masked_image_model import Model
from dmjd.models.objective import Trainable
from dmjd.parallel.apply import apply, blocks
from dmjd.parallel.engine import Engine

if TYPE_CHECKING:  # it reads this table
    from dmjd.parallel.world import World

AUTO = "auto"
"""``engine.name`` that :mod:`dmjd.builders.auto` replaces by a key of :data:`ENGINES` once processes have met."""

FLOAT = 4
"""Bytes of a parameter, a gradient and a moment: float32, whatever is computed in."""

KEPT = 500_000_000
"""Parameters up to which a model stays whole from forward to backward by default."""

UNIT = 104_857_600
"""Parameters of an FSDP unit at most, by default; their gradients take 400 MiB, as a bucket of DDP does."""

ZERO_BUCKET = 50_000_000
"""Gradients that DeepSpeed reduces at once, from memory of their own."""

_FSDP_OPTIONS = ("reshard_after_forward", "blocks_per_unit")
_ZERO_OPTIONS = ("offload_optimizer", "deepspeed_config")


class Divided(NamedTuple):
    """Which parts of the training state each GPU holds one part of (True), and which it holds whole (False)."""

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False


@dataclass(frozen=True)
class EngineSpec:
    """Traits of one engine.

    build: ``build(objective, engine, optim, world, precision, micro_batch)``; the objective is on its device and not
        transformed.
    divided: how the training state is divided among processes.
    options: keys of ``EngineConfig`` that other engines do not all have.
    compile: the values of ``engine.compile`` that it supports.
    one_process: whether it rejects more than one process.
    mesh: FSDP2 on a device mesh, of one process if need be; gradients of a unit are reduced as soon as they are there.
    stage: DeepSpeed's ZeRO stage; 0 for engines of our own.
    teacher: whether every process has a whole average of the encoder that a teacher can compute with.
    buckets: whether gradients have their memory before the backward pass begins.
    reduced: gradients in buckets of their own while they are reduced.
    """

    build: Callable[[Trainable, EngineConfig, OptimConfig, World, torch.dtype, int], Engine]
    divided: Divided = Divided()
    options: tuple[str, ...] = ()
    compile: tuple[str, ...] = ("none", "block", "model")
    one_process: bool = False
    mesh: bool = False
    stage: int = 0
    teacher: bool = False
    buckets: bool = True
    reduced: int = 0

    @property
    def collective(self) -> bool:
        """Whether it needs a process group even for one process, and all processes for one forward pass."""
        return self.mesh or self.stage > 0


def _replicated(
    objective: Trainable, engine: EngineConfig, optim: OptimConfig, world: World, precision: torch.dtype, _: int
) -> Engine:
    from dmjd.parallel.ddp import DDPEngine
    from dmjd.parallel.single import SingleEngine

    apply(objective.model, engine)
    if world.size == 1:
        return SingleEngine(objective, optim, world.device, precision, cuda_graphs=engine.cuda_graphs)
    return DDPEngine(
        objective,
        optim,
        world,
        precision,
        bucket_mb=engine.bucket_mb,
        cuda_graphs=engine.cuda_graphs,
        # Without it, gradients are allocated outside the buckets until the last micro-batch.
        keep_gradients=engine.grad_accum_steps > 1,
    )


def _fsdp(
    objective: Trainable, engine: EngineConfig, optim: OptimConfig, world: World, precision: torch.dtype, _: int
) -> Engine:
    from dmjd.parallel.fsdp import FSDPEngine, without_parameters

    bare = without_parameters(objective)
    apply(objective.model, engine)
    copies = replicas(engine, world.size, world.local_size) if "replicas" in ENGINES[engine.name].options else None
    return FSDPEngine(
        objective,
        bare,
        optim,
        world,
        world.mesh(copies),
        precision,
        reshard_after_forward=reshards(engine, sum(p.numel() for p in objective.parameters())),
        blocks_per_unit=blocks_per_unit(engine, objective.model, world.local_size == world.size),
    )


def _deepspeed(
    objective: Trainable,
    engine: EngineConfig,
    optim: OptimConfig,
    world: World,
    precision: torch.dtype,
    micro_batch: int,
) -> Engine:
    from dmjd.parallel.deepspeed.engine import DeepSpeedEngine  # imported only if used
    from dmjd.parallel.fsdp import without_parameters

    bare = without_parameters(objective)
    apply(objective.model, engine, hooks_outside=ENGINES[engine.name].divided.weights)
    return DeepSpeedEngine(objective, bare, engine, optim, world, precision, micro_batch)


# CUDA graphs need parameters that stay where they are. FSDP2 and ZeRO-3 gather between blocks, so one graph of the
# whole model leaves no place for it.
ENGINES = {
    "single": EngineSpec(_replicated, options=("cuda_graphs",), one_process=True, teacher=True, buckets=False),
    "ddp": EngineSpec(_replicated, options=("cuda_graphs", "bucket_mb"), teacher=True),
    "fsdp": EngineSpec(
        _fsdp, Divided(True, True, True), _FSDP_OPTIONS, compile=("none", "block"), mesh=True, buckets=False
    ),
    "hsdp": EngineSpec(
        _fsdp,
        Divided(True, True, True),
        (*_FSDP_OPTIONS, "replicas"),
        compile=("none", "block"),
        mesh=True,
        buckets=False,
    ),
    "zero1": EngineSpec(_deepspeed, Divided(optimizer=True), _ZERO_OPTIONS, stage=1, buckets=False),
    # Of two buckets one is filled while the other is reduced.
    "zero2": EngineSpec(
        _deepspeed, Divided(gradients=True, optimizer=True), _ZERO_OPTIONS, stage=2, reduced=2 * ZERO_BUCKET
    ),
    "zero3": EngineSpec(
        _deepspeed,
        Divided(True, True, True),
        ("reshard_after_forward", *_ZERO_OPTIONS),
        compile=("none", "block"),
        stage=3,
        reduced=2 * ZERO_BUCKET,  # a bucket, and its copy in the order in which it is scattered
    ),
}
"""``engine.name`` -> its record. There is no stage 0: it is DDP with other files, and with bf16 its optimizer takes a
real step with zero gradients when it is made, so Adam's count starts at 1; ddp is the baseline."""


class StateBytes(NamedTuple):
    """Bytes on one GPU. gathered: what is whole within a step only, of the unit at work and of the next, or of all, and
    what is on its way to the other GPUs."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float


def state_bytes(
    engine: str, parameters: int, largest_unit: int, shards: int, reshard: bool | None = None, offload: bool = False
) -> StateBytes:
    """Training state of a model with so many ``parameters``.

    Args:
        engine: a key of :data:`ENGINES`.
        largest_unit: the most parameters that are gathered at once, a block's or those of several.
        shards: GPUs that share what ``engine`` divides: all, or those of one copy for "hsdp".
        reshard: ``engine.reshard_after_forward``. (What FSDP2 keeps counts as activations: it has their type.)
        offload: ``engine.offload_optimizer``. Gradients follow, a bucket at a time, where they are divided.
    """
    spec = ENGINES[engine]
    # Stages 1 and 2 update a copy of their part of the weights.
    tensors = 1, 1, 3 if spec.stage in (1, 2) else 2
    weights, gradients, optimizer = (
        parameters * FLOAT * count / (shards if divided else 1)
        for count, divided in zip(tensors, spec.divided, strict=True)
    )
    if offload:
        optimizer = 0.0
        gradients = 0.0 if spec.divided.gradients else gradients
    # A unit's weights, and what is fetched ahead of it or kept after it; a unit's gradients until they are reduced.
    others = zero3_live(reshard, parameters, largest_unit).most if spec.stage == 3 else largest_unit
    whole = min(parameters, largest_unit + others) if spec.divided.weights else 0
    leaving = spec.divided.gradients * largest_unit + spec.reduced
    return StateBytes(weights, gradients, optimizer, FLOAT * (whole + leaving))


class LiveParameters(NamedTuple):
    """How many parameters ZeRO-3 holds whole beside the block at work.

    ahead: fetched before their block needs them, in whole blocks.
    kept: those nearest to the loss, from their forward to their backward pass; 0, some or all.
    most: of both together. Of the blocks before those that are kept, ``most - kept`` are fetched ahead.
    """

    ahead: int
    kept: int
    most: int


def zero3_live(reshard: bool | None, parameters: int, block: int) -> LiveParameters:
    """Of a model with so many ``parameters``, whose largest block has ``block``; ``engine.reshard_after_forward``."""
    ahead = min(parameters, block * max(2, -(-ZERO_BUCKET // block)))
    kept = 0 if reshard else min(parameters, KEPT if reshard is None else parameters)
    return LiveParameters(ahead, kept, max(ahead, kept))


def blocks_per_unit(engine: EngineConfig, model: Model, one_host: bool) -> int:
    """Blocks that FSDP gathers and reduces together: ``engine.blocks_per_unit`` or, since each unit takes CPU time, as
    many as have at most :data:`UNIT` parameters, half of that across hosts, where reducing the last one takes longer.
    """
    if engine.blocks_per_unit is not None:
        return engine.blocks_per_unit
    largest = max(sum(p.numel() for p in block.parameters()) for block in blocks(model))
    fit = (UNIT if one_host else UNIT // 2) // largest
    halves = len(list(model.encoder.blocks)) // 2  # the second is gathered while the first computes
    return max(1, min(fit, halves))


def reshards(engine: EngineConfig, parameters: int) -> bool:
    """Whether FSDP frees what it has gathered of a model with so many ``parameters`` after the forward pass."""
    return parameters > KEPT if engine.reshard_after_forward is None else engine.reshard_after_forward


def replicas(engine: EngineConfig, size: int, local_size: int) -> int:
    """How many copies of the sharded model HSDP keeps: as many as ``engine.replicas``, or one on each host."""
    return engine.replicas or max(1, size // local_size)
