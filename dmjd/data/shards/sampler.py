"""The sample order of a shard set: a pure function of (shard sizes, seed, epoch, batch size).

An epoch permutes the shards, rotates their concatenation to a random start, and splits it into ``streams`` streams of
equal length, which may begin or end inside a shard. Each stream is shuffled within blocks, and every batch takes the
same number of samples from each stream. A sample is thus drawn among about a million others, while a process that loads
a contiguous part of every batch reads a few shards at a time. The order depends neither on the number of processes nor
on the number of workers.

Cost per epoch and loading process: 0.15 s and 5 MB for 1.28 M samples, 1 s and 57 MB for 14 M, divided by the number of
ranks. Within an epoch, any step is a look-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dmjd.ops.philox import Domain, keyed_bits

MOST_STREAMS = 256
SHUFFLE_SAMPLES = 1 << 20
"""Size of the shuffle, in samples over all streams."""

# Lanes of Domain.ORDER. Samples use lane 0, as in loader.epoch_order.
_SAMPLES, _SHARDS, _START = 0, 1, 2


@dataclass(frozen=True)
class ShardSampler:
    """See :class:`dmjd.data.loader.Sampler`.

    Args:
        sizes: int64 ``[shards]``, samples of each shard in index order.
        batch_size: samples of a step over all processes.
        streams: number of streams; divides ``batch_size``.
        shuffle_samples: see :data:`SHUFFLE_SAMPLES`.
    """

    sizes: npt.NDArray[np.int64]
    batch_size: int
    streams: int
    shuffle_samples: int = SHUFFLE_SAMPLES

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches, equal on all ranks."""
        return int(self.sizes.sum()) // self.batch_size

    def order(self, key: Tensor, start: int, stop: int) -> Tensor:
        """Sample ids of columns ``start .. stop - 1`` of every batch of an epoch.

        Args:
            key: from :func:`dmjd.ops.philox.make_key`, of seed and epoch.
            start, stop: column range.

        Returns:
            ``[steps_per_epoch, stop - start]``, int32, or int64 from 2**31 samples on; equal to those columns of
            ``order(key, 0, batch_size)``.
        """
        assert 0 <= start < stop <= self.batch_size
        total, steps, share = int(self.sizes.sum()), self.steps_per_epoch, self.batch_size // self.streams
        ring = _Ring(self.sizes, key)
        length = total // self.streams
        block = max(self.shuffle_samples // self.streams, 1)
        order = torch.empty(steps, stop - start, dtype=torch.int32 if total < 1 << 31 else torch.int64)
        for stream in range(start // share, -(-stop // share)):
            ids = ring.samples(stream * length, length)
            bits = keyed_bits(ids, 1, key=key, domain=Domain.ORDER, lane=_SAMPLES).flatten()
            blocks = torch.arange(length) // block
            shuffled = ids[(blocks << 32 | bits).argsort(stable=True)][: steps * share].view(steps, share)
            first = stream * share
            low, high = max(start, first), min(stop, first + share)
            order[:, low - start : high - start] = shuffled[:, low - first : high - first]
        return order


def shard_sampler(sizes: npt.NDArray[np.int64], batch_size: int) -> ShardSampler:
    """A sampler with the largest number of streams, up to :data:`MOST_STREAMS`, that divides ``batch_size``."""
    streams = max(count for count in range(1, MOST_STREAMS + 1) if batch_size % count == 0)
    return ShardSampler(sizes, batch_size, streams)


class _Ring:
    """The samples of an epoch shard by shard, before shuffling, as a ring with a random start.

    Streams of equal length leave a remainder; with a random start every sample is equally likely to be part of it.
    """

    def __init__(self, sizes: npt.NDArray[np.int64], key: Tensor) -> None:
        numbers = torch.arange(len(sizes))
        shards = keyed_bits(numbers, 1, key=key, domain=Domain.ORDER, lane=_SHARDS).flatten().argsort(stable=True)
        self._firsts = torch.from_numpy(np.cumsum(sizes) - sizes)[shards]  # sample ids
        self._ends = torch.from_numpy(sizes)[shards].cumsum(0)  # positions in the ring
        self._total = int(self._ends[-1])
        # 64 bits, since a set may have more than 2**32 samples.
        high, low = keyed_bits(numbers[:1], 2, key=key, domain=Domain.ORDER, lane=_START)[0].tolist()
        self._start = (high << 32 | low) % self._total

    def samples(self, position: int, count: int) -> Tensor:
        """int64 ``[count]``: sample ids from ``position`` of the ring on."""
        positions = (torch.arange(position, position + count) + self._start) % self._total
        shard = torch.searchsorted(self._ends, positions, right=True)
        begins = torch.cat((self._ends.new_zeros(1), self._ends))
        return self._firsts[shard] + positions - begins[shard]
