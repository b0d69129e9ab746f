from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmjd.ops.images import horizontal_flip, normalise, patchify, unpatchify

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def random_images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def test_flip_mirrors_the_chosen_samples_only() -> None:
    images = random_images(4, 6, 5, 3)
    flips = torch.tensor([True, False, True, False])
    flipped = horizontal_flip(images, flips)
    for i, chosen in enumerate(flips.tolist()):
        expected = torch.stack([images[i, :, column] for column in ([4, 3, 2, 1, 0] if chosen else range(5))], dim=1)
        assert torch.equal(flipped[i], expected)
    assert flipped.dtype == torch.uint8
    assert torch.equal(horizontal_flip(flipped, flips), images)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_normalise_equals_the_formula(channels: int) -> None:
    images = random_images(2, 6, 4, channels)
    mean, std = (*MEAN, 0.5)[:channels], (*STD, 0.25)[:channels]
    result = normalise(images, mean, std, dtype=torch.float64)
    for b, c, row, column in np.ndindex(2, channels, 6, 4):
        expected = (int(images[b, row, column, c]) / 255 - mean[c]) / std[c]
        assert result[b, c, row, column].item() == pytest.approx(expected, abs=1e-15)
    torch.testing.assert_close(normalise(images, mean, std).double(), result, rtol=0, atol=1e-6)


def test_normalise_rounds_once_and_keeps_the_memory_order() -> None:
    images = random_images(2, 6, 4, 3)
    single = normalise(images, MEAN, STD)
    assert single.dtype == torch.float32
    assert single.is_contiguous()
    assert torch.equal(normalise(images, MEAN, STD, dtype=torch.bfloat16), single.bfloat16())


def test_patchify_puts_every_pixel_where_mae_does() -> None:
    patch, height, width, channels = 2, 4, 6, 3
    images = torch.arange(2 * channels * height * width).reshape(2, channels, height, width)
    tokens = patchify(images, patch)
    assert tokens.shape == (2, 6, 12)
    for b, c, row, column in np.ndindex(2, channels, height, width):
        token = row // patch * (width // patch) + column // patch
        value = (row % patch * patch + column % patch) * channels + c
        assert tokens[b, token, value] == images[b, c, row, column]


@pytest.mark.parametrize(("channels", "height", "width", "patch"), [(3, 8, 12, 4), (1, 9, 3, 3), (5, 4, 4, 1)])
def test_unpatchify_inverts_patchify(channels: int, height: int, width: int, patch: int) -> None:
    images = torch.rand(2, channels, height, width)
    tokens = patchify(images, patch)
    assert torch.equal(unpatchify(tokens, (height // patch, width // patch), patch), images)
    assert torch.equal(patchify(images.contiguous(memory_format=torch.channels_last), patch), tokens)


def test_empty_batch() -> None:
    images = torch.empty(0, 8, 12, 3, dtype=torch.uint8)
    assert horizontal_flip(images, torch.empty(0, dtype=torch.bool)).shape == (0, 8, 12, 3)
    tokens = patchify(normalise(images, MEAN, STD), 4)
    assert tokens.shape == (0, 6, 48)
    assert unpatchify(tokens, (2, 3), 4).shape == (0, 3, 8, 12)


def test_the_input_of_a_step_is_one_graph() -> None:
    def prepare(images: Tensor, flips: Tensor) -> Tensor:
        return patchify(normalise(horizontal_flip(images, flips), MEAN, STD), 4)

    torch.compiler.reset()
    compiled = torch.compile(prepare, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3):
        images, flips = random_images(batch, 8, 12, 3), torch.arange(batch) % 2 == 0
        torch.testing.assert_close(compiled(images, flips), prepare(images, flips), rtol=0, atol=0)


UINT8 = torch.zeros(2, 4, 6, 3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [
        (horizontal_flip, (UINT8, torch.zeros(2)), TypeError, "flips must be bool, got torch.float32"),
        (horizontal_flip, (UINT8, torch.zeros(3, dtype=torch.bool)), ValueError, r"flips \[B\], got .* and \(3,\)"),
        (normalise, (UINT8.float(), MEAN, STD), TypeError, "images must be uint8, got torch.float32"),
        (normalise, (UINT8, MEAN, STD, torch.int32), TypeError, "dtype must be floating, got torch.int32"),
        (normalise, (UINT8[0], MEAN, STD), ValueError, r"images must be \[B, H, W, C\], got shape \(4, 6, 3\)"),
        (normalise, (UINT8, {0.4, 0.5, 0.6}, STD), TypeError, "mean must be a sequence of numbers"),
        (normalise, (UINT8, torch.zeros(3, device="meta"), STD), TypeError, "mean must be a sequence of numbers"),
        (normalise, (UINT8, (0.5,), STD), ValueError, "each of the 3 channels, got 1 and 3"),
        (normalise, (UINT8, MEAN, (0.5,) * 4), ValueError, "each of the 3 channels, got 3 and 4"),
        (normalise, (UINT8, MEAN, (0.5, 0.0, 0.5)), ValueError, "std must be positive"),
        (patchify, (torch.zeros(3, 4, 4), 2), ValueError, r"images must be \[B, C, H, W\], got shape \(3, 4, 4\)"),
        (patchify, (torch.zeros(1, 3, 4, 6), 4), ValueError, "patch must divide image height and width 4 x 6, got 4"),
        (patchify, (torch.zeros(1, 3, 4, 6), 0), ValueError, "patch must divide image height and width 4 x 6, got 0"),
        (unpatchify, (torch.zeros(1, 5, 12), (2, 3), 2), ValueError, r"must be \[B, 6, dim\] for grid 2 x 3"),
        (unpatchify, (torch.zeros(1, 6, 10), (2, 3), 2), ValueError, "must divide the token size 10, got patch 2"),
    ],
)
def test_bad_input_is_named(call: Any, arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*arguments)
