"""Batches of a stream, by step number as a loader wants them, though not the same after a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from random import Random

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dmjd.data.batch import Batch
from dmjd.data.crops import RandomResizedCrop
from dmjd.data.decode import open_image
from dmjd.data.stream.source import TarStream
from dmjd.data.stream.tars import TarImage
from dmjd.data.substitution import Substitution
from dmjd.errors import BadImage, ConfigError, DataError
from dmjd.ops.philox import make_key

MOST_PASSED_OVER = 1000
"""Images that may be passed over for one batch. A stream in which none can be used would otherwise be read for ever."""

_NEXT = "the next of the stream"

_log = logging.getLogger("dmjd")


class StreamBatches:
    """``load(step)``: the batch of a step, from whatever comes next in the stream of the process that asks.

    Every process of a run reads tars of its own and counts steps as all others do, so none has fewer. A sample id is
    the place of an image in the run, ``step * batch_size + row``; crops, flips and masks are drawn from it as ever,
    and an image that comes again has another. An image that cannot be used leaves its place to the next.

    Args:
        stream: where images come from.
        batch_size, crop, seed, rank, world: as for :class:`dmjd.data.loader.StepBatches`.

    Raises:
        ConfigError: if ``world`` does not divide a batch, an epoch is less than one, or there are fewer tars than
            processes.
    """

    def __init__(
        self,
        stream: TarStream,
        batch_size: int,
        crop: RandomResizedCrop,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        tars = len(stream.locations)
        if not 1 <= batch_size <= len(stream):
            raise ConfigError(f"batch_size={batch_size} must be between 1 and data.samples={len(stream)}")
        if batch_size % world:
            raise ConfigError(f"batch_size={batch_size} must be a multiple of the {world} processes that share a batch")
        if tars < world:
            raise ConfigError(f"{world} processes cannot share the {tars} tar(s) of data.root; give each at least one")
        self.steps_per_epoch = len(stream) // batch_size
        self._most_workers = tars // world
        self._stream = stream
        self._batch_size, self._crop, self._seed = batch_size, crop, seed
        self._rank, self._world = rank, world
        self._start = self._begun = 0
        self._images: Iterator[TarImage] | None = None  # of this process, from its first batch on
        self._bad_tars: list[BadImage] = []

    def begin(self, step: int, workers: int) -> int:
        """This launch will load steps from ``step`` on; returns how many of ``workers`` have tars of their own.

        A run that is rolled back begins again, and maybe at the same step: each time with other images.
        """
        self._start, self._images = step, None
        self._begun += 1
        if workers > self._most_workers and self._rank == 0:
            _log.warning(
                "%d tars for %d process(es) keep %d worker(s) of each busy, not workers=%d; make more, smaller tars",
                len(self._stream.locations),
                self._world,
                self._most_workers,
                workers,
            )
        return min(workers, self._most_workers)

    def load(self, step: int) -> tuple[Batch, Sequence[Substitution]]:
        """A batch, and what could not be used on the way to it.

        Raises:
            DataError: if nothing comes any more, or nothing that can be used.
        """
        if self._images is None:
            self._images = self._open()
        part = self._batch_size // self._world
        sample_ids = torch.arange(part) + step * self._batch_size + self._rank * part
        key = make_key(self._seed, step // self.steps_per_epoch)
        draws = self._crop.draw(sample_ids, key)
        views, passed_over = list[tuple[Tensor, ...]](), list[Substitution]()
        for image in self._images:
            try:
                opened = open_image(image.data, image.name, self._stream.channels)
                views.append(draws.cut(len(views), opened))
            except BadImage as bad:
                passed_over.append(Substitution(int(sample_ids[len(views)]), bad.copy(), _NEXT))
                if len(passed_over) > MOST_PASSED_OVER:
                    raise DataError(f"{len(passed_over)} images of one batch cannot be used, the last: {bad}") from bad
            if len(views) == part:
                break
        passed_over += [Substitution(int(sample_ids[-1]), bad, _NEXT) for bad in self._bad_tars]
        self._bad_tars.clear()
        return Batch.of(views, sample_ids, [-1] * part), passed_over

    def _open(self) -> Iterator[TarImage]:
        from webdataset.filters import shuffle

        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        reader, readers = self._rank * workers + number, self._world * workers
        begin = self._start, self._begun
        images = self._stream.images(self._seed, begin, reader, readers, self._bad_tars.append)
        held = self._stream.shuffle_buffer
        return iter(shuffle(held, held, Random(f"{self._seed} {begin} reader {reader}"))(images))
