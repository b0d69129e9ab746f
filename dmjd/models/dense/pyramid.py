"""Four maps at strides 4, 8, 16 and 32 from an encoder's feature maps, as UPerNet reads them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dmjd.models.dense.batch_norm import BatchNorm2d

LEVELS = 4


class ViTPyramid(nn.Module):
    """Maps of four blocks at one stride, resampled by 4, 2, 1 and 1/2, as in BEiT's and MAE's segmentation.

    Parameters have BEiT's names (``fpn1``, ``fpn2``).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widths = (width,) * LEVELS
        self.fpn1 = nn.Sequential(
            nn.ConvTranspose2d(width, width, 2, stride=2),
            BatchNorm2d(width),
            nn.GELU(),
            nn.ConvTranspose2d(width, width, 2, stride=2),
        )
        self.fpn2 = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.fpn4 = nn.MaxPool2d(2)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Four maps ``[B, width, h, w]`` -> four maps of 4, 2, 1 and 1/2 times their size."""
        first, second, third, fourth = maps
        return [self.fpn1(first), self.fpn2(second), third, self.fpn4(fourth)]


class ConvViTPyramid(nn.Module):
    """The three stages, and the last one through a 3x3 convolution of stride 2, as in ConvMAE's segmentation."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        last = widths[-1]
        self.widths = (*widths, last)
        self.fpn4 = nn.Sequential(nn.Conv2d(last, last, 3, stride=2, padding=1), BatchNorm2d(last), nn.GELU())

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps at strides 4, 8 and 16 -> at strides 4, 8, 16 and 32."""
        return [*maps, self.fpn4(maps[-1])]


class NormPyramid(nn.Module):
    """The four stages of a Swin, each with a LayerNorm over its channels, as in its authors' segmentation."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Maps ``[B, C, h, w]``, each of its width, -> the same shapes."""
        normed = (norm(x.permute(0, 2, 3, 1)) for norm, x in zip(self.norms, maps, strict=True))
        return [x.permute(0, 3, 1, 2) for x in normed]


def build_pyramid(map_widths: Sequence[int]) -> ViTPyramid | ConvViTPyramid | NormPyramid:
    """The pyramid for :attr:`~dmjd.models.masked_image_model.Encoder.map_widths`: of a ViT (one width), an encoder with
    stages at strides 4, 8 and 16, or one with a fourth."""
    if len(map_widths) == 1:
        return ViTPyramid(map_widths[0])
    return ConvViTPyramid(map_widths) if len(map_widths) == LEVELS - 1 else NormPyramid(map_widths)
