"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from dmjd.parallel.world import World

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ThreadWorld(World):
    """One of several ranks that are threads of this process."""

    meeting: Any = None
    table: dict[int, Any] = field(default_factory=dict)

    def gather(self, item: Any) -> list[Any]:
        self.table[self.rank] = item
        self.meeting.wait(20)
        items = [self.table[rank] for rank in range(self.size)]
        self.meeting.wait(20)
        return items


def in_worlds(size: int, act: Any) -> list[Any]:
    """``act(world)`` on every rank: its results, or its exceptions."""
    table, meeting = dict[int, Any](), threading.Barrier(size)
    worlds = [ThreadWorld(rank, size, rank, CPU, size, meeting=meeting, table=table) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(act, world) for world in worlds]
        return [future.exception() or future.result() for future in futures]
