"""How many gradients DDP reduces at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dmjd.config import OptimConfig
from dmjd.parallel.build import build_engine
from dmjd.parallel.world import World
from tests.parallel.walk import CPU, engine, make_objective


@pytest.fixture
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("bucket_mb", "ranks_of_this_host", "expected"), [(None, 2, 400), (None, 1, 25), (60, 2, 60), (60, 1, 60)]
)
def test_buckets_are_large_on_one_host(
    bucket_mb: int | None, ranks_of_this_host: int, expected: int, lone_group: None
) -> None:
    world = World(0, 2, 0, CPU, local_size=ranks_of_this_host)
    built = build_engine(make_objective(), engine("ddp", bucket_mb=bucket_mb), OptimConfig(), world)
    assert isinstance(built.module, DistributedDataParallel)
    assert built.module.bucket_bytes_cap == expected * 2**20
    built.close()
