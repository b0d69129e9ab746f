"""The part of a data set that each rank evaluates, in passes that all ranks make together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from torch import Tensor

from dmjd.data.dataset import ImageDataset, Subset
from dmjd.errors import StopRequested
from dmjd.parallel.world import World

T = TypeVar("T")


def part(count: int, world: World) -> range:
    """The numbers below ``count`` of this rank: contiguous parts of equal size, the last ones smaller."""
    size = -(-count // world.size)
    return range(min(world.rank * size, count), min((world.rank + 1) * size, count))


class Share(Subset):
    """The images of one rank: its :func:`part` of ``dataset``, padded with the last image to whole batches.

    The parts of all ranks have the same number of batches, ``passes``.
    """

    def __init__(self, dataset: ImageDataset, batch_size: int, world: World) -> None:
        images, own = -(-len(dataset) // world.size), part(len(dataset), world)
        self.batch_size = min(batch_size, images)
        self.passes = -(-images // self.batch_size)
        self._count = len(own)
        indices = np.full(self.passes * self.batch_size, len(dataset) - 1)
        indices[: len(own)] = own
        super().__init__(dataset, indices)

    def counted(self, ids: Tensor) -> Tensor:
        """Whether the images at ``ids`` of this part are no padding, bool."""
        return ids < self._count

    def originals(self, ids: Sequence[int]) -> list[int]:
        """Numbers in the data set of the images ``ids`` of this part."""
        return [self._original(index) for index in ids]


def together(take: Callable[[], T], world: World) -> T:
    """The result of ``take()`` on this rank; UserError or StopRequested on one rank ends the evaluation on all of them.
    Collective."""
    stopped = False

    def attempt() -> list[T]:
        nonlocal stopped
        try:
            return [take()]
        except StopRequested:
            stopped = True
            return []

    taken = world.all_or_none(attempt)
    if any(world.gather(stopped)):
        raise StopRequested
    return taken[0]
