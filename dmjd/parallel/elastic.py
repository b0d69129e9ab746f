"""Elastic launches: after the loss of a node torchrun starts the ranks again, and as many train as divide the batch.

The batch size never changes. Micro-batches are at most as large as with all nodes, since a larger one may not fit the
memory: ``engine.grad_accum_steps`` grows instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

import torch
from torch._C._distributed_c10d import Store

from dmjd.config import EngineConfig
from dmjd.errors import ConfigError, NotMet
from dmjd.parallel.fit import check_fit
from dmjd.parallel.launch import Launch

FINISHED = "dmjd/finished"
_ACTIVE = "dmjd/active"
_POLL_SECONDS = 1.0


def micro_batches(grad_accum_steps: int, batch_size: int, full_size: int, size: int) -> int | None:
    """The least gradient accumulation with which ``size`` processes have micro-batches no larger than those of
    ``full_size`` processes with ``grad_accum_steps``; None if ``size`` does not divide the batch.

    An even micro-batch stays even: mixup and cutmix mix pairs.
    """
    most = batch_size // (grad_accum_steps * full_size)
    for steps in range(grad_accum_steps, batch_size // size + 1):
        images, rest = divmod(batch_size, steps * size)
        if rest == 0 and images <= most and (most % 2 or images % 2 == 0):
            return steps
    return None


def active_size(launch: Launch, engine: EngineConfig, device: torch.device, batch_size: int) -> int:
    """The largest number of processes that divides the batch and that the engine supports; all if there is none."""
    for size in range(launch.size, 0, -1):
        if micro_batches(engine.grad_accum_steps, batch_size, launch.full_size, size) is None:
            continue
        try:
            check_fit(engine, device, size, min(launch.local_size, size))
        except ConfigError:
            continue
        return size
    return launch.size


def same_micro_batch(engine: EngineConfig, batch_size: int, full_size: int, size: int) -> EngineConfig:
    """``engine`` with the gradient accumulation of :func:`micro_batches`; itself if the launch is not elastic."""
    steps = micro_batches(engine.grad_accum_steps, batch_size, full_size, size) if full_size else None
    return replace(engine, grad_accum_steps=steps or engine.grad_accum_steps)


def agree(launch: Launch, store: Store, timeout: timedelta, choose: Callable[[], int]) -> int:
    """The number of ranks that train: ``choose()`` of rank 0. Collective. Raises RuntimeError if rank 0 is missing."""
    if launch.rank == 0:
        store.set(_ACTIVE, str(choose()))
    store.wait([_ACTIVE], timeout)
    return int(store.get(_ACTIVE))


def stay_idle(store: Store, rank: int) -> NoReturn:
    """Wait until the ranks that train have ended the run.

    Raises:
        SystemExit: with code 0, when they have.
        NotMet: if the store is lost, since they have failed.
    """
    try:
        while not store.check([FINISHED]):
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:
        raise NotMet(f"idle rank {rank}: the store of the training ranks is gone, so they have failed") from error
    raise SystemExit(0)
