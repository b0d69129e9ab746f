"""A stream of tars and its batches: by step number, but not the same after a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dmjd.data.batch import Batch
from dmjd.data.crops import RandomResizedCrop
from dmjd.data.decode import open_image
from dmjd.data.shards.location import is_remote
from dmjd.data.shards.network import Patience
from dmjd.data.stream.tars import PIPE, TarImage, tar_images
from dmjd.data.substitution import Substitution
from dmjd.errors import BadImage, DataError
from dmjd.ops.philox import make_key

MOST_SKIPPED = 1000
"""Bad images that one batch may skip; without a limit a stream of bad images would be read for ever."""

STREAM_PATIENCE = Patience(attempts=4)
"""Some seconds; a tar that cannot be read is skipped until the next pass."""

_NEXT = "the next of the stream"

_log = logging.getLogger("dmjd")


@dataclass(frozen=True)
class TarStream:
    """An endless stream of the images of a set of tars, divided among the processes that read it.

    Args:
        locations: as for :func:`dmjd.data.stream.tars.tar_images`.
        samples: images per epoch, as configured; tars have no index to count them.
        channels: 1 or 3, to which pixels are converted.
        shuffle_buffer: size of every reader's shuffle buffer, in images.
        patience: retries of a tar that cannot be read.
    """

    locations: Sequence[str]
    samples: int
    channels: int
    shuffle_buffer: int
    patience: Patience = STREAM_PATIENCE
    bad: Mapping[int, BadImage] = field(default_factory=dict)  # nothing is checked at the start
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.samples

    def assign(self, seed: int, begin: tuple[int, int], number: int, reader: int, readers: int) -> list[str]:
        """The tars of one reader in pass ``number``, in order; other arguments as for :meth:`images`."""
        return Random(f"{seed} {begin} {number}").sample(self.locations, len(self.locations))[reader::readers]

    def images(
        self, seed: int, begin: tuple[int, int], reader: int, readers: int, report: Callable[[BadImage], None]
    ) -> Iterator[TarImage]:
        """The images of reader ``reader`` of ``readers``, without end.

        Every pass assigns each tar to one reader, at random. Readers are not synchronised: one with smaller tars begins
        its next pass earlier.

        Args:
            seed: seed of the run.
            begin: the first step, and the number of starts in this launch, so that a run that restarts or rolls back
                often does not always see the same tars first.
            reader, readers: number of this reader and of all readers; at most as many as tars.
            report: called with every tar that cannot be read to its end.

        Raises:
            DataError: if a whole pass over the reader's tars gave no image.
        """
        for number in count():
            tars = self.assign(seed, begin, number, reader, readers)
            found, last = False, "it has no images"
            for location in tars:
                try:
                    for image in self._with_retries(location):
                        found = True
                        yield image
                except BadImage as bad:
                    last = str(bad)
                    report(bad)
            if not found:
                raise DataError(f"no image can be read from any of {len(tars)} tar(s); the last: {last}")

    def _with_retries(self, location: str) -> Iterator[TarImage]:
        """The images of a tar; after an error it is read again and continues with the next image."""
        attempts = self.patience.attempts if location.startswith(PIPE) or is_remote(location) else 1
        done = 0
        for attempt in range(1, attempts + 1):
            try:
                for image in islice(tar_images(location, self.patience.stall), done, None):
                    yield image
                    done += 1
                return
            except BadImage as error:
                bad = error
            if attempt < attempts:
                time.sleep(self.patience.pause(attempt))
        raise BadImage(bad.name, bad.kind, bad.fault, max(self.samples // len(self.locations), 1))


class StreamBatches:
    """``load(step)``: the batch of a step, made of the next images of this process's part of the stream.

    Every process reads its own tars and has the same number of steps. The sample id is the position of an image in the
    run, ``step * batch_size + row``; it keys crops, flips and masks, so an image that is read again gets other ones. An
    image that cannot be used is skipped, and the next one takes its row.

    Args:
        stream: the images; at least one tar per process.
        batch_size, crop, seed, rank, world: as for :class:`dmjd.data.loader.StepBatches`.
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
        self.steps_per_epoch = len(stream) // batch_size
        self._most_workers = len(stream.locations) // world
        self._stream = stream
        self._batch_size, self._crop, self._seed = batch_size, crop, seed
        self._rank, self._world = rank, world
        self._start = self._begun = 0
        self._images: Iterator[TarImage] | None = None  # of this process, opened with its first batch
        self._bad_tars: list[BadImage] = []

    def begin(self, step: int, workers: int) -> int:
        """See :class:`dmjd.data.loader.TrainingBatches`; every worker needs a tar of its own.

        A run that is rolled back begins again, perhaps at the same step, with other images each time.
        """
        self._start, self._images = step, None
        self._begun += 1
        if workers > self._most_workers and self._rank == 0:
            _log.warning(
                "%d tars for %d process(es) are enough for %d worker(s) each, not workers=%d; use more, smaller tars",
                len(self._stream.locations),
                self._world,
                self._most_workers,
                workers,
            )
        return min(workers, self._most_workers)

    def load(self, step: int) -> tuple[Batch, Sequence[Substitution]]:
        """A batch, and the bad images and tars that were skipped for it.

        Raises:
            DataError: if no image can be read any more, or none can be used.
        """
        if self._images is None:
            self._images = self._open()
        part = self._batch_size // self._world
        sample_ids = torch.arange(part) + step * self._batch_size + self._rank * part
        key = make_key(self._seed, step // self.steps_per_epoch)
        draws = self._crop.draw(sample_ids, key)
        views, skipped = list[tuple[Tensor, ...]](), list[Substitution]()
        for image in self._images:
            try:
                opened = open_image(image.data, image.name, self._stream.channels)
                views.append(draws.cut(len(views), opened))
            except BadImage as bad:
                skipped.append(Substitution(int(sample_ids[len(views)]), bad.copy(), _NEXT))
                if len(skipped) > MOST_SKIPPED:
                    raise DataError(f"{len(skipped)} images of one batch cannot be used, the last: {bad}") from bad
            if len(views) == part:
                break
        skipped += [Substitution(int(sample_ids[-1]), bad, _NEXT) for bad in self._bad_tars]
        self._bad_tars.clear()
        return Batch.of(views, sample_ids, [-1] * part), skipped

    def _open(self) -> Iterator[TarImage]:
        from webdataset.filters import shuffle

        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        reader, readers = self._rank * workers + number, self._world * workers
        begin = self._start, self._begun
        images = self._stream.images(self._seed, begin, reader, readers, self._bad_tars.append)
        held = self._stream.shuffle_buffer
        return iter(shuffle(held, held, Random(f"{self._seed} {begin} reader {reader}"))(images))
