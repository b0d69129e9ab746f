"""Choosing a device, a precision and an engine."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from dmjd.config import EngineConfig, OptimConfig
from dmjd.errors import ConfigError
from dmjd.models.dense.batch_norm import BatchNorm2d
from dmjd.models.objective import Trainable
from dmjd.parallel.engine import Engine
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.world import World, alone


def select_device(name: str, key: str = "engine.device") -> torch.device:
    """ "auto" takes CUDA where there is one. Raises ConfigError for "cuda" without a CUDA device."""
    if name == "cuda" and not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        cause = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise ConfigError(f"{key}=cuda, but torch sees no CUDA device{cause}; use cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def select_precision(name: str, device: torch.device) -> torch.dtype:
    """ "auto" computes in bfloat16 on CUDA and in float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def build_engine(
    objective: Trainable, engine: EngineConfig, optim: OptimConfig, world: World | None = None, micro_batch: int = 1
) -> Engine:
    """Move the objective to its device, transform its model as configured, and build the engine around it. Batch
    normalisation has the statistics of all processes.

    Args:
        world: left out, one process by itself.
        micro_batch: images of one process in a micro-batch. No result depends on it; DeepSpeed counts samples with it.
    """
    world = alone(select_device(engine.device)) if world is None else world
    precision = select_precision(engine.precision, world.device)
    objective.to(world.device)
    if world.size > 1:
        for part in objective.modules():
            if isinstance(part, BatchNorm2d):
                part.reduce = sum_over_processes
    return ENGINES[engine.name].build(objective, engine, optim, world, precision, micro_batch)


def sum_over_processes(tensor: Tensor) -> Tensor:
    """``tensor``, which is overwritten, summed over all processes. Collective, in the forward and the backward pass."""
    dist.all_reduce(tensor)
    return tensor
