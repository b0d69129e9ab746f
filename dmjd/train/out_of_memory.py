"""Out-of-memory errors: a snapshot of the allocator, and settings that reduce memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dmjd.config import PLANS, TrainConfig
from dmjd.errors import OutOfMemory
from dmjd.parallel.apply import MODES
from dmjd.parallel.world import World

FOLDER = "out_of_memory"
HISTORY = 100_000
"""Allocations and releases kept with their stacks."""

logger = logging.getLogger("dmjd")


@contextmanager
def explain_out_of_memory(config: TrainConfig, run: Path, world: World) -> Iterator[None]:
    """Context that turns torch's error into one line with settings that reduce memory.

    On CUDA ``RUN/out_of_memory/rank-00000.pickle`` has the allocations, for https://pytorch.org/memory_viz; with
    ``memory_history`` also their stacks.

    Raises:
        OutOfMemory: in place of ``torch.OutOfMemoryError``.
    """
    on_cuda = world.device.type == "cuda"
    if on_cuda and config.memory_history:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)
    try:
        yield
    except torch.OutOfMemoryError as error:
        kept = _keep_snapshot(run / FOLDER / f"rank-{world.rank:05d}.pickle") if on_cuda else ""
        raise OutOfMemory(
            f"rank {world.rank} ran out of {_size(world)} in a step; {_advice(config, world)}{kept}"
        ) from error
    finally:
        if on_cuda and config.memory_history:
            torch.cuda.memory._record_memory_history(enabled=None)


def _size(world: World) -> str:
    if world.device.type != "cuda":
        return "the memory"
    about = torch.cuda.get_device_properties(world.device)
    return f"the {about.total_memory / 2**30:.1f} GiB of {about.name}"


def _advice(config: TrainConfig, world: World) -> str:
    engine, images = config.engine, config.batch_size // world.size
    remedies = []
    more = next((n for n in range(engine.grad_accum_steps + 1, images + 1) if images % n == 0), None)
    if more is not None:
        remedies.append(f"engine.grad_accum_steps={more} (micro-batches of {images // more} images)")
    if engine.cuda_graphs:
        remedies.append("engine.cuda_graphs=false")
    stronger = MODES[MODES.index(engine.activation_checkpointing) + 1 :]
    if stronger:
        remedies.append(f"engine.activation_checkpointing={stronger[0]}")
    tried = f"try {' or '.join(remedies)}" if remedies else "use more GPUs, or a sharded engine such as engine=fsdp"
    return f"{tried}; dmjd {PLANS[config.command].replace('_', ' ')} lists settings that fit"


def _keep_snapshot(path: Path) -> str:
    draft = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(draft))
        draft.replace(path)
    except OSError as error:
        logger.warning("cannot write the memory snapshot %s: %s", path, error)
        return ""
    return f"; memory snapshot: {path}"
