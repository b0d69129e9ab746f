"""One process that takes itself for rank 0 of many, to see what engines do on the host among so many.

torch's fake process group answers every collective at once: an all-gather copies this rank's slice to all places, the
others leave their tensors as they are. So code runs as it would among N ranks, while memory, launches and Python of a
step are those of one of them; numbers come out wrong, and what NCCL itself takes on the host is missing.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend

from dmjd.parallel.ddp import DDPEngine
from dmjd.parallel.engine import Engine
from dmjd.parallel.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class SimulatedWorld(World):
    """Rank 0 of ``size``, all on one host, with nobody behind the others."""

    def gather(self, item: T) -> list[T]:
        return [item]

    def new_group(self) -> World:
        return self


def simulate_world(device: torch.device, size: int) -> SimulatedWorld:
    """Make the fake group of ``size`` ranks the default one."""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, and missing in the list of exports
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    return SimulatedWorld(0, size, 0, device, local_size=size)


def answer_buckets(engine: Engine) -> None:
    """Have DDP take its buckets as they are: the fake group's answer has no value, which the reducer insists on."""

    def hook(
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # as above; torch checks this annotation
    ) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer().div_(group.size()), group=group)
        devices = [bucket.buffer().device] if bucket.buffer().is_cuda else None
        reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        reduced.set_result(bucket.buffer())
        return reduced

    if isinstance(engine, DDPEngine):
        engine._replicas.register_comm_hook(dist.group.WORLD, hook)
