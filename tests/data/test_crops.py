from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data
from torch import Tensor

from dmjd.config import DataConfig
from dmjd.data.augment import RandAugment
from dmjd.data.build import training_crop
from dmjd.data.crops import ATTEMPTS, RandomResizedCrop, Range, evaluation_view
from dmjd.data.dataset import ArrayDataset, InMemory, Subset
from dmjd.data.loader import StepBatches
from dmjd.errors import ConfigError
from dmjd.ops.philox import Domain, keyed_uniform, make_key

KEY = make_key(3, 1)
PHOTO = data.astronaut()


def random_resized_crop(
    height: int, width: int, u: list[float], scale: tuple[float, float], ratio: tuple[float, float]
) -> list[int]:
    """RandomResizedCrop.get_params as torchvision documents it, in scalar Python, fed with uniforms in [0, 1)."""
    for attempt in range(10):
        u_area, u_ratio, u_top, u_left = u[4 * attempt : 4 * attempt + 4]
        target = height * width * (scale[0] + (scale[1] - scale[0]) * u_area)
        aspect = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * u_ratio)
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return [int(u_top * (height - h + 1)), int(u_left * (width - w + 1)), h, w]
    w, h = width, height
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    return [(height - h) // 2, (width - w) // 2, h, w]


def draw_boxes(
    heights: Tensor,
    widths: Tensor,
    ids: Tensor,
    key: Tensor,
    scale: Range = (0.2, 1.0),
    ratio: Range = (3 / 4, 4 / 3),
) -> Tensor:
    draws = RandomResizedCrop((224, 192), scale, ratio).draw(ids, key)
    sizes = enumerate(zip(heights.tolist(), widths.tolist(), strict=True))
    return torch.tensor([draws.box(row, height, width) for row, (height, width) in sizes])


def mixed_sizes(count: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = np.random.default_rng(0).integers(1, 600, (2, count))
    return torch.from_numpy(sizes[0]), torch.from_numpy(sizes[1]), torch.arange(count) * 7 + 5


@pytest.mark.parametrize(
    ("scale", "ratio"), [((0.2, 1.0), (3 / 4, 4 / 3)), ((0.08, 1.0), (0.5, 2.0)), ((0.9, 1.0), (3 / 4, 4 / 3))]
)
def test_boxes_equal_a_scalar_implementation_of_torchvisions_rule(
    scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    heights, widths, ids = mixed_sizes(2000)
    boxes = draw_boxes(heights, widths, ids, KEY, scale, ratio)
    uniforms = keyed_uniform(ids, 4 * ATTEMPTS, key=KEY, domain=Domain.CROP).tolist()
    sizes = zip(heights.tolist(), widths.tolist(), uniforms, strict=True)
    expected = [random_resized_crop(h, w, u, scale, ratio) for h, w, u in sizes]
    assert boxes.tolist() == expected


def test_boxes_lie_inside_even_where_no_attempt_fits() -> None:
    heights, widths, ids = mixed_sizes(2000)
    heights[:500], widths[500:1000] = 2, 1  # extreme shapes take the central fallback
    top, left, height, width = draw_boxes(heights, widths, ids, KEY, (0.9, 1.0), (3 / 4, 4 / 3)).unbind(1)
    assert (torch.stack([top, left]) >= 0).all()
    assert (torch.stack([height, width]) >= 1).all()
    assert (top + height <= heights).all()
    assert (left + width <= widths).all()


def kolmogorov_smirnov(sample: Tensor, low: float, high: float) -> float:
    """Greatest distance between the empirical distribution and the uniform one on [low, high]."""
    uniform = ((sample.double() - low) / (high - low)).sort().values.numpy()
    steps = np.arange(len(uniform) + 1) / len(uniform)
    return float(max((steps[1:] - uniform).max(), (uniform - steps[:-1]).max()))


def test_area_log_ratio_and_position_are_uniform() -> None:
    # Area <= 0.7 and ratio <= 4/3 always fit a square, so no attempt is refused and the distributions are exact.
    # With n = 4000 the 1 % point of the statistic is 1.63 / sqrt(n) = 0.026. Drawing sides instead of areas uniformly
    # would be off by 0.075 and the ratio instead of its logarithm by 0.072: each is found with power > 0.999.
    n, side = 4000, 10_000
    size = torch.full((n,), side)
    boxes = draw_boxes(size, size, torch.arange(n), KEY, (0.2, 0.7), (3 / 4, 4 / 3))
    top, left, height, width = boxes.double().unbind(1)
    limit = 1.63 / math.sqrt(n)
    assert kolmogorov_smirnov(height * width / side**2, 0.2, 0.7) < limit
    assert kolmogorov_smirnov((width / height).log(), math.log(3 / 4), math.log(4 / 3)) < limit
    assert kolmogorov_smirnov(top / (side - height), 0, 1) < limit
    assert kolmogorov_smirnov(left / (side - width), 0, 1) < limit


def test_a_box_depends_on_its_sample_and_epoch_only() -> None:
    heights, widths, ids = mixed_sizes(301)
    boxes = draw_boxes(heights, widths, ids, KEY)
    order = torch.from_numpy(np.random.default_rng(1).permutation(301))
    assert torch.equal(draw_boxes(heights[order], widths[order], ids[order], KEY), boxes[order])
    for batch in (1, 7, 64):
        parts = zip(*(torch.split(column, batch) for column in (heights, widths, ids)), strict=True)
        assert torch.equal(torch.cat([draw_boxes(h, w, i, KEY) for h, w, i in parts]), boxes)
    for other in (make_key(3, 2), make_key(4, 1)):
        changed = (draw_boxes(heights, widths, ids, other) != boxes).any(dim=1)
        small = torch.minimum(heights, widths) < 50
        elongated = torch.maximum(heights, widths) > 2 * torch.minimum(heights, widths)  # often the one central box
        assert changed[~small & ~elongated].all()


@pytest.mark.parametrize("box", [(10, 20, 300, 350), (100, 130, 60, 90), (0, 0, 512, 512), (7, 3, 224, 100)])
@pytest.mark.parametrize("channels", [1, 3])
def test_resampling_is_pillows_bicubic(box: tuple[int, int, int, int], channels: int) -> None:
    top, left, height, width = box
    image = PHOTO[..., :channels]
    pillow = Image.fromarray(image.squeeze())
    (ours,) = RandomResizedCrop((224, 192)).cut(InMemory(image), box)
    assert (ours.dtype, ours.shape) == (torch.uint8, (224, 192, channels))

    cropped = pillow.crop((left, top, left + width, top + height)).resize((192, 224), Image.Resampling.BICUBIC)
    assert np.abs(ours.numpy().squeeze().astype(int) - np.asarray(cropped)).max() <= 1  # rounding only
    # resize(box=) also reads the pixels around the box, so the rim may differ by more, the mean hardly
    boxed = pillow.resize((192, 224), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
    assert np.abs(ours.numpy().squeeze().astype(int) - np.asarray(boxed)).mean() < 0.1


def test_a_box_of_the_right_size_is_only_cut_out() -> None:
    for box in ((5, 6, 224, 192), (0, 0, 512, 512)):
        top, left, height, width = box
        (cut,) = RandomResizedCrop((height, width)).cut(InMemory(PHOTO), box)
        np.testing.assert_array_equal(cut.numpy(), PHOTO[top : top + height, left : left + width])


@pytest.mark.parametrize("key", ["crop_scale", "crop_ratio"])
def test_a_reversed_crop_range_is_rejected(key: str) -> None:
    values: dict[str, Any] = {key: [0.5, 0.4]}
    with pytest.raises(ConfigError, match=rf"^data\.{key} must be least <= greatest, got \[0\.5, 0\.4\]$"):
        training_crop(DataConfig(**values))


def test_the_evaluation_view_of_an_image_of_the_right_size_is_the_image() -> None:
    np.testing.assert_array_equal(evaluation_view(InMemory(PHOTO), (512, 512)).numpy(), PHOTO)


@pytest.mark.parametrize(
    ("shape", "size", "crop_pct", "resized"),
    [
        ((300, 400), (224, 224), 0.875, (256, 341)),  # ImageNet's 256 -> 224
        ((400, 300), (224, 224), 1.0, (299, 224)),
        ((300, 400), (224, 96), 1.0, (224, 299)),
        ((300, 400), (20, 200), 1.0, (150, 200)),
        ((20, 30), (32, 32), 0.9, (36, 54)),  # ceil(35.6)
    ],
)
def test_the_evaluation_view_is_the_centre_of_pillows_resize(
    shape: tuple[int, int], size: tuple[int, int], crop_pct: float, resized: tuple[int, int]
) -> None:
    image = PHOTO[: shape[0], : shape[1]]
    whole = np.asarray(Image.fromarray(image).resize(resized[::-1], Image.Resampling.BICUBIC)).astype(int)
    top, left = (resized[0] - size[0]) // 2, (resized[1] - size[1]) // 2
    view = evaluation_view(InMemory(image), size, crop_pct)
    assert view.shape == (*size, 3)
    assert np.abs(view.numpy() - whole[top : top + size[0], left : left + size[1]]).max() <= 1


@pytest.mark.parametrize("augment", [None, "rand-m9-mstd0.5-inc1"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(
    ("images", "size"),
    [((200, 28, 28, 1), (32, 32)), ((200, 32, 32, 3), (32, 32)), ((300, 17, 40, 3), (24, 12)), ((40, 1, 5, 1), (4, 4))],
)
def test_crops_of_images_in_memory_equal_those_of_each_image(
    images: tuple[int, int, int, int], size: tuple[int, int], interpolation: str, augment: str | None
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, images, dtype=np.uint8)
    operations = None if augment is None else RandAugment(augment, [0.5] * images[3], interpolation)
    for single_draw, second_size in ((False, None), (True, None), (False, (8, 8))):
        crop = RandomResizedCrop(
            size, single_draw=single_draw, interpolation=interpolation, second_size=second_size, augment=operations
        )
        draws = crop.draw(torch.arange(len(pixels)) + 9, KEY)
        together = draws.cut_all(pixels)
        few = draws.cut_all(pixels[:3])
        assert all(torch.equal(*pair) for row in range(3) for pair in zip(few[row], together[row], strict=True))
        for row, image in enumerate(pixels):
            for found, alone in zip(together[row], draws.cut(row, InMemory(image)), strict=True):
                assert torch.equal(found, alone)


def test_batches_of_a_data_set_in_memory_are_those_of_its_images() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 28, 28, 1), dtype=np.uint8)
    labels = np.arange(50) % 7
    dataset = Subset(Subset(ArrayDataset(pixels, labels, 7, "x"), range(49, 9, -1)), range(0, 40, 2))
    crop = RandomResizedCrop((32, 32))
    batch = StepBatches(dataset, 8, crop, seed=3)[3]
    draws = crop.draw(batch.sample_ids, make_key(3, 1))
    for row, index in enumerate(batch.sample_ids.tolist()):
        original = 49 - 2 * index
        assert torch.equal(batch.images[row], draws.cut(row, InMemory(pixels[original]))[0])
        assert batch.labels[row] == labels[original]
