"""Processes that are started again by one agent never read what killed processes left in its store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, Store

from dmjd.parallel.rendezvous import fresh_store

SECOND = timedelta(seconds=1)


def start(store: Store, delays: list[float]) -> dict[int, Store]:
    """One start of ``len(delays)`` ranks, as threads, each that many seconds late."""
    stores: dict[int, Store] = {}

    def join(rank: int) -> None:
        time.sleep(delays[rank])
        stores[rank] = fresh_store(store, rank, len(delays), 5 * SECOND)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(delays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return stores


@pytest.mark.parametrize("delays", [[0.0, 0.0, 0.0], [0.2, 0.0, 0.1], [0.0, 0.2, 0.0]])
def test_a_new_start_does_not_see_what_the_last_one_wrote(delays: list[float]) -> None:
    shared = HashStore()
    shared.set("dmjd/rank/2", "the name of a rank that was killed before it met the others")
    for attempt in range(3):
        stores = start(shared, delays)
        assert sorted(stores) == [0, 1, 2]
        assert not any(store.check(["address of 0"]) for store in stores.values())
        stores[0].set("address of 0", str(attempt))
        assert [store.get("address of 0") for store in stores.values()] == [str(attempt).encode()] * 3


def test_a_missing_rank_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"rank\(s\) 1 did not start"):
        fresh_store(HashStore(), 0, 2, SECOND / 10)
    with pytest.raises(RuntimeError):
        fresh_store(HashStore(), 1, 2, SECOND / 10)
