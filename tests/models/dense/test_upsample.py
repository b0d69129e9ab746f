"""Bilinear interpolation with a backward pass of its own: against PyTorch's, whose gradient is exact on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.models.dense.upsample import upsample


def expected(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x, size, mode="bilinear", align_corners=False)


@pytest.mark.parametrize("size", [(12, 20), (7, 11), (3, 5), (2, 9)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_and_gradients_are_pytorchs(size: tuple[int, int], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, 5, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    weight = torch.randn(2, 4, *size, dtype=torch.float64).contiguous(memory_format=layout)
    found = upsample(x, size)
    assert torch.equal(found, expected(x, size))
    (gradient,) = torch.autograd.grad(found, x, weight)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected(x, size), x, weight)[0])
    assert gradient.is_contiguous(memory_format=layout)


def test_a_gradient_that_was_expanded_is_summed() -> None:
    x = torch.randn(1, 2, 3, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(upsample(x, (6, 6)).sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 4.0))


def test_autocast_does_not_round_a_gradient_in_float32() -> None:
    x = torch.randn(1, 3, 4, 4, requires_grad=True)
    weight = torch.randn(1, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        (gradient,) = torch.autograd.grad(upsample(x, (16, 16)), x, weight)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected(x, (16, 16)), x, weight)[0])
