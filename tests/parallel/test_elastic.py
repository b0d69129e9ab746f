"""Elastic launches: how many of the ranks that are left train, with which micro-batches, and how the others wait."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from dmjd.config import EngineConfig
from dmjd.errors import ConfigError, NotMet
from dmjd.parallel.elastic import FINISHED, active_size, agree, micro_batches, same_micro_batch, stay_idle
from dmjd.parallel.launch import Launch, read_launch

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("left", "local", "batch", "size", "steps"),
    [
        (32, 8, 1024, 32, 1),
        (24, 8, 1024, 16, 2),  # 64 images each would be twice those of 32 processes
        (24, 8, 1536, 24, 2),  # 64 of 48: two micro-batches of 32
        (16, 8, 1024, 16, 2),
        (8, 8, 1024, 8, 4),
        (3, 1, 1024, 2, 16),
    ],
)
def test_the_most_ranks_that_divide_the_batch_have_no_larger_micro_batches(
    left: int, local: int, batch: int, size: int, steps: int
) -> None:
    engine = EngineConfig(name="ddp")
    assert active_size(Launch(0, left, 0, local, 32), engine, CPU, batch) == size
    assert same_micro_batch(engine, batch, 32, size).grad_accum_steps == steps


def test_against_all_choices() -> None:
    for full in (2, 4, 6, 12):
        for parts in (1, 2):
            for batch in range(full * parts, 200, full * parts):
                most = batch // (full * parts)
                for size in range(1, full + 1):
                    allowed = [
                        steps
                        for steps in range(parts, batch + 1)
                        if batch % (steps * size) == 0
                        and batch // (steps * size) <= most
                        and (most % 2 == 1 or batch // (steps * size) % 2 == 0)
                    ]
                    assert micro_batches(parts, batch, full, size) == (allowed[0] if allowed else None)
                assert micro_batches(parts, batch, full, full) == parts


def test_an_engine_has_a_say() -> None:
    engine = EngineConfig(name="hsdp", replicas=4)
    assert active_size(Launch(0, 6, 0, 2, 8), engine, CPU, 48) == 4  # 6 divides the batch and 4 does not divide 6
    misfit = EngineConfig(name="hsdp", replicas=7)
    assert active_size(Launch(0, 6, 0, 2, 8), misfit, CPU, 48) == 6, "the usual error follows"


def test_without_an_elastic_launch_nothing_changes() -> None:
    engine = EngineConfig(name="ddp", grad_accum_steps=3)
    assert same_micro_batch(engine, 7, 0, 2) == engine


def test_all_ranks_have_the_number_of_rank_0() -> None:
    store = HashStore()
    launches = [Launch(rank, 3, rank, 3, 4) for rank in range(3)]
    choices = iter([2, 3, 3])
    assert [agree(launch, store, timedelta(seconds=20), lambda: next(choices)) for launch in launches] == [2, 2, 2]


def test_an_idle_rank_ends_with_the_run() -> None:
    server: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert server is not None
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    timer = threading.Timer(0.2, client.clone().set, (FINISHED, ""))
    timer.start()
    with pytest.raises(SystemExit) as left:
        stay_idle(client, 2)
    timer.join()
    assert left.value.code == 0
    server.delete_key(FINISHED)
    server = None
    with pytest.raises(NotMet, match="idle rank 2: the store of the training ranks is gone"):
        stay_idle(client, 2)


def test_more_processes_than_all_nodes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("LOCAL_", "MASTER_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "n1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("DMJD_FULL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"DMJD_FULL_WORLD_SIZE='1' must be a whole number from 2"):
        read_launch()
    monkeypatch.setenv("DMJD_FULL_WORLD_SIZE", "4")
    assert read_launch().full_size == 4
