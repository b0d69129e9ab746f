"""Replicated parameters, averaged gradients: torch's DistributedDataParallel behind the engine protocol."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dmjd.config import OptimConfig
from dmjd.models.objective import Trainable
from dmjd.parallel.single import SingleEngine
from dmjd.parallel.staging import divide
from dmjd.parallel.world import World

# The gradient of a 1x1 convolution's weight may have the strides of channels-last, which name the same memory.
warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides", UserWarning)

# torch 2.14 gave the switch a new name and warns about the old one, which is all that 2.11 knows.
_BUFFER_SWITCH = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DDPEngine(SingleEngine):
    """A :class:`SingleEngine` on every rank, whose gradients are averaged in the last micro-batch's backward.

    Every rank holds the same parameters and moments, so a save is written by all together, each tensor by one of them.
    """

    # DDP lays its buckets out anew after the first backward, and with three ranks or more the layout decides the order
    # of summation.
    rehearses = True

    def __init__(
        self,
        objective: Trainable,
        config: OptimConfig,
        world: World,
        precision: torch.dtype,
        *,
        bucket_mb: int | None = None,
        cuda_graphs: bool = False,
        keep_gradients: bool = False,
    ) -> None:
        super().__init__(
            objective, config, world.device, precision, cuda_graphs=cuda_graphs, keep_gradients=keep_gradients
        )
        no_buffers: dict[str, Any] = {_BUFFER_SWITCH: False}  # positions are functions of the grid, equal everywhere
        self._replicas = DistributedDataParallel(
            objective,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=_bucket_mb(world) if bucket_mb is None else bucket_mb,
            **no_buffers,
        )
        self.module = self._replicas
        self._world = world
        self._saving = world.new_group()

    def _share(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        # Torch would have each tensor written once all the same, but copied to the host by all of a host's ranks.
        sizes = {name: tensor.nbytes for name, tensor in state.items()}
        return {name: state[name] for name in divide(sizes, self._world.size)[self._world.rank]}

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._saving.group

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        # Around forward as well: DDP decides there whether this backward will reduce.
        with nullcontext() if last else self._replicas.no_sync(), super().micro_batch(last):
            yield

    def full_state_dict(self) -> dict[str, Tensor]:
        return super().full_state_dict() if self._world.is_main else {}

    def gathered(self) -> AbstractContextManager[Trainable | None]:
        return nullcontext(self.objective if self._world.is_main else None)

    def close(self) -> None:
        super().close()
        # While DDP's reducer lives, destroying the process group now and then aborts the interpreter at its exit.
        self.module = self.objective
        del self._replicas
        gc.collect()


def _bucket_mb(world: World) -> int | None:
    """A reduction slows the products beside it down by more than its own time. Where links are fast, few and large ones
    lose least, though nothing overlaps the last of them, which counts where links are slow.
    """
    return 400 if world.local_size == world.size else None  # torch's 25, and a first bucket of 1
