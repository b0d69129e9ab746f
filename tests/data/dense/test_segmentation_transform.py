"""The training transform of segmentation against plain loops."""

from __future__ import annotations

import colorsys
import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from dmjd.config import SegmentDataConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, training_batches, training_transform
from dmjd.data.dataset import InMemory, Pixels
from dmjd.data.dense import segmentation
from dmjd.data.dense.segmentation import Distortion, SegmentationDraws, SegmentationTransform, resized_size
from dmjd.data.loader import make_loader
from dmjd.errors import ConfigError
from dmjd.ops.philox import Domain, keyed_uniform, make_key

KEY = make_key(3, 1)


class Annotated(InMemory):
    """An opened image in memory and its map."""

    def __init__(self, pixels: Pixels, classes: Pixels) -> None:
        super().__init__(pixels)
        self._classes = classes

    def classes(self) -> Pixels:
        return self._classes


def ramps(height: int, width: int, block: int = 16) -> Annotated:
    """Rows in red and columns in green, and as class the number of a block."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([y, x, np.zeros_like(y)], -1).astype(np.uint8)
    return Annotated(pixels, (y // block * -(-width // block) + x // block).astype(np.uint8))


def transform(**changes: Any) -> SegmentationTransform:
    values: dict[str, Any] = {
        "size": (64, 64),
        "resize": (64, 256),
        "ratio": (0.5, 2.0),
        "max_class_share": 1.0,
        "flip": False,
        "distortion": False,
        "mean": [0.485, 0.456, 0.406],
    }
    return SegmentationTransform(**(values | changes))


def cut(draws: SegmentationDraws, row: int, image: Annotated) -> tuple[Pixels, Pixels]:
    crop, classes = draws.cut(row, image)  # type: ignore[arg-type]  # all that a cut needs of an opened image
    return crop.numpy(), classes.numpy()


def valid(classes: Pixels) -> tuple[int, int]:
    """Height and width without the padding."""
    return int((classes[:, 0] != 255).sum()), int((classes[0] != 255).sum())


@pytest.mark.parametrize(
    ("size", "resize", "factor", "expected"),
    [
        ((512, 683), (512, 2048), 1.0, (512, 683)),
        ((683, 512), (512, 2048), 0.5, (342, 256)),  # 683 * 0.5 + 0.5 rounded down
        ((100, 1000), (512, 2048), 1.0, (205, 2048)),  # the longest side limits
        ((333, 500), (512, 2048), 1.75, (896, 1345)),
        ((1, 4000), (512, 2048), 1.0, (1, 2048)),
        ((480, 640), (512, 2048), 0.7501, (384, 512)),  # int(512 * 0.7501) = 384
    ],
)
def test_resize_keeps_the_ratio_as_mmcv(
    size: tuple[int, int], resize: tuple[int, int], factor: float, expected: tuple[int, int]
) -> None:
    assert resized_size(size, resize, factor) == expected


@pytest.mark.parametrize("size", [(97, 131), (131, 97), (64, 64), (200, 65), (33, 250)])
def test_map_is_the_crop_of_the_resized_map_by_nearest_centres(size: tuple[int, int]) -> None:
    ids = torch.arange(6)
    image, draws = ramps(*size), transform().draw(ids, KEY)
    uniform = keyed_uniform(ids, 23, key=KEY, domain=Domain.CROP).tolist()
    for row in range(6):
        height, width = resized_size(size, (64, 256), 0.5 + 1.5 * uniform[row][0])
        top = math.floor(uniform[row][1] * (max(height - 64, 0) + 1))
        left = math.floor(uniform[row][2] * (max(width - 64, 0) + 1))
        _, classes = cut(draws, row, image)
        assert valid(classes) == (min(height, 64), min(width, 64))
        for y in range(min(height, 64)):
            for x in range(min(width, 64)):
                old = (
                    math.floor((top + y + 0.5) * size[0] / height + 1e-9),
                    math.floor((left + x + 0.5) * size[1] / width + 1e-9),
                )
                assert classes[y, x] == image.classes()[old]


@pytest.mark.parametrize("flip", [False, True])
def test_image_and_map_stay_aligned(flip: bool) -> None:
    block, width = 20, 240
    image = ramps(180, width, block)
    draws = transform(flip=flip).draw(torch.arange(12), KEY)
    columns = width // block
    ascending = 0
    for row in range(12):
        crop, classes = cut(draws, row, image)
        height, length = valid(classes)
        seen, expected = crop[:height, :length].astype(float), classes[:height, :length].astype(int)
        # Red and green are the place in the image, within the block of the class and the smoothing at its border.
        for channel, number in ((0, expected // columns), (1, expected % columns)):
            middle = number * block + (block - 1) / 2
            assert np.abs(seen[..., channel] - middle).max() <= block / 2 + 1.5
        ascending += seen[0, -1, 1] > seen[0, 0, 1]
    assert (0 < ascending < 12) if flip else ascending == 12


@pytest.mark.parametrize("channels", [1, 3])
def test_crop_is_that_of_the_whole_resized_image(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (111, 157, channels), dtype=np.uint8)
    image = Annotated(pixels, np.zeros((111, 157), dtype=np.uint8))
    draws = transform(mean=[0.5] * channels).draw(torch.arange(8), KEY)
    uniform = keyed_uniform(torch.arange(8), 23, key=KEY, domain=Domain.CROP).tolist()
    for row in range(8):
        height, width = draws.resized(row, (111, 157))
        whole = np.asarray(Image.fromarray(pixels.squeeze()).resize((width, height), Image.Resampling.BILINEAR))
        whole = whole.reshape(height, width, channels)
        top, left = (math.floor(uniform[row][n] * (max(side - 64, 0) + 1)) for n, side in ((1, height), (2, width)))
        expected = whole[top : top + 64, left : left + 64].astype(int)
        crop, _ = cut(draws, row, image)
        crop = crop[: expected.shape[0], : expected.shape[1]]
        assert np.abs(crop - expected).max() <= 1
        tested = segmentation.test_image(image, [int(side * (0.5 + 1.5 * uniform[row][0])) for side in (64, 256)])
        np.testing.assert_array_equal(tested, whole)


def share(classes: npt.NDArray[np.uint8]) -> float:
    """The share of the most frequent class among the pixels with one; 1 if none has one."""
    numbers = classes[classes != 255].tolist()
    return max((numbers.count(each) for each in set(numbers)), default=0) / len(numbers) if numbers else 1.0


def test_crop_is_the_first_of_ten_without_a_dominant_class_or_the_eleventh() -> None:
    classes = np.zeros((128, 128), dtype=np.uint8)
    classes[:30, :40], classes[80:, :] = 1, 255
    image = Annotated(np.zeros((128, 128, 3), dtype=np.uint8), classes)
    ids = torch.arange(300)
    uniform = keyed_uniform(ids, 23, key=KEY, domain=Domain.CROP).tolist()
    draws = transform(size=(24, 24), resize=(128, 128), ratio=(1.0, 1.0), max_class_share=0.75).draw(ids, KEY)
    attempts = []
    for row in ids.tolist():
        for attempt in range(11):
            top, left = (math.floor(each * 105) for each in uniform[row][2 * attempt + 1 : 2 * attempt + 3])
            expected = classes[top : top + 24, left : left + 24]
            if share(expected) < 0.75:
                break
        attempts.append(attempt)
        np.testing.assert_array_equal(cut(draws, row, image)[1], expected)
    assert {0, 9, 10} <= set(attempts)


def test_small_images_are_padded_at_the_bottom_and_the_right_with_the_mean_and_255() -> None:
    image = Annotated(np.full((3, 5, 3), 200, dtype=np.uint8), np.full((3, 5), 7, dtype=np.uint8))
    draws = transform(resize=(3, 5), ratio=(1.0, 1.0), flip=True, distortion=True, max_class_share=0.75)
    for row in range(4):
        crop, classes = cut(draws.draw(torch.arange(4), KEY), row, image)
        assert (classes[:3, :5] == 7).all()
        assert (classes == 7).sum() == 15
        assert (classes == 255).sum() == 64 * 64 - 15
        outside = crop[classes == 255]
        assert np.abs(outside / 255 - np.array([0.485, 0.456, 0.406])).max() <= 0.5 / 255


def test_extreme_sizes_keep_a_pixel() -> None:
    for size in ((1, 1), (1, 900), (700, 2)):
        image = Annotated(np.zeros((*size, 3), dtype=np.uint8), np.zeros(size, dtype=np.uint8))
        _, classes = cut(transform(max_class_share=0.75).draw(torch.arange(1), KEY), 0, image)
        assert (classes == 0).any()


def changed(values: npt.NDArray[Any], factor: float, summand: float = 0.0) -> npt.NDArray[Any]:
    """mmsegmentation's change of pixel values, in float32."""
    return np.clip(values.astype(np.float32) * np.float32(factor) + np.float32(summand), 0, 255).astype(int)


def test_brightness_and_contrast_cut_and_round_in_their_order() -> None:
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for first in (True, False):
        for image in (Image.fromarray(values), Image.fromarray(np.stack([values, values[::-1], values.T], -1))):
            found = np.asarray(Distortion(brightness=20.7, contrast=1.3, contrast_first=first)(image))
            expected = changed(changed(np.asarray(image), 1, 20.7), 1.3)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("first", [True, False])
def test_saturation_and_hue_are_changes_of_hsv(first: bool) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
    distortion = Distortion(contrast=0.6, saturation=1.4, hue=-0.08, contrast_first=first)
    found = np.asarray(distortion(Image.fromarray(pixels))).astype(int)
    for at in np.ndindex(12, 12):
        rgb = pixels[at].astype(float) * (0.6 if first else 1)
        hue, saturation, value = colorsys.rgb_to_hsv(*rgb / 255)
        back = np.array(colorsys.hsv_to_rgb((hue - 0.08) % 1, min(1, saturation * 1.4), value))
        expected = back * 255 * (1 if first else 0.6)
        assert np.abs(found[at] - expected).max() <= 6  # hue and saturation have 256 steps


def test_grey_images_keep_their_channel() -> None:
    image = Image.fromarray(np.full((4, 4), 100, dtype=np.uint8))
    found = Distortion(saturation=1.5, hue=0.1, contrast=0.5)(image)
    assert found.mode == "L"
    assert (np.asarray(found) == 50).all()


def test_each_part_of_the_distortion_has_probability_one_half_and_its_range() -> None:
    uniform = keyed_uniform(torch.arange(4000), 9, key=KEY, domain=Domain.CROP, lane=1).tolist()
    drawn = [Distortion.of(row) for row in uniform]
    for name, (low, high) in {
        "brightness": (-32, 32),
        "contrast": (0.5, 1.5),
        "saturation": (0.5, 1.5),
        "hue": (-0.1, 0.1),
    }.items():
        values = [getattr(each, name) for each in drawn if getattr(each, name) is not None]
        assert len(values) == pytest.approx(2000, abs=130)  # four standard deviations
        assert low <= min(values) < low + 0.01 * (high - low)
        assert high >= max(values) > high - 0.01 * (high - low)
    assert sum(each.contrast_first for each in drawn) == pytest.approx(2000, abs=130)


def test_distortion_moves_no_pixel_of_the_map() -> None:
    image = ramps(90, 110)
    plain, distorted = (transform(distortion=on).draw(torch.arange(6), KEY) for on in (False, True))
    pairs = [(cut(plain, row, image), cut(distorted, row, image)) for row in range(6)]
    for one, other in pairs:
        np.testing.assert_array_equal(one[1], other[1])
    assert any((one[0] != other[0]).any() for one, other in pairs)


def same(one: Batch, two: Batch) -> bool:
    return all(torch.equal(*fields) for fields in zip(one, two, strict=True))


@pytest.fixture
def config(scenes: Path) -> SegmentDataConfig:
    return SegmentDataConfig(root=str(scenes), image_size=[48, 56], resize=[56, 200])


def test_samples_depend_on_seed_epoch_and_id_alone(config: SegmentDataConfig) -> None:
    dataset = build_dataset(config, "train")
    whole = training_batches(config, dataset, 6, seed=5)
    batches = [whole[step] for step in range(4)]
    for rank in range(2):
        part = training_batches(config, dataset, 6, 5, rank, 2)
        columns = slice(3 * rank, 3 * rank + 3)
        for step in range(4):
            assert same(part[step], batches[step].map(itemgetter(columns)))
    loaded = list(make_loader(training_batches(config, dataset, 6, seed=5), 1, 4, workers=2, pin_memory=False))
    for one, two in zip(loaded, batches[1:], strict=True):
        assert same(one, two)
    single = training_batches(config, dataset, 1, seed=5)
    by_id = {int(number): row for row, number in enumerate(batches[0].sample_ids)}
    rows = 0
    for step in range(12):
        row = by_id.get(int(single[step].sample_ids))
        if row is not None:
            assert torch.equal(single[step].images[0], batches[0].images[row])
            assert torch.equal(single[step].maps[0], batches[0].maps[row])
            rows += 1
    assert rows == 6
    first = int(batches[0].sample_ids[0])
    later = next(each for each in batches[2:] if first in each.sample_ids.tolist())  # of the second epoch
    assert not torch.equal(batches[0].images[0], later.images[later.sample_ids.tolist().index(first)])


def test_batch_has_maps_of_the_size_of_its_images(config: SegmentDataConfig) -> None:
    dataset = build_dataset(config, "train")
    batch = training_batches(config, dataset, 4, seed=0)[0]
    empty = training_transform(config).empty(4, 3)
    for each in (batch, empty):
        assert each.images.shape == (4, 48, 56, 3)
        assert each.maps.shape == (4, 48, 56)
        assert each.maps.dtype == torch.uint8
        assert each.labels.tolist() == [-1] * 4
        held = sum(field.numel() * field.element_size() for field in each)
        assert held == training_transform(config).nbytes(4, 3)
    assert (empty.maps == 255).all()


@pytest.mark.parametrize(("key", "value"), [("resize", [100, 50]), ("resize_ratio", [2.0, 0.5])])
def test_a_reversed_range_is_an_error(key: str, value: list[float]) -> None:
    config = SegmentDataConfig()
    setattr(config, key, value)
    with pytest.raises(ConfigError, match=f"data.{key} must be least <= greatest"):
        SegmentationTransform.of(config)
