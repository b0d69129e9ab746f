"""MaskFeat's flavours of HOG by their definitions, and the bins of all flavours by exact angles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmjd.ops._lib import reference
from dmjd.ops.hog import hog


def random_images(*shape: int) -> Tensor:
    """Integers in float64: gradients are exact in any order of summation, and so is the orientation 0."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).double()


def maskfeat(
    image: NDArray[np.float64], cell: int, bins: int, patch: int, norm: Any, gauss: bool
) -> NDArray[np.float64]:
    """The definition, pixel by pixel: ``[N, dim]`` of one [H, W, C]."""
    height, width, channels = image.shape
    pixels = np.pad(image, ((1, 1), (1, 1), (0, 0)), mode="reflect")
    sobel = np.array([[1, 0, -1], [2, 0, -2], [1, 0, -1]])
    window = np.array(
        [[math.exp(-((r - 7.5) ** 2 + (c - 7.5) ** 2) / (2 * 8**2)) for c in range(16)] for r in range(16)]
    )
    window /= window.sum()
    cells = np.zeros((channels, bins, height // cell, width // cell))
    for channel in range(channels):
        for r in range(height):
            for c in range(width):
                around = pixels[r : r + 3, c : c + 3, channel]
                gx, gy = (around * sobel).sum(), (around * sobel.T).sum()
                magnitude = math.sqrt(gx * gx + gy * gy) * (window[r % 16, c % 16] if gauss else 1)
                cells[channel, math.floor(math.atan2(gx, gy) / math.pi * bins) % bins, r // cell, c // cell] += (
                    magnitude
                )
    if norm == "l2":
        cells = cells / np.maximum(np.sqrt((cells**2).sum(1, keepdims=True)), 1e-12)
    if norm == "layernorm":
        deviation = cells - cells.mean(1, keepdims=True)
        cells = deviation / np.sqrt((deviation**2).mean(1, keepdims=True) + 1e-5)
    k = patch // cell
    tokens = cells.reshape(channels, bins, height // patch, k, width // patch, k).transpose(2, 4, 0, 1, 3, 5)
    return tokens.reshape(height // patch * (width // patch), -1)


@pytest.mark.parametrize("flavour", ["maskfeat", "maskfeat_gauss"])
@pytest.mark.parametrize("norm", ["none", "l2", "layernorm"])
@pytest.mark.parametrize(
    ("size", "channels", "cell", "bins", "patch"),
    [((16, 32), 3, 8, 9, 16), ((24, 40), 1, 4, 7, 8), ((20, 30), 2, 5, 9, 10), ((2, 4), 1, 1, 3, 2)],
)
def test_equals_a_loop_over_pixels(
    flavour: Any, norm: Any, size: tuple[int, int], channels: int, cell: int, bins: int, patch: int
) -> None:
    images = random_images(2, *size, channels)
    expected = np.stack([maskfeat(i, cell, bins, patch, norm, flavour == "maskfeat_gauss") for i in images.numpy()])
    exact = hog(images, cell, bins, patch, flavour, norm, out_dtype=torch.float64)
    np.testing.assert_allclose(exact.numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("flavour", ["maskfeat", "maskfeat_gauss"])
def test_l2_does_not_see_offset_and_factor_of_a_channel(flavour: Any) -> None:
    images = random_images(2, 48, 32, 3)
    normalised = (images - torch.tensor([128, 64, 100])) / torch.tensor([64, 32, 128])  # exact
    expected = hog(images.to(torch.uint8), flavour=flavour, norm="l2")
    torch.testing.assert_close(hog(normalised.float(), flavour=flavour, norm="l2"), expected, rtol=0, atol=1e-6)


def test_l2_of_faint_gradients_is_1_down_to_the_eps_of_normalize() -> None:
    images = random_images(1, 16, 16, 1)
    for faintness, norm in ((1e-8, 1.0), (1e-20, 0.0)):
        values = hog(images * faintness, flavour="maskfeat", norm="l2", out_dtype=torch.float64).reshape(9, 4)
        torch.testing.assert_close(values.norm(dim=0), torch.full((4,), norm).double(), rtol=0, atol=1e-3)


def test_a_flat_image_has_no_direction() -> None:
    for norm in ("none", "l2", "layernorm"):
        values = hog(torch.full((1, 16, 16, 3), 0.3), flavour="maskfeat", norm=norm)
        assert torch.equal(values, torch.zeros(1, 1, 108))


def crosses(rise: Tensor, run: Tensor) -> Tensor:
    """``[N, 3, 3, 1]``: images whose middle pixel has these central differences."""
    zero = torch.zeros_like(rise)
    above, below = (rise.clamp(max=0).neg(), rise.clamp(min=0)) if not rise.dtype.is_floating_point else (zero, rise)
    left, right = (run.clamp(max=0).neg(), run.clamp(min=0)) if not run.dtype.is_floating_point else (zero, run)
    return torch.stack([zero, above, zero, left, zero, right, zero, below, zero], -1).reshape(-1, 3, 3, 1)


def middle_bins(images: Tensor, bins: int) -> Tensor:
    """The bin of the middle pixel of each image, by the op; images without a gradient there are in bin 0."""
    values = hog(
        images, 1, bins, 3, norm="none", out_dtype=images.dtype if images.is_floating_point() else torch.float32
    )
    middle = values.reshape(-1, 9, bins)[:, 4]
    assert ((middle > 0).sum(-1) <= 1).all()
    return middle.argmax(-1)


def all_byte_gradients() -> tuple[Tensor, Tensor]:
    """Every pair of differences that uint8 pixels have."""
    difference = torch.arange(-255, 256)
    rise, run = torch.meshgrid(difference, difference, indexing="ij")
    return rise.flatten(), run.flatten()


def exact_degrees(rise: Tensor, run: Tensor) -> NDArray[np.float64]:
    """Orientation in [0, 180), exact on multiples of 45: the only rational tangents, so the only angles on an edge."""
    y, x = rise.numpy(), run.numpy()
    degrees = np.degrees(np.arctan2(y, x)) % 180
    for here, angle in ((y == 0, 0), (y == x, 45), (x == 0, 90), (y == -x, 135), ((y == 0) & (x == 0), 0)):
        degrees[here] = angle
    degrees[y == 0] = 0
    return degrees


@pytest.mark.parametrize("bins", [4, 6, 9, 12])
def test_bins_of_all_byte_gradients_are_exact(bins: int) -> None:
    rise, run = all_byte_gradients()
    position = exact_degrees(rise, run) * bins / 180
    distance = np.abs(position - np.round(position))
    assert distance[distance > 1e-12].min() > 1e-6  # what is not on an edge is far from it, for double precision
    got = middle_bins(crosses(rise, run).to(torch.uint8), bins)
    np.testing.assert_array_equal(got.numpy(), np.floor(position).astype(np.int64))


def test_bins_of_all_byte_gradients_are_those_of_the_arc_tangent_in_float32() -> None:
    """DMJD's own formula, away from the edges, where its rounding decides."""
    rise, run = all_byte_gradients()
    angle = torch.rad2deg(torch.atan2(rise.float(), run.float())) % 180
    clear = ((angle / 20 - (angle / 20).round()).abs() > 1e-4) | (angle == 0)
    assert clear.float().mean() > 0.99
    got = middle_bins(crosses(rise, run).to(torch.uint8), 9)
    assert torch.equal(got[clear], (angle[clear] / 20).floor().long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [1, 2, 5, 8, 9])
def test_bins_of_gradients_on_and_beside_an_edge_equal_the_reference(bins: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(bins)
    run = torch.randn(2000, 1, generator=generator, dtype=dtype)
    tangents = torch.tensor([math.tan(math.pi * k / 180) for k in range(5, 90, 5)], dtype=dtype)
    rise = tangents * run
    rise = torch.stack(
        [rise, rise.nextafter(torch.full_like(rise, 9)), rise.nextafter(torch.full_like(rise, -9)), -rise]
    )
    run = run.expand(rise.shape)
    images = crosses(rise.flatten(), run.flatten())
    expected = reference("hog")(images, 1, bins, 3, "dmjd", "none", "nhwc", dtype).reshape(-1, 9, bins)[:, 4].argmax(-1)
    assert torch.equal(middle_bins(images, bins), expected)


def test_a_gradient_on_an_edge_belongs_to_the_bin_above() -> None:
    rise, run = torch.tensor([1.0, 1, 1, 0, 0, -1, -1, -1]), torch.tensor([1.0, 0, -1, 1, -1, 1, 0, -1])
    assert middle_bins(crosses(rise, run), 4).tolist() == [1, 2, 3, 0, 0, 3, 2, 1]
