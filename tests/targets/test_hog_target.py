from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmjd.ops.hog import hog
from dmjd.targets import HogTarget, Tokenizer


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


@pytest.mark.parametrize(
    ("target", "dim"),
    [
        (HogTarget(16, 3), 108),
        (HogTarget(16, 1), 36),
        (HogTarget(16, 3, cell=4), 432),
        (HogTarget(14, 3), 108),
        (HogTarget(8, 4, cell=8, bins=6), 24),
    ],
)
def test_dim_is_the_size_of_the_target(target: HogTarget, dim: int) -> None:
    tokenizer: Tokenizer = target
    values = tokenizer(random_images(2, 2 * target.patch, 3 * target.patch, target.channels))
    assert tokenizer.dim == dim
    assert values.shape == (2, 6, dim)
    assert values.dtype == torch.float32


def test_target_is_the_op_on_the_raw_crop() -> None:
    images = random_images(2, 32, 48, 3)
    assert torch.equal(HogTarget(16, 3)(images), hog(images, cell=8, bins=9, patch=16, norm="layernorm"))
    expected = hog(images, cell=4, bins=5, patch=16, norm="l2")
    assert torch.equal(HogTarget(16, 3, cell=4, bins=5, norm="l2")(images), expected)
    expected = hog(images, flavour="maskfeat", norm="l2")
    assert torch.equal(HogTarget(16, 3, flavour="maskfeat", norm="l2")(images), expected)


@pytest.mark.parametrize(("patch", "cell", "factor"), [(16, None, 2), (16, 16, 1), (16, 4, 3), (4, 2, 6), (16, 1, 12)])
def test_pictures_are_the_image_size_with_cells_of_at_least_12_pixels(
    patch: int, cell: int | None, factor: int
) -> None:
    images = random_images(1, 2 * patch, 3 * patch, 3)
    target = HogTarget(patch, 3, cell)
    picture = target.render(target(images)[0].double().requires_grad_(), (2, 3))
    assert picture.shape == (2 * patch * factor, 3 * patch * factor, 3)
    assert picture.dtype == np.uint8
    assert (picture == picture[..., :1]).all()
    assert picture.max() > 200


def step_edge(degrees: int) -> Tensor:
    """uint8 ``[1, 32, 32, 3]``: black and white halves, gradient at ``degrees`` from the column to the row axis."""
    row, column = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    position = {0: column - 12, 90: row - 12, 45: row + column - 24, 135: row - column}[degrees]
    return torch.where(position >= 0, 255, 0).to(torch.uint8)[None, :, :, None].expand(1, 32, 32, 3)


@pytest.mark.parametrize(
    ("flavour", "norm"),
    [
        ("dmjd", "none"),
        ("dmjd", "l2"),
        ("dmjd", "layernorm"),
        ("maskfeat", "l2"),
        ("maskfeat_gauss", "l2"),
        ("skimage", "l2"),
    ],
)
@pytest.mark.parametrize("degrees", [0, 45, 90, 135])
def test_strokes_run_along_the_edge(degrees: int, flavour: str, norm: str) -> None:
    target = HogTarget(16, 3, flavour=flavour, norm=norm)
    picture = target.render(target(step_edge(degrees))[0], (2, 2))[..., 0]
    assert picture.shape == (64, 64)
    cell = picture[16:32, 16:32].astype(
        float
    )  # the second cell of 16 pixels in each direction; all four edges cross it
    rows, columns = np.indices(cell.shape) - 7.5
    weight = cell / cell.sum()
    # Second moments of the light: its long axis is the stroke.
    row_row, row_column, column_column = (weight * [rows * rows, rows * columns, columns * columns]).sum((1, 2))
    stroke = np.degrees(0.5 * np.arctan2(2 * row_column, column_column - row_row)) % 180
    difference = (stroke - (degrees + 90) + 90) % 180 - 90
    assert abs(difference) <= 10.5  # a stroke is drawn at the centre of a bin of 20 degrees
    assert max(row_row + column_column - 20, 0) < 5 < row_row + column_column  # a line 14 long, not a blob or a dot


def test_a_vertical_edge_lights_its_own_cells_with_thin_vertical_strokes() -> None:
    target = HogTarget(16, 3)
    picture = target.render(target(step_edge(0))[0], (2, 2))[..., 0]
    assert picture[:, :16].max() == picture[:, 32:].max() == 0
    for row in range(0, 64, 16):
        lit = np.argwhere(picture[row : row + 16, 16:32] > 100)
        height, width = np.ptp(lit, axis=0) + 1
        assert height >= 14
        assert width <= 5


def test_brightness_is_the_positive_channel_mean_relative_to_the_strongest() -> None:
    target = HogTarget(16, 2, cell=16, bins=9)
    values = torch.zeros(3, 9, 2)  # [patch, bin, channel]
    values[0, 4] = torch.tensor([8.0, 4.0])
    values[1, 4] = torch.tensor([6.0, -3.0])
    values[2, 4] = torch.tensor([1.0, -9.0])
    values[2, 0] = float("nan")
    picture = target.render(values.reshape(3, 18), (1, 3))
    assert [int(picture[:, column : column + 16].max()) for column in (0, 16, 32)] == [255, 64, 0]


def test_a_flat_image_is_a_black_picture() -> None:
    target = HogTarget(16, 3)
    picture = target.render(target(torch.full((1, 16, 16, 3), 5, dtype=torch.uint8))[0], (1, 1))
    assert picture.shape == (32, 32, 3)
    assert picture.max() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cell": 5}, "cell must be a divisor of patch 16, got 5"),
        ({"patch": 7}, "cell must be a divisor of patch 7, got 3"),
        ({"patch": 1}, "cell must be a divisor of patch 1, got 0"),
        ({"bins": 181}, "bins must be at most 180, got 181"),
    ],
)
def test_bad_settings_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HogTarget(**{"patch": 16, "channels": 3, **arguments})


def test_images_of_another_size_are_named() -> None:
    target = HogTarget(16, 3)
    with pytest.raises(ValueError, match="multiples of patch 16, got 16 x 24"):
        target(random_images(1, 16, 24, 3))
