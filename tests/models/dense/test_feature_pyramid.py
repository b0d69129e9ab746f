"""Feature pyramids against detectron2's written plainly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.models.dense.feature_pyramid import FeaturePyramid, LayerNorm2d, SimpleFeaturePyramid


def random_weights(module: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return {name: value.detach() for name, value in module.named_parameters()}


def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """detectron2's LayerNorm of channels."""
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return weight[:, None, None] * (x - mean) / torch.sqrt(variance + 1e-6) + bias[:, None, None]


def block(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    convolution = weights[f"{name}.0.weight"]
    x = F.conv2d(x, convolution, padding=convolution.shape[-1] // 2)
    return normalised(x, weights[f"{name}.1.weight"], weights[f"{name}.1.bias"])


def test_the_simple_pyramid_is_vitdets() -> None:
    pyramid = SimpleFeaturePyramid(16, 8, 12)
    weights = random_weights(pyramid)
    x = torch.randn(2, 16, 6, 10)

    def up(x: Tensor, name: str) -> Tensor:
        return F.conv_transpose2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride=2)

    four = up(x, "stages.0.0")
    four = F.gelu(normalised(four, weights["stages.0.1.weight"], weights["stages.0.1.bias"]))
    inputs = [up(four, "stages.0.3"), up(x, "stages.1.0"), x, F.max_pool2d(x, 2, 2)]
    expected = []
    for stage, (each, first) in enumerate(zip(inputs, (4, 1, 0, 1), strict=True)):
        each = block(each, weights, f"stages.{stage}.{first}")
        expected.append(block(each, weights, f"stages.{stage}.{first + 1}"))
    expected.append(expected[-1][:, :, ::2, ::2])
    found = pyramid([x])
    assert pyramid.strides == [2, 4, 8, 16, 32]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stages", [3, 4])
def test_fpn_adds_the_coarser_map_to_each_lateral_one(stages: int) -> None:
    widths = [6, 8, 10, 12][:stages]
    pyramid = FeaturePyramid(widths, 12)
    weights = {name.removeprefix("network."): value for name, value in random_weights(pyramid).items()}
    maps = [torch.randn(2, width, 24 // 2**level, 16 // 2**level) for level, width in enumerate(widths)]
    inputs = maps if stages == 4 else [*maps, F.max_pool2d(maps[-1], 2)]
    lateral = [block(each, weights, f"inner_blocks.{level}") for level, each in enumerate(inputs)]
    for level in (2, 1, 0):
        lateral[level] = lateral[level] + F.interpolate(lateral[level + 1], scale_factor=2, mode="nearest")
    expected = [block(each, weights, f"layer_blocks.{level}") for level, each in enumerate(lateral)]
    expected.append(expected[-1][:, :, ::2, ::2])
    found = pyramid(maps)
    assert pyramid.strides == [4, 8, 16, 32, 64]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_norm_computes_in_float32_and_keeps_the_dtype() -> None:
    norm = LayerNorm2d(8)
    weights = random_weights(norm)
    x = (torch.randn(2, 8, 3, 4) + 100).bfloat16()
    found = norm(x)
    assert found.dtype == torch.bfloat16
    expected = normalised(x.double(), weights["weight"].double(), weights["bias"].double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
