"""Choosing a device, a precision and an engine."""

from __future__ import annotations

import os

import torch

from dmjd.config import EngineConfig, OptimConfig
from dmjd.errors import ConfigError
from dmjd.models.objective import Objective
from dmjd.parallel.apply import apply
from dmjd.parallel.ddp import DDPEngine
from dmjd.parallel.deepspeed.config import STAGES
from dmjd.parallel.engine import Engine
from dmjd.parallel.fsdp import FSDPEngine, without_parameters
from dmjd.parallel.sharding import SHARDED, replicas
from dmjd.parallel.single import SingleEngine
from dmjd.parallel.world import World, alone


def select_device(name: str, key: str = "engine.device") -> torch.device:
    """ "auto" takes CUDA where there is one. Raises ConfigError if "cuda" is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown!r})"
        raise ConfigError(f"{key}=cuda, but torch sees no CUDA device{hidden}; use cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def select_precision(name: str, device: torch.device) -> torch.dtype:
    """ "auto" computes in bfloat16 on CUDA and in float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def build_engine(
    objective: Objective, engine: EngineConfig, optim: OptimConfig, world: World | None = None, micro_batch: int = 1
) -> Engine:
    """Transform the model as asked, then hand it to the engine. Without a ``world``, one process by itself.

    ``micro_batch``, a process's images in one, changes nothing; DeepSpeed wants to be told.
    """
    world = alone(select_device(engine.device)) if world is None else world
    precision = select_precision(engine.precision, world.device)
    objective.to(world.device)
    if engine.name in SHARDED:
        bare = without_parameters(objective)
        apply(objective.model, engine)
        copies = replicas(engine, world.size, world.local_size) if engine.name == "hsdp" else None
        return FSDPEngine(
            objective,
            bare,
            optim,
            world,
            world.mesh(copies),
            precision,
            reshard_after_forward=engine.reshard_after_forward,
            blocks_per_unit=engine.blocks_per_unit,
        )
    if engine.name in STAGES:
        from dmjd.parallel.deepspeed.engine import DeepSpeedEngine  # for those who have it and ask for it

        bare = without_parameters(objective)
        apply(objective.model, engine)
        return DeepSpeedEngine(objective, bare, engine, optim, world, precision, micro_batch)
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
        # Dropped, they would come outside of the buckets until the last micro-batch, beside those.
        keep_gradients=engine.grad_accum_steps > 1,
    )
