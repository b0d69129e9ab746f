"""What feeds a run: its images, the batches they make in order, and the list of those that were bad."""

from __future__ import annotations

import platform
from collections.abc import Generator
from functools import cached_property
from pathlib import Path

from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import fetch_ahead, training_batches, training_crop, training_source
from dmjd.data.detour import Detour, DetourAhead
from dmjd.data.identity import DataIdentity
from dmjd.data.loader import check_shared_memory, make_loader
from dmjd.data.quarantine import Quarantine
from dmjd.data.waiting import Limit
from dmjd.errors import DataError, StoppedBefore, StopRequested, UserError
from dmjd.parallel.world import World
from dmjd.redact import shown
from dmjd.train.state import Position
from dmjd.train.stop import Requests

STACKS = "stacks"
"""The folder, inside a run's, of what a rank and its loader workers did when no data arrived for too long."""


class Feed:
    """One rank's batches.

    Args:
        bad_images: path of the run's list of them.

    Raises:
        UserError: on all ranks, where the data are not what ``config.data`` says.
    """

    def __init__(self, config: PretrainConfig, bad_images: Path, world: World) -> None:
        self._config, self._bad_images, self._world = config, bad_images, world
        self._source = world.all_or_none(lambda: training_source(config.data))
        self.identity = DataIdentity.of(self._source)
        first = world.on_main(lambda: str(self.identity))
        world.all_or_none(lambda: self._require_those_of(first))
        self._stacks = bad_images.parent / STACKS / f"rank-{world.rank:05d}.txt"
        self._batches = training_batches(
            config.data, self._source, config.batch_size, config.seed, world.rank, world.size
        )
        self.steps_per_epoch = self._batches.steps_per_epoch
        self._shape = config.batch_size // world.size, training_crop(config.data).sizes, config.data.channels
        size = Batch.nbytes(*self._shape)
        world.all_or_none(lambda: check_shared_memory(size, config.workers, world.local_size))

    def _require_those_of(self, first: str) -> None:
        """Disks of nodes may hold copies that are not whole, and ranks would draw from each its own."""
        if str(self.identity) != first:
            raise DataError(
                f"data.root={shown(self._config.data.root or '')} has {first} for rank 0, and {self.identity} for "
                f"rank {self._world.rank} ({platform.node()}); all have to read the same"
            )

    @cached_property
    def _quarantine(self) -> Quarantine:
        return Quarantine(self._bad_images, len(self._source), self._config.data.max_bad_percent)

    def admit_bad(self) -> None:
        """List what a check of the images has found. One rank does so, before batches are read.

        Raises:
            DataError: if that is too much. StorageError: if it cannot be written.
        """
        self._quarantine.admit(self._source.bad)

    def batches(self, position: Position, stop: int, requests: Requests) -> Generator[Batch]:
        """Those of the steps from ``position`` to ``stop``, or empty ones once this rank has none.

        Raises:
            StoppedBefore: where a run of one process is asked to stop while it waits for data.
        """
        config, world, windows = self._config, self._world, position.passed_over
        ranks = world.rank, world.size, world.local_rank, world.local_size
        try:
            ahead = fetch_ahead(self._source, config.batch_size, config.seed, *ranks)
            yield from make_loader(
                Detour(self._batches, windows),
                position.step,
                stop,
                config.workers,
                world.device.type == "cuda",
                self._quarantine,
                None if ahead is None else DetourAhead(ahead, windows),
                Limit(config.data.timeout, self._stacks),
            )
        except StopRequested:
            if world.size == 1:
                raise StoppedBefore(position.step + 1) from None
            requests.lack_batch()
        except UserError as error:
            requests.fail(error)
        else:
            return
        # Results of these steps are never saved: all ranks stop at the next exchange.
        while True:
            yield Batch.empty(*self._shape)
