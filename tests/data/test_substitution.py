from __future__ import annotations

import pickle
from collections.abc import Collection

import numpy as np
import pytest
import torch

from dmjd.data.dataset import ArrayDataset, OpenImage, Pixels
from dmjd.data.substitution import Sample
from dmjd.data.substitution import read_sample as read_view
from dmjd.errors import BadImage, DataError
from dmjd.ops.philox import Domain, keyed_bits, make_key


class Numbers(ArrayDataset):
    """Image ``i`` is the one pixel ``i``, of class ``i``, unless it is ``broken``; ``asked`` is what was read."""

    def __init__(self, count: int, broken: Collection[int]) -> None:
        values = np.arange(count, dtype=np.uint8)
        super().__init__(values.reshape(-1, 1, 1, 1), values.astype(np.int64), num_classes=count, source="numbers")
        self.broken = broken
        self.asked: list[int] = []

    def image(self, index: int) -> Pixels:
        self.asked.append(index)
        if index in self.broken:
            raise BadImage(self.name(index), "truncated", "cannot be read as an image (cut)")
        return super().image(index)


def read_sample(dataset: Numbers, index: int, seed: int) -> Sample[torch.Tensor]:
    def pixel(image: OpenImage) -> torch.Tensor:
        return torch.from_numpy(image.region((0, 0, 1, 1)))

    return read_view(dataset, index, seed, pixel)


def candidates(index: int, count: int, seed: int) -> list[int]:
    """The documented rule: lane by lane, a uniform word picks among the images other than the bad one."""
    others = [number for number in range(count) if number != index]
    ids, key = torch.tensor([index]), make_key(seed, 0)
    words = [keyed_bits(ids, 1, key=key, domain=Domain.SUBSTITUTE, lane=lane).item() for lane in range(8)]
    return [others[int(word) * len(others) // 2**32] for word in words]


@pytest.mark.parametrize("index", [0, 57, 99])
def test_a_sound_image_is_itself_and_nothing_else_is_read(index: int) -> None:
    dataset = Numbers(100, broken=())
    sample = read_sample(dataset, index, seed=4)
    assert (sample.view.item(), sample.label, sample.substitution) == (index, index, None)
    assert dataset.asked == [index]


@pytest.mark.parametrize("index", [0, 57, 99])
def test_a_bad_image_gives_its_place_to_the_first_candidate_of_its_own_stream(index: int) -> None:
    dataset = Numbers(100, broken=[index])
    sample = read_sample(dataset, index, seed=4)
    expected = candidates(index, 100, seed=4)[0]
    assert sample.view.item() == sample.label == expected
    assert sample.substitution is not None
    assert (sample.substitution.sample_id, sample.substitution.substitute) == (index, f"numbers[{expected}]")
    assert (sample.substitution.bad.name, sample.substitution.bad.kind) == (f"numbers[{index}]", "truncated")


def test_bad_candidates_are_passed_over_in_their_order() -> None:
    order = candidates(57, 100, seed=4)
    assert len(set(order)) == 8
    for bad in range(1, 8):
        dataset = Numbers(100, broken=[57, *order[:bad]])
        assert read_sample(dataset, 57, seed=4).label == order[bad]
        assert dataset.asked == [57, *order[: bad + 1]]


def test_after_eight_bad_candidates_the_search_ends() -> None:
    order = candidates(57, 100, seed=4)
    dataset = Numbers(100, broken=[57, *order])
    with pytest.raises(DataError, match=r"^numbers\[57\] cannot be read as an image \(cut\); .* no substitute"):
        read_sample(dataset, 57, seed=4)
    assert dataset.asked == [57, *order]


@pytest.mark.parametrize("count", [1, 2])
def test_the_smallest_data_sets(count: int) -> None:
    with pytest.raises(DataError, match="no substitute can be used either"):
        read_sample(Numbers(count, broken=range(count)), 0, seed=0)
    if count == 2:
        assert [read_sample(Numbers(2, broken=[bad]), bad, seed=0).label for bad in (0, 1)] == [1, 0]


def test_substitutes_are_spread_over_the_whole_data_set_and_depend_on_the_seed() -> None:
    counts = np.zeros(100, dtype=int)
    same = 0
    for index in range(100):
        first, second = (read_sample(Numbers(100, broken=[index]), index, seed).label for seed in (0, 1))
        counts[first] += 1
        same += first == second
    assert same < 8  # Poisson of mean 1: beyond 1e-5
    assert counts.max() <= 7  # likewise; one substitute for all would be 99
    assert counts[:50].sum() in range(25, 76)  # binomial of mean 50 and deviation 5


def test_a_bad_image_survives_the_way_out_of_a_worker() -> None:
    bad = BadImage("a.png", "missing", "cannot be read as an image (gone)")
    for twin in (pickle.loads(pickle.dumps(bad)), bad.copy()):
        assert type(twin) is BadImage
        assert (twin.name, twin.kind, twin.fault, str(twin)) == (bad.name, bad.kind, bad.fault, str(bad))
