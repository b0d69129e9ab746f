"""Prefetch the remote shards of a node in the order in which its loaders read them, as far as the cache allows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dmjd.data.shards.cache import GIB, ShardCache
from dmjd.data.shards.index import Shard, ShardSet
from dmjd.data.shards.location import is_remote
from dmjd.data.shards.sampler import ShardSampler
from dmjd.errors import DataError
from dmjd.ops.philox import make_key

_Steps = npt.NDArray[np.int64]

_log = logging.getLogger("dmjd")

_FETCHES = 4  # concurrent downloads


class _Need(NamedTuple):
    """A shard to fetch, and the last step of the epoch that reads it."""

    last: int
    shard: int


class Prefetch:
    """Threads of this process that fill the cache, from :meth:`start` to :meth:`close`.

    Loaders do not depend on it: they fetch a missing shard themselves, and raise the error if that fails.

    Args:
        cache: the cache to fill.
        shards: the set.
        sampler: order of its samples.
        seed: seed of the run.
        columns: (start, stop) of the columns of every batch that this node loads.
    """

    def __init__(
        self, cache: ShardCache, shards: ShardSet, sampler: ShardSampler, seed: int, columns: tuple[int, int]
    ) -> None:
        self._cache, self._shards, self._sampler = cache, shards, sampler
        self._seed, self._columns = seed, columns
        self._change = threading.Condition()
        self._step = self._stop = 0
        self._closed = False
        self._live: tuple[Shard, ...] = ()  # fetched or being fetched, and not yet read to the end
        self._slots = threading.Semaphore(_FETCHES)

    def start(self, step: int, stop: int) -> None:
        """Prefetch for steps ``step .. stop - 1``. Call it after forking workers: threads do not survive a fork."""
        self._step, self._stop = step, stop
        threading.Thread(target=self._schedule, name="shards-prefetch", daemon=True).start()

    def reach(self, step: int) -> None:
        """Steps before ``step`` are done; shards that only they read may be evicted."""
        with self._change:
            self._step = step
            self._change.notify_all()

    def close(self) -> None:
        """Start no more downloads."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    def _wait_until(self, true: Callable[[], bool]) -> None:
        with self._change:
            self._change.wait_for(lambda: self._closed or true())

    def _schedule(self) -> None:
        shards, live = self._shards.manifest.shards, dict[int, int]()  # last steps

        def has_room(need: _Need) -> bool:
            for number in [number for number, last in live.items() if last < self._step]:
                del live[number]
            taken = sum(shards[number].bytes for number in live if number != need.shard)
            return not taken or taken + shards[need.shard].bytes <= self._cache.budget

        for need in self._needs():
            self._wait_until(partial(has_room, need))
            self._slots.acquire()
            if self._closed:
                return
            live[need.shard] = need.last
            self._live = tuple(shards[number] for number in live)
            threading.Thread(target=self._fetch, args=(need.shard,), name="shards-fetch", daemon=True).start()

    def _fetch(self, number: int) -> None:
        shard = self._shards.manifest.shards[number]
        try:
            self._cache.fetch(self._shards.location(number), shard, lambda: self._live)
        except DataError as error:
            _log.warning("prefetching of shards stopped: %s", error)
            self.close()
        finally:
            self._slots.release()

    def _needs(self) -> Iterator[_Need]:
        """Shards in the order of their first use, epoch by epoch, at most one epoch ahead."""
        steps, begun = self._sampler.steps_per_epoch, self._step // self._sampler.steps_per_epoch
        for epoch in range(begun, -(-self._stop // steps)):
            begin = epoch * steps
            self._wait_until(lambda begin=begin: self._step >= begin - steps)  # type: ignore[misc]
            if self._closed:
                return
            first, last = self._spans(epoch)
            if epoch == begun:
                self._warn_of_budget(first, last)
            for shard in np.argsort(first, kind="stable").tolist():
                wanted = last[shard] >= 0 and begin + last[shard] >= self._step and begin + first[shard] < self._stop
                if wanted and is_remote(self._shards.location(shard)):
                    yield _Need(begin + int(last[shard]), shard)

    def _spans(self, epoch: int) -> tuple[_Steps, _Steps]:
        """First and last step of an epoch that read each shard; ``steps_per_epoch`` and -1 if none does."""
        steps, shards = self._sampler.steps_per_epoch, len(self._sampler.sizes)
        order = self._sampler.order(make_key(self._seed, epoch), *self._columns).numpy()
        numbers = np.searchsorted(np.cumsum(self._sampler.sizes), order, side="right")  # of the shards
        first, last, rows = np.full(shards, steps), np.full(shards, -1), np.arange(steps)[:, None]
        np.minimum.at(first, numbers, rows)
        np.maximum.at(last, numbers, rows)
        return first, last

    def _warn_of_budget(self, first: _Steps, last: _Steps) -> None:
        read = [shard for shard in np.flatnonzero(last >= 0).tolist() if is_remote(self._shards.location(shard))]
        sizes = np.array([self._shards.manifest.shards[shard].bytes for shard in read], dtype=np.int64)
        change = np.zeros(self._sampler.steps_per_epoch + 1, dtype=np.int64)
        np.add.at(change, first[read], sizes)
        np.add.at(change, last[read] + 1, -sizes)
        most = int(change.cumsum().max())
        if most > self._cache.budget:
            _log.warning(
                "data.cache_gib=%.3g is less than the %.3g GiB of shards that this node reads at a time; some will be "
                "fetched more than once an epoch",
                self._cache.budget / GIB,
                most / GIB,
            )
