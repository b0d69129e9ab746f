from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from skimage.data import astronaut
from skimage.feature import hog as skimage_hog
from skimage.transform import resize
from torch import Tensor

from dmjd.ops._lib import reference
from dmjd.ops.hog import LAYOUTS, hog


def random_images(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(dtype)


def real_images() -> dict[str, Tensor]:
    photograph: NDArray[np.uint8] = astronaut()
    small = resize(photograph, (224, 224), anti_aliasing=True, preserve_range=True)
    return {
        "square": torch.from_numpy(small.round().astype(np.uint8))[None],
        "3:2": torch.from_numpy(photograph[40:136, 150:294].copy())[None],
    }


def by_loops(image: NDArray[Any], cell: int, bins: int, patch: int, norm: Any) -> NDArray[np.float64]:
    """The definition, pixel by pixel, with the position of every value written out: ``[N, dim]`` of one [H, W, C]."""
    height, width, channels = image.shape
    pixels = image.astype(np.float64)
    per_patch, columns = patch // cell, width // patch
    out = np.zeros((height // patch * columns, per_patch * per_patch * bins * channels))
    for channel in range(channels):
        for r0 in range(0, height, cell):
            for c0 in range(0, width, cell):
                histogram = np.zeros(bins)
                for r in range(r0, r0 + cell):
                    for c in range(c0, c0 + cell):
                        row = pixels[r + 1, c, channel] - pixels[r - 1, c, channel] if 0 < r < height - 1 else 0.0
                        col = pixels[r, c + 1, channel] - pixels[r, c - 1, channel] if 0 < c < width - 1 else 0.0
                        angle = math.degrees(math.atan2(row, col)) % 180
                        histogram[int(angle // (180 / bins)) % bins] += math.sqrt(row * row + col * col) / cell**2
                if norm == "l2":
                    histogram = histogram / math.sqrt((histogram**2).sum() + 1e-10)
                if norm == "layernorm":
                    deviation = histogram - histogram.sum() / bins
                    histogram = deviation / math.sqrt((deviation**2).sum() / bins + 1e-5)
                token = r0 // patch * columns + c0 // patch
                cell_index = r0 % patch // cell * per_patch + c0 % patch // cell
                for b in range(bins):
                    out[token, (cell_index * bins + b) * channels + channel] = histogram[b]
    return out


def by_skimage(image: NDArray[Any], cell: int, patch: int) -> NDArray[np.float64]:
    """As :func:`by_loops` with 9 bins and norm l2, by scikit-image; accurate to float32, in which it sums a cell."""
    height, width, channels = image.shape
    h, w, k = height // patch, width // patch, patch // cell
    pixels = image.astype(np.float64)
    options = {"cells_per_block": (1, 1), "block_norm": "L2", "feature_vector": False}
    cells = np.stack([skimage_hog(pixels[..., c], 9, (cell, cell), **options) for c in range(channels)], axis=-1)
    return cells.reshape(h, k, w, k, 9, channels).transpose(0, 2, 1, 3, 4, 5).reshape(h * w, -1)


@pytest.mark.parametrize("cell", [2, 4, 8])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_l2_equals_skimage_on_random_images(cell: int, channels: int) -> None:
    images = random_images(2, 32, 48, channels)
    expected = np.stack([by_skimage(image, cell, 16) for image in images.numpy()])
    exact = hog(images.double(), cell=cell, norm="l2", out_dtype=torch.float64)
    np.testing.assert_allclose(exact.numpy(), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(hog(images, cell=cell, norm="l2").numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["square", "3:2"])
def test_l2_equals_skimage_on_a_photograph(name: str) -> None:
    images = real_images()[name]
    expected = by_skimage(images[0].numpy(), 8, 16)
    exact = hog(images.double(), norm="l2", out_dtype=torch.float64)[0]
    np.testing.assert_allclose(exact.numpy(), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(hog(images, norm="l2")[0].numpy(), expected, rtol=0, atol=1e-5)


def test_flavour_skimage_has_its_numbers_in_its_order() -> None:
    images = real_images()["3:2"]
    values = hog(images, cell=4, flavour="skimage", norm="l2").reshape(6, 9, 3, 4, 4, 9)
    for channel in range(3):
        cells = skimage_hog(images[0, ..., channel].numpy(), 9, (4, 4), (1, 1), "L2", feature_vector=False)
        expected = cells[..., 0, 0, :].reshape(6, 4, 9, 4, 9).transpose(0, 2, 1, 3, 4)
        np.testing.assert_allclose(values[:, :, channel].numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "l2", "layernorm"])
@pytest.mark.parametrize(
    ("size", "channels", "cell", "bins", "patch"),
    [((16, 24), 3, 4, 9, 8), ((32, 16), 1, 8, 9, 16), ((12, 6), 4, 2, 7, 6), ((9, 9), 2, 3, 9, 3)],
)
def test_equals_a_loop_over_pixels(
    size: tuple[int, int], channels: int, cell: int, bins: int, patch: int, norm: Any
) -> None:
    images = random_images(2, *size, channels)
    expected = np.stack([by_loops(image, cell, bins, patch, norm) for image in images.numpy()])
    exact = hog(images.double(), cell=cell, bins=bins, patch=patch, norm=norm, out_dtype=torch.float64)
    np.testing.assert_allclose(exact.numpy(), expected, rtol=0, atol=1e-9)
    single = hog(images, cell=cell, bins=bins, patch=patch, norm=norm)
    np.testing.assert_allclose(single.numpy(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("norm", ["l2", "layernorm"])
def test_equals_a_loop_over_the_pixels_of_a_photograph(norm: Any) -> None:
    images = real_images()["3:2"]
    expected = by_loops(images[0].numpy(), 8, 9, 16, norm)
    exact = hog(images.double(), norm=norm, out_dtype=torch.float64)[0]
    np.testing.assert_allclose(exact.numpy(), expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(hog(images, norm=norm)[0].numpy(), expected, rtol=0, atol=1e-5)


def test_layernorm_has_zero_mean_and_unit_variance_per_cell_and_channel() -> None:
    values = hog(real_images()["square"].double(), out_dtype=torch.float64).reshape(196, 4, 9, 3)
    torch.testing.assert_close(values.mean(2), torch.zeros(196, 4, 3, dtype=torch.float64), rtol=0, atol=1e-12)
    raw = hog(real_images()["square"].double(), norm="none", out_dtype=torch.float64).reshape(196, 4, 9, 3)
    variance = raw.var(2, correction=0)
    torch.testing.assert_close(values.var(2, correction=0), variance / (variance + 1e-5), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_layouts_agree(channels: int) -> None:
    images = random_images(3, 32, 16, channels)
    first = images.permute(0, 3, 1, 2)
    for nchw in (first, first.contiguous()):
        torch.testing.assert_close(hog(nchw, layout="nchw"), hog(images), rtol=0, atol=1e-6)


@pytest.mark.parametrize("degrees", [10, 30, 50, 70, 90, 110, 130, 150, 170])
def test_a_ramp_falls_in_the_bin_of_its_gradient(degrees: int) -> None:
    row, column = torch.meshgrid(torch.arange(48.0), torch.arange(48.0), indexing="ij")
    slope = math.radians(degrees)
    ramp = 128 + 2 * (math.sin(slope) * row + math.cos(slope) * column)
    inner = hog(ramp[None, :, :, None], norm="none").reshape(3, 3, 2, 2, 9)[1, 1]
    expected = torch.zeros(2, 2, 9)
    expected[..., degrees // 20] = 4.0  # two pixels apart, slope 2
    torch.testing.assert_close(inner, expected, rtol=0, atol=1e-4)


def test_a_vertical_edge_falls_in_bin_0_of_the_cells_it_touches() -> None:
    image = torch.zeros(1, 16, 16, 3, dtype=torch.uint8)
    image[:, :, 8:, 1] = 100  # between columns 7 and 8: one column of each cell sees it
    expected = torch.zeros(2, 2, 9, 3)
    expected[:, :, 0, 1] = 100 / 8
    torch.testing.assert_close(hog(image, norm="none").reshape(2, 2, 9, 3), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(hog(255 - image, norm="none").reshape(2, 2, 9, 3), expected, rtol=0, atol=1e-5)


def test_borders_have_no_gradient_across_but_keep_the_one_along() -> None:
    columns = torch.arange(8.0).expand(8, 8)  # g_col is 2 inside, and must be 0 on the first and the last column
    histogram = hog(columns[None, :, :, None], cell=8, patch=8, norm="none").reshape(9)
    assert histogram[0].item() == pytest.approx(2 * 8 * 6 / 64)
    assert histogram[1:].abs().sum() == 0
    histogram = hog(columns.T[None, :, :, None], cell=8, patch=8, norm="none").reshape(9)
    assert histogram[4].item() == pytest.approx(2 * 8 * 6 / 64)
    assert histogram.sum().item() == pytest.approx(2 * 8 * 6 / 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_orientation_just_below_180_falls_in_the_last_bin(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    row, column = torch.meshgrid(torch.arange(8.0, dtype=dtype), torch.arange(8.0, dtype=dtype), indexing="ij")
    image = torch.where(column == 2, -row * tiny, 0) + torch.where(column == 3, 1.0, 0)
    assert image[1, 2] < 0  # so inner pixels of column 2 have g_row < 0 and g_col = 1, and an angle that rounds to 180
    histogram = hog(image[None, :, :, None], cell=8, patch=8, norm="none", out_dtype=dtype).reshape(9)
    # Column 4 has g_col = -1 and g_row = 0, as the border rows of column 2 have g_row = 0.
    assert histogram[0].item() == pytest.approx((8 + 2) / 64)
    assert histogram[8].item() == pytest.approx(6 / 64)
    assert histogram[1:8].max() == 0


def test_magnitude_is_neither_lost_nor_made() -> None:
    images = torch.rand(1, 64, 64, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 255
    row, col = np.zeros((64, 64)), np.zeros((64, 64))
    pixels = images[0, :, :, 0].numpy()
    row[1:-1], col[:, 1:-1] = pixels[2:] - pixels[:-2], pixels[:, 2:] - pixels[:, :-2]
    total = hog(images, norm="none", out_dtype=torch.float64).sum().item()
    assert total * 64 == pytest.approx(np.hypot(row, col).sum(), rel=1e-12)


def test_flat_images_give_zeros() -> None:
    images = torch.full((2, 16, 32, 3), 77, dtype=torch.uint8)
    for norm in ("none", "l2", "layernorm"):
        assert torch.equal(hog(images, norm=norm), torch.zeros(2, 2, 108))


def test_dtypes() -> None:
    images = random_images(2, 32, 32, 3)
    expected = hog(images)
    assert expected.dtype == torch.float32
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # 0..255 is exact in all three
        assert torch.equal(hog(images.to(dtype)), expected)
        assert torch.equal(hog(images, out_dtype=dtype), expected.to(dtype))


def test_a_batch_is_its_samples() -> None:
    images = random_images(5, 32, 32, 3)
    assert torch.equal(hog(images), torch.cat([hog(image[None]) for image in images]))


def test_empty_batch() -> None:
    assert hog(torch.empty(0, 32, 48, 3, dtype=torch.uint8)).shape == (0, 6, 108)
    assert hog(torch.empty(0, 4, 32, 48), cell=16, norm="l2", layout="nchw").shape == (0, 6, 36)


def test_no_gradient() -> None:
    assert not hog(torch.rand(1, 16, 16, 3, requires_grad=True)).requires_grad


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize(("norm", "out_dtype"), [("layernorm", torch.bfloat16), ("l2", torch.float32)])
def test_opcheck(layout: Any, norm: Any, out_dtype: torch.dtype) -> None:
    images = random_images(2, 32, 16, 3)
    if layout == "nchw":
        images = images.permute(0, 3, 1, 2)
    torch.library.opcheck(torch.ops.dmjd.hog.default, (images, 4, 9, 8, "dmjd", norm, layout, out_dtype))


def test_compiles_without_graph_breaks_and_for_any_batch() -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda images: hog(images, cell=4, patch=8) * 2, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for batch, height in ((2, 16), (3, 16), (5, 24)):
        images = random_images(batch, height, 16, 3)
        torch.testing.assert_close(compiled(images), hog(images, cell=4, patch=8) * 2, rtol=0, atol=0)


def test_the_op_is_its_reference() -> None:
    images = random_images(2, 32, 48, 3)
    for layout, x in zip(LAYOUTS, (images, images.permute(0, 3, 1, 2).contiguous()), strict=True):
        expected = reference("hog")(x, 8, 9, 16, "dmjd", "layernorm", layout, torch.float32)
        torch.testing.assert_close(hog(x, layout=layout), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"flavour": "opencv"}, "flavour must be one of dmjd, maskfeat, maskfeat_gauss, skimage, got 'opencv'"),
        ({"norm": "l1"}, "norm must be one of none, l2, layernorm, got 'l1'"),
        ({"layout": "hwc"}, "layout must be one of nhwc, nchw, got 'hwc'"),
        ({"cell": 5}, "cell must be a divisor of patch 16, got 5"),
        ({"cell": 0}, "cell must be a divisor of patch 16, got 0"),
        ({"cell": 32}, "cell must be a divisor of patch 16, got 32"),
        ({"bins": 0}, "bins must be at least 1, got 0"),
        ({"bins": 181}, "bins must be at most 180, got 181"),
        ({"images": torch.zeros(1, 1, 8, 3), "flavour": "maskfeat", "cell": 1, "patch": 1}, "2 x 2 pixels.*got 1 x 8"),
        ({"patch": 0}, "patch must be at least 1 pixel, got 0"),
        ({"cell": 8, "patch": 24}, "multiples of patch 24, got 32 x 48"),
        ({"layout": "nchw"}, "multiples of patch 16, got 48 x 3"),
        ({"images": torch.zeros(32, 48, 3)}, r"images must be \[B, H, W, C\] for layout nhwc, got shape \(32, 48, 3\)"),
        ({"images": torch.zeros(1, 0, 16, 3)}, "multiples of patch 16, got 0 x 16"),
        ({"images": torch.zeros(1, 16, 16, 0)}, "at least 1 channel, got 0"),
    ],
)
def test_bad_values_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hog(**{"images": torch.zeros(1, 32, 48, 3), **arguments})


def test_bad_dtypes_are_named() -> None:
    with pytest.raises(TypeError, match=r"images must be uint8 or floating, got torch.int32"):
        hog(torch.zeros(1, 16, 16, 3, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"out_dtype must be floating, got torch.uint8"):
        hog(torch.zeros(1, 16, 16, 3), out_dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"out_dtype must be floating, got torch.float8_e5m2"):
        hog(torch.zeros(1, 16, 16, 3), out_dtype=torch.float8_e5m2)
