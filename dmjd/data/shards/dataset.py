"""The map-style data set of a shard set."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dmjd.data.dataset import OpenImage, Pixels
from dmjd.data.decode import open_image, too_small
from dmjd.data.quarantine import check_share
from dmjd.data.shards.cache import ShardCache
from dmjd.data.shards.index import ShardSet
from dmjd.data.shards.local import OpenFiles
from dmjd.data.shards.location import is_remote
from dmjd.data.shards.sample import fault_of, read_errors
from dmjd.errors import BadImage


class ShardDataset:
    """The samples of a shard set in index order, read by offset and verified by crc32.

    Workers share the pages of the index, and no memory of a worker grows with the number of samples.

    Args:
        shards: the set.
        cache: for remote shards; None if the set has none.
        min_size: least (height, width) of an image, that of the crop.
        max_bad_percent: percentage of images that may be smaller; they are kept, listed in :attr:`bad`, and raise when
            read.

    Raises:
        DataError: if more are smaller.
    """

    def __init__(
        self,
        shards: ShardSet,
        cache: ShardCache | None,
        min_size: tuple[int, int] = (1, 1),
        max_bad_percent: float = 0.0,
    ) -> None:
        manifest = shards.manifest
        # Indexing a memmap takes microseconds longer than indexing an array.
        shards = shards._replace(records=shards.records.view(np.ndarray))
        self.shards = shards
        self.channels = manifest.channels
        self.classes = manifest.classes
        self.num_classes = len(manifest.classes)
        self.fingerprint = manifest.fingerprint
        self._records = shards.records
        self.cache = cache
        self._compared = set[int]()  # cached shards whose checksum was verified again after a bad sample
        self._files = OpenFiles()
        self._min_size = min_size
        self.bad: Mapping[int, BadImage] = self._check(max_bad_percent)
        self.skipped: Mapping[str, int] = {}  # the build lists them in rejects.jsonl

    def __len__(self) -> int:
        return len(self._records)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of samples of every shard, int64 ``[shards]``."""
        return np.array([shard.samples for shard in self.shards.manifest.shards], dtype=np.int64)

    def open(self, index: int) -> OpenImage:
        """See :class:`dmjd.data.dataset.ImageDataset`.

        Raises:
            BadImage: of kind missing, unreadable, truncated (its tar ends before it), empty (no or only zero bytes),
                magic (not an image), crc (other bytes), undecodable, or too small.
            DataError: if its shard cannot be fetched.
        """
        return open_image(self.read(index), self.name(index), self.channels, self._min_size)

    def read(self, index: int) -> bytes:
        """The file of one image, verified by crc32; raises as :meth:`open` does before it decodes."""
        number, offset, size, _, crc, _, _ = self._records[range(len(self))[index]].item()
        data = self._bytes(index, number, offset, size)
        fault = fault_of(data, size, crc)
        if fault is not None and self.cache is not None and number not in self._compared:
            # The copy in the cache may be damaged while the set is intact.
            self._compared.add(number)
            self.cache.recheck(self.shards.manifest.shards[number])
            data = self._bytes(index, number, offset, size)
            fault = fault_of(data, size, crc)
        if fault is not None:
            raise BadImage(self.name(index), *fault)
        return data

    def _bytes(self, index: int, number: int, offset: int, size: int) -> bytes:
        location = self.shards.location(number)
        with read_errors(self.name(index)):
            if is_remote(location):
                assert self.cache is not None, "a set with remote shards has a cache"
                return self.cache.read(location, self.shards.manifest.shards[number], offset, size)
            return self._files.read(location, offset, size)

    def image(self, index: int) -> Pixels:
        opened = self.open(index)
        return opened.region((0, 0, *opened.size))

    def label(self, index: int) -> int:
        return int(self._records["label"][index])

    def name(self, index: int) -> str:
        return self.shards.name(index)

    def _check(self, max_bad_percent: float) -> dict[int, BadImage]:
        heights, widths = self._records["height"], self._records["width"]
        small = np.flatnonzero((heights < self._min_size[0]) | (widths < self._min_size[1])).tolist()
        bad = {i: too_small(self.name(i), (heights[i], widths[i]), self._min_size) for i in small}
        check_share(list(bad.values()), len(self), max_bad_percent)
        return bad
