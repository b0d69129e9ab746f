"""How many gradients DDP reduces at once, where they add up, and which rank copies what of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dmjd.config import OptimConfig
from dmjd.parallel.build import build_engine
from dmjd.parallel.staging import HostCopies
from dmjd.parallel.world import World
from tests.parallel.walk import CPU, engine, make_batch, make_objective


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


def test_what_one_rank_writes_no_other_copies(
    lone_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks of a host would hold eight pinned copies of all parameters and moments."""
    taken: list[dict[str, Tensor]] = []

    def take(copies: HostCopies, state: dict[str, Tensor]) -> dict[str, Tensor]:
        taken.append(state)
        return state

    monkeypatch.setattr(HostCopies, "take", take)
    for rank in range(3):
        ddp = build_engine(make_objective(), engine("ddp"), OptimConfig(), World(rank, 3, 0, CPU))
        averages = {name: value + 1 for name, value in ddp.local_shards().items()}
        ddp.save(tmp_path, averages)
        ddp.close()
    names = [name for share in taken for name in share]
    parameters = {name for name, _ in make_objective().named_parameters()}
    assert len(names) == len(set(names)) == 5 * len(parameters)
    assert {name.partition("/")[2] for name in names} == parameters
    sizes = [sum(tensor.nbytes for tensor in share.values()) for share in taken]
    largest = max(tensor.nbytes for share in taken for tensor in share.values())
    assert max(sizes) - min(sizes) <= largest


@pytest.mark.parametrize("parts", [1, 2])
def test_micro_batches_add_up_inside_the_buckets(parts: int, lone_group: None) -> None:
    """Beside buckets that are empty until the last of them, gradients would be there twice."""
    built = build_engine(
        make_objective(), replace(engine("ddp"), grad_accum_steps=parts), OptimConfig(), World(0, 2, 0, CPU)
    )
    seen = []
    for step in range(3):
        for part in range(parts):
            with built.micro_batch(last=part + 1 == parts):
                built.backward(built.module(*make_batch(step, range(4 * part, 4 * part + 4))).total)
        seen.append([p.grad.data_ptr() for p in built.objective.parameters() if p.grad is not None])
        built.step(1e-3, 0.05)
    assert seen[1] == seen[2], "after the first, DDP lays buckets out anew"
    kept = [p.grad is not None for p in built.objective.parameters()]
    assert all(kept) if parts > 1 else not any(kept)
    built.close()
