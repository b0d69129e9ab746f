from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from dmjd.data.shards.sampler import MOST_STREAMS, ShardSampler, shard_sampler
from dmjd.ops.philox import make_key

SIZES = (70, 1, 33, 120, 64, 0, 212)  # 500 samples


def sampler(
    sizes: Sequence[int] = SIZES, batch_size: int = 24, streams: int = 8, shuffle_samples: int = 80
) -> ShardSampler:
    return ShardSampler(np.array(sizes, dtype=np.int64), batch_size, streams, shuffle_samples)


def order(of: ShardSampler, epoch: int = 0, seed: int = 3) -> Tensor:
    return of.order(make_key(seed, epoch), 0, of.batch_size)


def shards_of(ids: Tensor, sizes: Sequence[int] = SIZES) -> npt.NDArray[np.int64]:
    return np.searchsorted(np.cumsum(sizes), ids.numpy(), side="right")


@pytest.mark.parametrize("streams", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("sizes", [SIZES, (500,), (100,) * 5], ids=["unequal", "one", "equal"])
def test_an_epoch_shows_each_sample_at_most_once_and_drops_less_than_a_batch(
    sizes: Sequence[int], streams: int
) -> None:
    of = sampler(sizes, streams=streams)
    assert of.steps_per_epoch == 500 // 24
    ids = order(of)
    assert ids.shape == (20, 24)
    assert len(ids.unique()) == ids.numel() == 480
    assert 0 <= ids.min() <= ids.max() < 500


def test_where_nothing_is_left_over_an_epoch_is_a_permutation() -> None:
    assert order(sampler((96, 50, 94), streams=12)).flatten().sort().values.tolist() == list(range(240))


@pytest.mark.parametrize("sizes", [SIZES, (500,)], ids=["many shards", "one shard"])
def test_every_sample_is_dropped_in_some_epoch_and_none_in_most(sizes: Sequence[int]) -> None:
    of, epochs = sampler(sizes), 400
    shown = torch.stack([torch.bincount(order(of, epoch).flatten(), minlength=500) for epoch in range(epochs)])
    dropped = epochs - shown.sum(0)  # binomial of 400 epochs at 4 %: mean 16, deviation 3.9
    assert dropped.min() >= 1
    assert dropped.max() <= 16 + 6 * 4


def test_epochs_seeds_and_only_they_change_the_order() -> None:
    whole = order(sampler())
    assert torch.equal(whole, order(sampler()))
    for other in (order(sampler(), epoch=1), order(sampler(), seed=4)):
        assert (whole == other).float().mean() < 0.05
        assert set(whole.flatten().tolist()) != set(other.flatten().tolist())


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 24])
def test_ranks_hold_consecutive_columns_of_one_batch_for_any_number_of_them(world: int) -> None:
    of, part = sampler(), 24 // world
    parts = [of.order(make_key(3, 0), rank * part, (rank + 1) * part) for rank in range(world)]
    assert torch.equal(torch.cat(parts, dim=1), order(of))


def test_every_stream_gives_equally_many_samples_to_every_batch_and_reads_shards_in_one_walk() -> None:
    sizes = (50,) * 40
    ids = order(sampler(sizes, batch_size=20, streams=4, shuffle_samples=1 << 20))
    visited = [set(shards_of(ids[:, 5 * stream : 5 * stream + 5], sizes).flatten().tolist()) for stream in range(4)]
    assert all(10 <= len(shards) <= 11 for shards in visited)  # 500 samples lie in 10 whole shards, or touch one more
    assert sum(map(len, visited)) <= 40 + 4  # only those at the cuts are read twice


def test_a_stream_is_shuffled_within_its_window_and_no_further() -> None:
    ids = order(sampler((1000,), batch_size=2, streams=2, shuffle_samples=100))
    for stream in range(2):
        row = ids[:, stream].long()
        block = set(row[:50].tolist())
        start = next(sample for sample in block if (sample - 1) % 1000 not in block)
        steps = (row - start) % 1000
        assert torch.equal(steps // 50, torch.arange(500) // 50)  # blocks of 50, one after another
        assert not torch.equal(steps, steps.sort().values)


def test_shards_are_walked_in_another_order_each_epoch() -> None:
    sizes = (10,) * 50
    walks = set()
    for epoch in range(10):
        shards = shards_of(order(sampler(sizes, batch_size=10, streams=1, shuffle_samples=1), epoch), sizes).flatten()
        walks.add(tuple(dict.fromkeys(shards.tolist())))
    assert len(walks) == 10


@pytest.mark.parametrize(
    ("batch_size", "streams"), [(4096, 256), (1024, 256), (768, 256), (96, 96), (1000, 250), (257, 1)]
)
def test_a_sampler_has_as_many_streams_as_divide_a_batch(batch_size: int, streams: int) -> None:
    assert shard_sampler(np.array([5000]), batch_size).streams == streams <= MOST_STREAMS


def test_ids_beyond_32_bits_stay_whole() -> None:
    # Three shards of 2**31 samples; one batch covers a sliver of a stream, so the order is small.
    of = ShardSampler(np.array([6, 2**31 - 3, 6], dtype=np.int64), 2**31 // 4, 2**31 // 4)
    ids = of.order(make_key(0, 0), 0, 64)
    assert ids.dtype == torch.int64
    assert len(ids.unique()) == ids.numel()
    assert ids.max() < 2**31 + 9
