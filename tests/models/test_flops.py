"""FLOPs against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from dmjd.models.flops import count_flops
from dmjd.models.objective import Losses
from dmjd.ops.mask_plan import mask_plan
from dmjd.ops.masked_depthwise_conv2d import masked_depthwise_conv2d
from dmjd.ops.masks import draw_masks


class SumOf(nn.Module):
    """An objective that is the sum of a layer's output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Losses:
        total = self.layer(*inputs).sum()
        return Losses(total, total, None)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_vit_block_takes_what_arithmetic_says(device: str) -> None:
    rows, tokens, width, ratio = 3, 10, 32, 4
    block = SumOf(Block(width, num_heads=4, mlp_ratio=ratio, qkv_bias=True)).to(device)
    x = torch.zeros(rows, tokens, width, device=device, requires_grad=True)
    linear = 2 * rows * tokens * width**2 * (3 + 1 + 2 * ratio)  # qkv, projection, two layers of the MLP
    attention = 2 * 2 * rows * tokens**2 * width  # scores, and values weighted by them
    assert count_flops(block, (x,)) == 3 * (linear + attention)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in block.parameters())


class Convolution(nn.Module):
    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, size, size))

    def forward(self, x: Tensor, visible: Tensor, restore: Tensor) -> Tensor:
        return masked_depthwise_conv2d(x, visible, restore, self.weight, None, grid=(4, 4), q=2)


def test_the_depthwise_convolution_counts_its_taps() -> None:
    views = draw_masks(torch.arange(3), mask_plan((4, 4), views=2, mask_ratio=0.5, pattern="uniform"), seed=0, epoch=0)
    channels, visible = 8, views.visible.shape[-1]
    x = torch.zeros(6, visible, 4, channels, requires_grad=True)
    outputs = 6 * visible * 4 * channels
    counted = count_flops(SumOf(Convolution(channels, 5)), (x, views.visible, views.restore))  # type: ignore[arg-type]
    assert counted == 3 * 2 * outputs * 5 * 5
