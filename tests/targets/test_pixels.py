from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmjd.targets import PixelTarget, Tokenizer

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def patches_by_numpy(images: Tensor, patch: int) -> list[list[Any]]:
    """Normalised patches, each ``[patch * patch * C]`` in (row, column, channel) order."""
    x = (images.numpy().astype(np.float64) / 255 - np.array(MEAN)) / np.array(STD)
    _, height, width, _ = x.shape
    corners = [(r, c) for r in range(0, height, patch) for c in range(0, width, patch)]
    return [[image[r : r + patch, c : c + patch].ravel() for r, c in corners] for image in x]


def test_pixels_are_the_normalised_patches() -> None:
    images = random_images(2, 8, 12, 3)
    target: Tokenizer = PixelTarget(4, 3, MEAN, STD)
    values = target(images)
    assert (target.dim, target.patch) == (48, 4)
    assert values.shape == (2, 6, 48)
    assert values.dtype == torch.float32
    np.testing.assert_allclose(values.numpy(), np.array(patches_by_numpy(images, 4)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("unbiased", "eps"), [(True, 1e-6), (False, 1e-6), (True, 0.5)])
def test_patch_norm_equals_numpy(unbiased: bool, eps: float) -> None:
    images = random_images(2, 8, 12, 3)
    values = PixelTarget(4, 3, MEAN, STD, norm="patch", unbiased=unbiased, eps=eps)(images)
    for image, patches in zip(values.numpy(), patches_by_numpy(images, 4), strict=True):
        for value, patch in zip(image, patches, strict=True):
            variance = np.var(patch, ddof=1 if unbiased else 0)
            np.testing.assert_allclose(value, (patch - np.mean(patch)) / np.sqrt(variance + eps), rtol=0, atol=1e-5)


def test_a_flat_patch_has_a_zero_target() -> None:
    target = PixelTarget(4, 3, (0.5,) * 3, (0.25,) * 3, norm="patch")
    values = target(torch.full((1, 4, 4, 3), 9, dtype=torch.uint8))
    torch.testing.assert_close(values, torch.zeros(1, 1, 48), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_picture_of_pixels_is_the_image(dtype: torch.dtype) -> None:
    images = random_images(2, 8, 12, 3)
    target = PixelTarget(4, 3, MEAN, STD)
    picture = target.render(target(images)[1].to(dtype).requires_grad_(), (2, 3))
    assert picture.dtype == np.uint8
    np.testing.assert_array_equal(picture, images[1].numpy())


def test_pictures_of_other_channel_counts_are_rgb() -> None:
    for channels in (1, 2, 4):
        images = random_images(1, 8, 8, channels)
        target = PixelTarget(4, channels, (0.4,) * channels, (0.2,) * channels)
        picture = target.render(target(images)[0], (2, 2))
        pixels = images[0].numpy().astype(np.float64)
        expected = pixels[..., :3] if channels > 3 else np.repeat(pixels.mean(-1, keepdims=True), 3, axis=-1)
        np.testing.assert_allclose(picture, expected, rtol=0, atol=0.51)


def test_the_picture_of_patch_norm_is_a_fixed_range() -> None:
    target = PixelTarget(1, 3, MEAN, STD, norm="patch")
    values = torch.tensor([[-2.5, 0.0, 2.5], [-9.0, float("nan"), 1.25]])
    expected = [[[0, 128, 255], [0, 128, 191]]]
    np.testing.assert_array_equal(target.render(values, (1, 2)), expected)


def test_patch_norm_is_undone_with_the_statistics_of_the_true_patches() -> None:
    images = random_images(2, 8, 12, 3)
    plain, normalised = PixelTarget(4, 3, MEAN, STD), PixelTarget(4, 3, MEAN, STD, norm="patch")
    restored = normalised.denormalise(normalised(images), images)
    np.testing.assert_array_equal(plain.render(restored[1], (2, 3)), images[1].numpy())
    grey = normalised.denormalise(torch.zeros(5, 2, 6, 48), images)  # of five views: the mean of each patch
    torch.testing.assert_close(grey, plain(images).mean(-1, keepdim=True).expand(5, -1, -1, 48))


def test_the_unbiased_variance_of_one_value_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 2 values per patch"):
        PixelTarget(1, 1, (0,), (1,), norm="patch")


def test_images_that_do_not_fit_are_named() -> None:
    target = PixelTarget(4, 3, MEAN, STD)
    with pytest.raises(ValueError, match="each of the 1 channels, got 3 and 3"):
        target(random_images(1, 8, 8, 1))
    with pytest.raises(ValueError, match="patch must divide image height and width 8 x 6, got 4"):
        target(random_images(1, 8, 6, 3))
