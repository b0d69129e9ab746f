"""A set of tars as an endless stream of images, divided among the processes that read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random

from dmjd.data.shards.location import is_remote
from dmjd.data.shards.network import Patience
from dmjd.data.stream.tars import PIPE, TarImage, tar_images
from dmjd.errors import BadImage, DataError

STREAM_PATIENCE = Patience(attempts=4)
"""Some seconds: a tar that stays away is passed over, and comes again with the next pass."""


@dataclass(frozen=True)
class TarStream:
    """What a run knows of images that it cannot index.

    Args:
        locations: as for :func:`dmjd.data.stream.tars.tar_images`.
        samples: how many images count as an epoch; nobody can look.
        channels: 1 or 3, to which pixels are converted.
        shuffle_buffer: images that every reader keeps at hand, to draw the next from.
        patience: with a tar that cannot be read.
    """

    locations: Sequence[str]
    samples: int
    channels: int
    shuffle_buffer: int
    patience: Patience = STREAM_PATIENCE
    bad: Mapping[int, BadImage] = field(default_factory=dict)  # a check at the start would have to read everything

    def __len__(self) -> int:
        return self.samples

    def deal(self, seed: int, begin: tuple[int, int], number: int, reader: int, readers: int) -> list[str]:
        """The tars of one reader in pass ``number``, in order; arguments as for :meth:`images`."""
        return Random(f"{seed} {begin} {number}").sample(self.locations, len(self.locations))[reader::readers]

    def images(
        self, seed: int, begin: tuple[int, int], reader: int, readers: int, report: Callable[[BadImage], None]
    ) -> Iterator[TarImage]:
        """The images of reader ``reader`` of ``readers``, for ever.

        A pass deals the tars anew, so that every tar has one reader in it and no reader the same tars for ever. Readers
        do not wait for each other: one with smaller tars is in its next pass while another is still in this.

        Args:
            seed: of the run.
            begin: the step at which reading begins, and how often it has begun in this launch, so that a run that is
                restarted or rolled back often does not always see the same tars first.
            reader, readers: at most as many readers as there are tars.
            report: is told of tars that cannot be read to their end.

        Raises:
            DataError: if a pass over the reader's tars has brought no image.
        """
        assert 0 <= reader < readers <= len(self.locations)
        for number in count():
            tars = self.deal(seed, begin, number, reader, readers)
            came, last = False, "it holds none"
            for location in tars:
                try:
                    for image in self._patiently(location):
                        came = True
                        yield image
                except BadImage as bad:
                    last = str(bad)
                    report(bad)
            if not came:
                raise DataError(f"no image came from any of {len(tars)} tar(s), of the last for this reason: {last}")

    def _patiently(self, location: str) -> Iterator[TarImage]:
        """The images of a tar, which is read again from where it broke off."""
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
