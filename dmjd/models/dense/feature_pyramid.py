"""Feature pyramids of detection: five maps of one width, each of half the resolution of the one before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork

from dmjd.ops._lib import without_autocast


class LayerNorm2d(nn.LayerNorm):
    """Layer normalisation of each pixel over the channels of ``[B, C, H, W]``: detectron2's "LN".

    It computes in float32 inside its kernel at any precision, and keeps its input in the dtype that it has between
    convolutions. Autocast would keep float32 copies, 0.2 GiB for an image of 1024 px. Scale and shift are rounded to
    that dtype, as the weights of the convolutions are.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (parameter.to(x.dtype) for parameter in (self.weight, self.bias))
        with without_autocast(x.device.type):
            x = torch.native_layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, weight, bias, self.eps)[0]
        return x.permute(0, 3, 1, 2)


def _convolution(inputs: int, outputs: int, side: int) -> nn.Module:
    return Conv2dNormActivation(inputs, outputs, side, norm_layer=LayerNorm2d, activation_layer=None)


class SimpleFeaturePyramid(nn.Module):
    """Pyramid from one map (Li et al. 2022, ViTDet): x4, x2, x1, x1/2, each with a 1x1 and a 3x3 convolution.

    ``pyramid(maps)`` reads the last map, ``[B, width, h, w]``, and returns five, ``[B, channels, ...]``: the fifth is
    every other pixel of the fourth.

    Args:
        width: channels of the map. stride: its stride in pixels.

    Attributes:
        strides: of the five maps in pixels.
    """

    def __init__(self, width: int, stride: int, channels: int) -> None:
        super().__init__()
        self.strides = [stride * factor for factor in (0.25, 0.5, 1, 2, 4)]
        resample: list[tuple[list[nn.Module], int]] = [
            (
                [
                    nn.ConvTranspose2d(width, width // 2, 2, 2),
                    LayerNorm2d(width // 2),
                    nn.GELU(),
                    nn.ConvTranspose2d(width // 2, width // 4, 2, 2),
                ],
                width // 4,
            ),
            ([nn.ConvTranspose2d(width, width // 2, 2, 2)], width // 2),
            ([], width),
            ([nn.MaxPool2d(2, 2)], width),
        ]
        self.stages = nn.ModuleList(
            nn.Sequential(*layers, _convolution(inner, channels, 1), _convolution(channels, channels, 3))
            for layers, inner in resample
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        found = [stage(maps[-1]) for stage in self.stages]
        return [*found, _subsample(found[-1])]


class FeaturePyramid(nn.Module):
    """FPN (Lin et al. 2017) over the maps of a backbone with stages, with layer normalisation.

    Of a backbone with maps at strides 4, 8 and 16 alone, as ConvViT, the last one is max-pooled to stride 32.
    Arguments, result and ``strides`` as for :class:`SimpleFeaturePyramid`.

    Args:
        widths: channels of the maps, three or four.
    """

    def __init__(self, widths: Sequence[int], channels: int) -> None:
        super().__init__()
        self.strides = [4.0, 8.0, 16.0, 32.0, 64.0]
        widths = [*widths, widths[-1]][:4]
        self.network = FeaturePyramidNetwork(widths, channels, norm_layer=LayerNorm2d)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        if len(maps) == 3:
            maps = [*maps, F.max_pool2d(maps[-1], 2)]
        found = list(self.network({str(index): each for index, each in enumerate(maps)}).values())
        return [*found, _subsample(found[-1])]


def _subsample(x: Tensor) -> Tensor:
    return F.max_pool2d(x, kernel_size=1, stride=2)
