"""The processes of a run, as torchrun started them, and the few things they do together besides a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dmjd.errors import ConfigError, UserError

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others: compilation, a cold file system and online kNN on rank 0 take their time."""


@dataclass(frozen=True)
class World:
    """Rank ``rank`` of ``size``; ``local_rank`` of ``local_size`` counts within the host and picks the CUDA device."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes: logs, checkpoints and pictures come from rank 0 alone."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean of ``values`` over all ranks, without a host sync on CUDA."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM)
            values /= self.size
        return values

    def on_main(self, act: Callable[[], T]) -> T:
        """What ``act`` returns on rank 0, handed to every rank. If it raises there, every rank does, so that none waits
        for one that has left."""
        if self.size == 1:
            return act()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome = [act(), None]
            except Exception as error:
                dist.broadcast_object_list([None, str(error)], src=0)
                raise
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise _told(outcome[1])
        result: T = outcome[0]
        return result

    def together(self, act: Callable[[], T]) -> T:
        """What ``act`` returns on this rank, unless it was refused on any: then every rank raises."""
        if self.size == 1:
            return act()
        refusal: UserError | None = None
        try:
            result = act()
        except UserError as error:
            refusal = error
        sentences = self.gather(None if refusal is None else str(refusal))
        speaker = next((rank for rank, sentence in enumerate(sentences) if sentence is not None), None)
        if speaker is None:
            return result
        if refusal is not None and self.rank == speaker:
            raise refusal
        raise _told(str(sentences[speaker]))

    def gather(self, item: T) -> list[T]:
        """``item`` of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def close(self) -> None:
        """Leave together, so that no rank's exit looks like a failure to another."""
        if self.size > 1:
            dist.barrier()
            dist.destroy_process_group()


def _told(sentence: str) -> UserError:
    """A refusal that another rank prints."""
    error = UserError(sentence)
    error.told = True
    return error


def alone(device: torch.device) -> World:
    """A run of one process."""
    return World(0, 1, 0, device)


def join_world(device: torch.device, engine: str) -> World:
    """Meet the other processes, if torchrun (or any launcher that sets its variables) started some.

    Raises:
        ConfigError: if the engine and the number of processes do not fit.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and engine == "single":
        raise ConfigError(f"engine=single is one process, and the launcher started {size}; use engine=ddp")
    if size == 1:
        return alone(device)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank} has no CUDA device; this host shows {torch.cuda.device_count()}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    return World(rank, size, local_rank, device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
