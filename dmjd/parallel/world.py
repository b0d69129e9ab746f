"""The processes of a run, and their collectives outside the training step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # a public name, and missing in the list of exports
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from dmjd.config import EngineConfig
from dmjd.errors import ConfigError, NotMet, UserError
from dmjd.parallel.elastic import FINISHED, active_size, agree, stay_idle
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.fit import check_fit
from dmjd.parallel.launch import Launch, read_launch
from dmjd.parallel.rendezvous import fresh_store

T = TypeVar("T")

logger = logging.getLogger("dmjd")

# torch 2.14 made it public under another name and warns about the old one, which is all that 2.11 knows.
_set_timeout: Callable[..., None] = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


@dataclass(frozen=True)
class World:
    """Rank ``rank`` of ``size``; ``local_rank`` of ``local_size`` counts within the host and picks the CUDA device.

    group: gloo group with a long time-out for collectives outside the training step, which has groups of its own; None
        for one process.
    timeout: the time-out of that group: compilation, a cold file system and an evaluation on rank 0 take minutes.
    full_size: processes of an elastic launch while all its nodes are there; 0 if the launch is not elastic.
    store: of an elastic launch, on an agent of torchrun; idle ranks wait there for the end.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    local_size: int = 1
    group: dist.ProcessGroup | None = None
    timeout: timedelta = timedelta(minutes=30)
    full_size: int = 0
    store: Store | None = field(default=None, repr=False)
    _of_steps: list[dist.ProcessGroup] = field(default_factory=list, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes logs, manifests and pictures."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean of ``values`` over all ranks, without a host sync on CUDA."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM)
            values /= self.size
        return values

    def on_main(self, act: Callable[[], T]) -> T:
        """Call ``act`` on rank 0 and return its result on every rank; if it raises there, every rank raises.
        Collective."""
        if self.size == 1:
            return act()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome = [act(), None]
            except Exception as error:
                dist.broadcast_object_list([None, str(error)], src=0, group=self.group)
                raise
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise _reported(outcome[1])
        result: T = outcome[0]
        return result

    def all_or_none(self, act: Callable[[], T]) -> T:
        """Call ``act`` on every rank and return its own result; if it raises UserError on one, every rank raises it.
        Collective."""
        if self.size == 1:
            return act()
        own: UserError | None = None
        try:
            result = act()
        except UserError as error:
            own = error
        messages = self.gather(None if own is None else str(own))
        first = next((rank for rank, message in enumerate(messages) if message is not None), None)
        if first is None:
            return result
        if own is not None and self.rank == first:
            own.reported = False  # this rank prints it, also if it was another rank's error before
            raise own
        raise _reported(str(messages[first]))

    def cap_timeout(self, seconds: float) -> float:
        """``seconds`` that one rank waits, at most half of the time-out of the other ranks that wait for it."""
        return seconds if self.size == 1 else min(seconds, self.timeout.total_seconds() / 2)

    def gather(self, item: T) -> list[T]:
        """``item`` of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    def new_group(self) -> World:
        """The same processes with a new group, for the collectives of another thread. Collective."""
        return self if self.size == 1 else replace(self, group=_gloo_group(self.timeout))

    def mesh(self, replicas: int | None = None) -> DeviceMesh:
        """All processes as one dimension "shard", or as ``replicas`` rows of it, "replicate" x "shard". Collective."""
        if replicas is None:
            mesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("shard",))
        else:
            shape = (replicas, self.size // replicas)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        self._of_steps.extend(mesh.get_all_groups())
        return mesh

    def step_group(self) -> dist.ProcessGroup:
        """A new group of all processes for the collectives of an engine in a step. Collective."""
        group = dist.new_group(timeout=self.timeout)
        assert isinstance(group, dist.ProcessGroup)
        self._of_steps.append(group)
        return group

    def expect_steps(self, timeout: timedelta) -> None:
        """Set the time-out of the groups of the training step, after the first step, which takes longer."""
        if self.size > 1:
            for group in (None, *self._of_steps):
                _set_timeout(timeout, group)

    def close(self) -> None:
        """Wait for all ranks, so that the exit of one is no lost connection to another; destroy the groups."""
        if self.size > 1:
            dist.barrier(group=self.group)
        if self.store is not None and self.is_main:
            self.store.set(FINISHED, "")
        if dist.is_initialized():
            dist.destroy_process_group()


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _reported(message: str) -> UserError:
    """An error that another rank prints."""
    error = UserError(message)
    error.reported = True
    return error


def alone(device: torch.device) -> World:
    """The world of one process."""
    return World(0, 1, 0, device)


def join_world(device: torch.device, engine: EngineConfig, batch_size: Callable[[], int] | None = None) -> World:
    """Join the process group if torchrun (or a launcher that sets its variables) started several processes.

    Args:
        batch_size: gives that of the run, for an elastic launch; called on rank 0. Ranks that stay idle exit in here.

    Raises:
        ConfigError: if the engine does not support the device or the number of processes, or a launcher's variable is
            wrong.
        NotMet: if the processes do not connect.
    """
    spec = ENGINES.get(engine.name)  # "auto" chooses none that this concerns
    if spec is not None and spec.stage:
        # DeepSpeed would select CUDA on a host with a GPU, also for a run on the CPU.
        os.environ.setdefault("DS_ACCELERATOR", device.type)
    launch = read_launch()
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=engine.start_timeout)
    store: Store | None = None
    if launch.full_size and batch_size is not None:
        launch, store = _join_elastic(launch, engine, device, batch_size, timeout)
    check_fit(engine, device, launch.size, launch.local_size)
    if launch.size == 1:
        if spec is not None and spec.collective and not dist.is_initialized():
            own = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
            dist.init_process_group(backend, store=own, rank=0, world_size=1)
        return replace(alone(device), full_size=launch.full_size, store=store)
    if device.type == "cuda":
        if launch.local_rank >= torch.cuda.device_count():
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise ConfigError(
                f"LOCAL_RANK={launch.local_rank} has no GPU: torch finds {torch.cuda.device_count()}"
                f"{'' if shown is None else f' (CUDA_VISIBLE_DEVICES={shown})'}; start at most one process per GPU, or "
                "set engine.device=cpu"
            )
        device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(device)
    try:
        met = store or _meet(timeout)
        dist.init_process_group(backend, store=met, rank=launch.rank, world_size=launch.size, timeout=timeout)
        group = _gloo_group(timeout)
    except (RuntimeError, ValueError) as error:  # torch's network errors are RuntimeErrors
        raise _not_met(error, launch, timeout) from error
    return World(
        launch.rank,
        launch.size,
        launch.local_rank,
        device,
        launch.local_size,
        group,
        timeout,
        launch.full_size,
        store,
    )


def _meet(timeout: timedelta) -> Store:
    """The store of this start, when all processes are there. Raises RuntimeError or ValueError if one is missing."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    return fresh_store(store, rank, size, timeout)


def _join_elastic(
    launch: Launch, engine: EngineConfig, device: torch.device, batch_size: Callable[[], int], timeout: timedelta
) -> tuple[Launch, Store | None]:
    """The launch of the ranks that train, and the store of this start; None for one process. Idle ranks exit."""

    def choose() -> int:
        images = batch_size()
        size = active_size(launch, engine, device, images)
        if size < launch.full_size:
            logger.warning(
                "%d of %d process(es) train, %d stay idle, %d are missing: the most that divide batch_size=%d",
                size,
                launch.full_size,
                launch.size - size,
                launch.full_size - launch.size,
                images,
            )
        return size

    if launch.size == 1:
        choose()
        return launch, None
    try:
        store = _meet(timeout)
        size = agree(launch, store, timeout, choose)
    except (RuntimeError, ValueError) as error:
        raise _not_met(error, launch, timeout) from error
    if launch.rank >= size:
        stay_idle(store, launch.rank)
    launch = replace(launch, size=size, local_size=min(launch.local_size, size))
    # For DeepSpeed, which reads them.
    os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"] = str(launch.size), str(launch.local_size)
    return launch, store


def _not_met(error: Exception, launch: Launch, timeout: timedelta) -> NotMet:
    """One line for torch's error, of pages, if the processes do not connect."""
    message = " ".join(str(error).split())[:300]
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    cure = f"start all {launch.size} within engine.start_timeout={timeout.total_seconds() / 60:g} minutes"
    if "EADDRINUSE" in message:
        cure = "set MASTER_PORT to a free port on all of them"
    elif "Unable to find address for" in message:
        cure = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface that `ip address` lists, or unset them"
    return NotMet(
        f"rank {launch.rank} did not connect to the others at MASTER_ADDR={address} MASTER_PORT={port}: {message}; "
        f"{cure}"
    )
