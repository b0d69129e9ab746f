from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from dmjd.data.batch import Batch
from dmjd.data.crops import crop_and_resize, draw_crops, evaluation_view
from dmjd.data.dataset import Pixels
from dmjd.data.loader import BatchLoader, EvaluationBatches, StepBatches, epoch_order, evaluation_loader, make_loader
from dmjd.errors import ConfigError, DataError
from dmjd.ops.philox import make_key

# On a machine with one core torch warns that two workers are many; they are what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE = (8, 6)


class Noise:
    """Images of various sizes, each a function of its index; ``broken`` cannot be read."""

    num_classes = 5
    channels = 3

    def __init__(self, count: int, broken: int = -1) -> None:
        self.count = count
        self.broken = broken

    def __len__(self) -> int:
        return self.count

    def image(self, index: int) -> Pixels:
        if index == self.broken:
            raise DataError(f"{self.name(index)} cannot be read as an image (truncated); remove or replace it")
        rng = np.random.default_rng(index)
        height, width = rng.integers(6, 20, 2)
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)

    def label(self, index: int) -> int:
        return index % self.num_classes

    def name(self, index: int) -> str:
        return f"noise/{index}.png"


def assert_same(ours: Iterable[Batch], theirs: Iterable[Batch]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_order_of_an_epoch_is_a_permutation_and_epochs_differ() -> None:
    first, second = (epoch_order(1000, make_key(5, epoch)) for epoch in (0, 1))
    assert first.sort().values.tolist() == list(range(1000))
    assert second.sort().values.tolist() == list(range(1000))
    assert (first == second).sum() < 10  # a random permutation has one fixed point on average
    assert (first == torch.arange(1000)).sum() < 10


def test_every_epoch_shows_each_image_at_most_once_and_drops_less_than_a_batch() -> None:
    batches = StepBatches(Noise(23), batch_size=5, size=SIZE, seed=1)
    assert batches.steps_per_epoch == 4
    epochs = [torch.cat([batches[4 * epoch + step].sample_ids for step in range(4)]).tolist() for epoch in range(3)]
    for ids in epochs:
        assert len(set(ids)) == 20
        assert set(ids) <= set(range(23))
    assert len({tuple(ids) for ids in epochs}) == 3
    assert len({frozenset(range(23)) - frozenset(ids) for ids in epochs}) > 1  # what is dropped changes


def test_a_batch_is_the_keyed_crops_of_its_images() -> None:
    dataset = Noise(30)
    batches = StepBatches(dataset, batch_size=7, size=SIZE, seed=9, scale=(0.5, 0.9), ratio=(0.8, 1.25))
    batch = batches[6]  # epoch 1, third batch
    ids = epoch_order(30, make_key(9, 1))[14:21]
    assert torch.equal(batch.sample_ids, ids)
    assert batch.labels.tolist() == [index % 5 for index in ids.tolist()]
    assert (batch.images.dtype, batch.images.shape) == (torch.uint8, (7, *SIZE, 3))
    assert batch.images.is_contiguous()
    for row, index in enumerate(ids.tolist()):
        image = dataset.image(index)
        size = torch.tensor([image.shape[0]]), torch.tensor([image.shape[1]])
        box = draw_crops(*size, ids[row : row + 1], make_key(9, 1), (0.5, 0.9), (0.8, 1.25))[0].tolist()
        assert torch.equal(batch.images[row], crop_and_resize(image, tuple(box), SIZE))


def test_the_samples_of_an_epoch_do_not_depend_on_the_batch_size() -> None:
    large, small = (StepBatches(Noise(24), batch_size=size, size=SIZE, seed=2) for size in (8, 4))
    for epoch in range(2):
        ours = [small[6 * epoch + step] for step in range(6)]
        theirs = [large[3 * epoch + step] for step in range(3)]
        for a, b in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
            assert torch.equal(torch.cat(a), torch.cat(b))


def test_without_augmentation_a_batch_holds_evaluation_views() -> None:
    batch = StepBatches(Noise(10), batch_size=4, size=SIZE, seed=0, augment=False)[3]
    for index, image in zip(batch.sample_ids.tolist(), batch.images, strict=True):
        assert torch.equal(image, evaluation_view(Noise(10).image(index), SIZE))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_from_step_s_is_the_tail_of_one_from_0(workers: int) -> None:
    batches = StepBatches(Noise(23), batch_size=5, size=SIZE, seed=1)
    whole = [batches[step] for step in range(11)]  # two epochs and a part of the third
    assert_same(make_loader(batches, 0, 11, workers, pin_memory=False), whole)
    fresh = StepBatches(Noise(23), batch_size=5, size=SIZE, seed=1)
    tail = make_loader(fresh, 6, 11, workers, pin_memory=False)
    assert len(tail) == 5
    assert_same(tail, whole[6:])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_random_stream_alone(workers: int) -> None:
    before = torch.get_rng_state()
    list(make_loader(StepBatches(Noise(8), 4, SIZE, seed=0), 0, 3, workers, pin_memory=False))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_one_sentence_after_the_good_batches(workers: int) -> None:
    batches = StepBatches(Noise(20), batch_size=4, size=SIZE, seed=3)
    broken = int(batches[2].sample_ids[1])
    loader = iter(make_loader(StepBatches(Noise(20, broken), 4, SIZE, seed=3), 0, 5, workers, pin_memory=False))
    assert_same([next(loader), next(loader)], [batches[0], batches[1]])
    with pytest.raises(DataError) as caught:
        next(loader)
    assert str(caught.value) == f"noise/{broken}.png cannot be read as an image (truncated); remove or replace it"


class Slow:
    """Two batches, of which the second tells the worker's process id only after a while."""

    def __getitem__(self, number: int) -> Batch:
        if number:
            time.sleep(0.5)
        return Batch(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), torch.tensor([os.getpid()]), torch.zeros(1))


def test_a_worker_outlives_the_signals_that_reach_a_whole_job() -> None:
    loader = iter(BatchLoader(Slow(), 0, 2, workers=1, pin_memory=False))
    worker = int(next(loader).sample_ids)
    assert worker != os.getpid()
    for number in (signal.SIGUSR1, signal.SIGINT):
        os.kill(worker, number)
    assert int(next(loader).sample_ids) == worker


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 21}, "batch_size=21 must be between 1 and the 20 images of the data set"),
        ({"batch_size": 0}, "batch_size=0 must be between 1 and the 20 images"),
        ({"scale": (0.0, 1.0)}, "the crop scale must be 0 < least <= greatest <= 1, got 0.0 and 1.0"),
        ({"scale": (0.5, 0.4)}, "the crop scale must be"),
        ({"ratio": (2.0, 1.0)}, "the crop ratio must be 0 < least <= greatest, got 2.0 and 1.0"),
    ],
)
def test_impossible_choices_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StepBatches(Noise(20), **({"batch_size": 4, "size": SIZE, "seed": 0} | options))  # type: ignore[arg-type]
    assert sentence in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_shows_every_image_once_in_order(workers: int) -> None:
    dataset = Noise(11)
    loader = evaluation_loader(dataset, batch_size=4, size=SIZE, workers=workers, crop_pct=0.9)
    assert len(loader) == 3
    for _ in range(2):  # it can be walked again
        batches = list(loader)
        assert [len(batch.images) for batch in batches] == [4, 4, 3]
        assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(11))
        assert torch.cat([batch.labels for batch in batches]).tolist() == [index % 5 for index in range(11)]
        images = torch.cat([batch.images for batch in batches])
        assert all(torch.equal(images[i], evaluation_view(dataset.image(i), SIZE, 0.9)) for i in range(11))


def test_evaluation_batches_end() -> None:
    batches = EvaluationBatches(Noise(8), batch_size=4, size=SIZE)
    assert len(batches) == 2
    with pytest.raises(IndexError):
        batches[2]
