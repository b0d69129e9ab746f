from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dmjd.positions import sincos_positions


@pytest.mark.parametrize("grid", [(3, 5), (5, 3), (1, 4), (4, 1), (14, 14)])
@pytest.mark.parametrize("dim", [4, 24])
def test_every_value_equals_maes_formula(grid: tuple[int, int], dim: int) -> None:
    height, width = grid
    table = sincos_positions(grid, dim)
    assert table.shape == (height * width, dim)
    assert table.dtype == torch.float32
    expected = np.empty((height * width, dim))
    quarter = dim // 4
    for row, column, i in np.ndindex(height, width, quarter):
        omega = 1 / 10000 ** (i / quarter)
        token = row * width + column
        expected[token, i] = math.sin(column * omega)
        expected[token, quarter + i] = math.cos(column * omega)
        expected[token, 2 * quarter + i] = math.sin(row * omega)
        expected[token, 3 * quarter + i] = math.cos(row * omega)
    np.testing.assert_array_equal(table.numpy(), expected.astype(np.float32))


def test_first_half_knows_the_column_only_and_second_half_the_row_only() -> None:
    table = sincos_positions((3, 5), 16).unflatten(0, (3, 5))
    columns, rows = table[..., :8], table[..., 8:]
    assert torch.equal(columns, columns[:1].expand_as(columns))
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    assert len(columns[0].unique(dim=0)) == 5
    assert len(rows[:, 0].unique(dim=0)) == 3


def test_positions_do_not_depend_on_how_far_the_grid_goes_on() -> None:
    small, large = sincos_positions((2, 3), 16), sincos_positions((6, 7), 16)
    assert torch.equal(small.unflatten(0, (2, 3)), large.unflatten(0, (6, 7))[:2, :3])


@pytest.mark.parametrize("dim", [30, 6, 1])
def test_width_must_be_a_multiple_of_four(dim: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 4, got {dim}$"):
        sincos_positions((2, 2), dim)
