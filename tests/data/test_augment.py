from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from skimage import data
from timm.data.auto_augment import NAME_TO_OP, rand_augment_transform
from torch import Tensor

from dmjd.config import AugmentConfig, DataConfig
from dmjd.data.augment import RandAugment, apply
from dmjd.data.batch import Batch
from dmjd.data.build import training_batches
from dmjd.data.dataset import ArrayDataset
from dmjd.data.loader import make_loader
from dmjd.errors import ConfigError
from dmjd.ops.philox import Domain, keyed_bits, make_key

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

KEY = make_key(3, 1)
MEAN = {3: (0.485, 0.456, 0.406), 1: (0.5,)}
FILL: dict[int, Any] = {3: (124, 116, 104), 1: 128}
POLICY = "rand-m9-mstd0.5-inc1"


def photo(channels: int, height: int = 60, width: int = 72) -> Image.Image:
    image = Image.fromarray(data.astronaut()).resize((width, height))
    return image if channels == 3 else image.convert("L")


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).view(image.height, image.width, -1)


def classes_of(images: int, num_classes: int = 4) -> ArrayDataset:
    pixels = np.stack([np.asarray(photo(3, 40, 40))] * images)
    return ArrayDataset(pixels, np.arange(images) % 4, num_classes, "photos")


@pytest.mark.parametrize("channels", [3, 1])
def test_operations_are_those_of_timm_with_its_seeds(channels: int) -> None:
    """Bilinear, for which every operation is Pillow's; below magnitude 10, which Pillow 13 cannot posterize."""
    policy = "rand-m8-mstd0.5-inc1"
    settings = {"img_mean": FILL[channels], "interpolation": Image.Resampling.BILINEAR}
    timm = rand_augment_transform(policy, settings)
    image, ids = photo(channels), torch.arange(60) * 1000003
    drawn = RandAugment(policy, MEAN[channels], "bilinear").draw(ids, KEY)
    for operations, (choice, rest) in zip(
        drawn, keyed_bits(ids, 2, key=KEY, domain=Domain.CROP, lane=1).tolist(), strict=True
    ):
        np.random.seed(choice)  # noqa: NPY002 -- timm draws from it
        random.seed(rest)
        expected = timm(image)
        np.testing.assert_array_equal(apply(operations, tensor(image)).numpy(), tensor(expected).numpy())
    assert {len(operations) for operations in drawn} == {0, 1, 2}


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", ["ShearX", "ShearY", "TranslateXRel", "TranslateYRel"])
def test_shifts_differ_from_pillows_by_at_most_one(name: str, channels: int) -> None:
    image = photo(channels)
    augment = RandAugment(f"{POLICY}-p1", MEAN[channels], "bicubic")
    ours = next(operation for operation in augment._timm.ops if operation.name == name)
    for factor in (0.27, -0.13, 0.3, -0.45, 0.0, 0.25, 1.7, -3.0):
        ours.level_fn = lambda level, settings, factor=factor: (factor,)
        function: Any = NAME_TO_OP[name]
        theirs = function(image, factor, fillcolor=FILL[channels], resample=Image.Resampling.BICUBIC)
        difference = (apply(ours(()), tensor(image)).int() - tensor(theirs).int()).abs()
        assert difference.max() <= 1
        assert difference.float().mean() < 0.005
        flat = torch.full((60, 72, channels), 77, dtype=torch.uint8)
        assert set(apply(ours(()), flat).unique().tolist()) <= {77, *np.atleast_1d(FILL[channels]).tolist()}


def test_inversion_and_posterization_are_pillows_and_no_bits_are_black() -> None:
    augment = RandAugment(f"{POLICY}-p1", MEAN[3], "bicubic")
    operations = {operation.name: operation for operation in augment._timm.ops}
    image = photo(3)
    invert, posterize = operations["Invert"](()), operations["PosterizeIncreasing"]
    np.testing.assert_array_equal(apply(invert, tensor(image)), np.asarray(ImageOps.invert(image)))
    for bits in (-35, *range(9), 43):  # magnitude 99 of rand-m99-mmax99 gives the outer ones
        posterize.level_fn = lambda level, settings, bits=bits: (bits,)
        expected = np.asarray(ImageOps.posterize(image, min(8, bits))) if bits > 0 else np.zeros((60, 72, 3))
        np.testing.assert_array_equal(apply(posterize(()), tensor(image)), expected)


def test_every_operation_is_applied_with_probability_p() -> None:
    drawn = RandAugment(f"{POLICY}-n3-p0.4", MEAN[3], "bicubic").draw(torch.arange(1200), KEY)
    counts = Counter(len(operations) for operations in drawn)
    expected = {0: 0.216, 1: 0.432, 2: 0.288, 3: 0.064}  # binomial(3, .4)
    assert all(abs(counts[number] / 1200 - share) < 0.05 for number, share in expected.items())
    weighted = RandAugment("rand-m9-n9-p1-tweights", MEAN[3], "bicubic").draw(torch.arange(20), KEY)
    assert all(len(operations) == 9 for operations in weighted), "without replacement"


def test_batches_depend_on_seed_epoch_and_sample_only() -> None:
    config = DataConfig(image_size=[24, 24], crop_scale=[0.3, 1.0])
    dataset, augment = classes_of(16), AugmentConfig()

    def load(workers: int, rank: int = 0, world: int = 1, seed: int = 1) -> list[Batch]:
        batches = training_batches(config, dataset, 8, seed, rank, world, augment)
        return list(make_loader(batches, 0, 3, workers, pin_memory=False))

    random.seed(5)
    before = random.getstate(), str(np.random.get_state())  # noqa: NPY002 -- the one that timm draws from
    whole = load(0)
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002
    random.seed(99)
    parts = [load(workers, rank, 2) for rank, workers in ((0, 2), (1, 0))]
    for step, batch in enumerate(whole):
        for field, halves in zip(batch, zip(*(part[step] for part in parts), strict=True), strict=True):
            assert torch.equal(field, torch.cat(halves) if field.numel() else field)
    plain = training_batches(config, dataset, 8, 1)[0]
    assert torch.equal(plain.sample_ids, whole[0].sample_ids)
    changed = [not torch.equal(*pair) for pair in zip(plain.images, whole[0].images, strict=True)]
    assert 0 < sum(changed) < 8
    same = {int(index): image for index, image in zip(whole[0].sample_ids, whole[0].images, strict=True)}
    later = training_batches(config, dataset, 8, 1, augment=augment)[2]  # of the next epoch
    assert any(not torch.equal(image, same.get(int(index), image)) for index, image in zip(*later[1::-1], strict=True))


def test_the_second_crop_is_not_augmented() -> None:
    config = DataConfig(image_size=[24, 24], second_size=[16, 16])
    augment = AugmentConfig(randaugment="rand-m9-p1-inc1")
    with_policy = training_batches(config, classes_of(8), 8, 1, augment=augment)[0]
    assert torch.equal(with_policy.second, training_batches(config, classes_of(8), 8, 1)[0].second)


@pytest.mark.parametrize(
    "policy", ["", "randm9", "rand-m9-x", "rand-m", "rand-p2", "augmix-m3", "rand-m9-inc2", "rand-n0"]
)
def test_a_policy_that_timm_would_misread_is_rejected(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"^augment.randaugment=.* is not a RandAugment policy; write rand"):
        training_batches(DataConfig(), classes_of(8), 4, 0, augment=AugmentConfig(randaugment=policy))
