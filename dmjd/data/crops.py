"""Which part of an image a sample shows, and its resampling to the training size.

Crops follow torchvision's RandomResizedCrop (Szegedy et al., 2015), but every draw is keyed by (seed, epoch, sample
id), so a crop does not depend on the batch or the process that makes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dmjd.data.dataset import Box, OpenImage, Pixels, Size
from dmjd.ops.philox import Domain, keyed_uniform

Range = tuple[float, float]

ATTEMPTS = 10

INTERPOLATIONS = ("bicubic", "bilinear")
"""Ways to resample a box, both antialiased."""


@dataclass(frozen=True)
class RandomResizedCrop:
    """How training images are cropped: a random box of each, resampled to one size for all.

    Args:
        size: (height, width) of the crops.
        scale: least and greatest area of a box, as parts of the image's.
        ratio: least and greatest width / height of a box.
        interpolation: one of :data:`INTERPOLATIONS`.
        second_size: (height, width) at which every crop is wanted again, for a target that reads another size; None for
            none.

    Raises:
        ValueError: naming the argument, if a size, a range or the interpolation is none.
    """

    size: Size
    scale: Range = (0.2, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    interpolation: str = "bicubic"
    second_size: Size | None = None

    def __post_init__(self) -> None:
        # Each sentence begins with the argument, in whose place training_crop puts the configuration's key.
        for name, size in (("size", self.size), ("second_size", self.second_size)):
            if size is not None and (len(size) != 2 or min(size) < 1):
                raise ValueError(f"{name} must be a height and a width of at least 1 pixel, got {list(size)}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be 0 < least <= greatest <= 1, got {list(self.scale)}")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ValueError(f"ratio must be 0 < least <= greatest, got {list(self.ratio)}")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation must be {' or '.join(INTERPOLATIONS)}, got {self.interpolation!r}")

    @property
    def sizes(self) -> tuple[Size, ...]:
        """``size``, and ``second_size`` if there is one: what :meth:`cut` makes of a box."""
        return (self.size,) if self.second_size is None else (self.size, self.second_size)

    def draw(self, sample_ids: Tensor, key: Tensor) -> CropDraws:
        """The crops of samples int64 ``[B]`` under ``key``, of :func:`dmjd.ops.philox.make_key`."""
        return CropDraws(self, sample_ids, key)

    def cut(self, image: OpenImage, box: Box) -> tuple[Tensor, ...]:
        """The pixels of ``box``, decoded once, at each of :attr:`sizes`; the second by Lanczos.

        Args:
            image: may halve the box while decoding, if it then still is as large as each size.
            box: top, left, height, width, inside the image.

        Returns:
            uint8 ``[h, w, C]`` each; shares memory with ``image`` if nothing had to be resampled.

        Raises:
            BadImage: if the pixels cannot be decoded.
        """
        heights, widths = zip(*self.sizes, strict=True)
        pixels = image.region(box, (max(heights), max(widths)))
        first = _resize(pixels, self.size, self.interpolation)
        return (first,) if self.second_size is None else (first, _lanczos(pixels, self.second_size))


class CropDraws:
    """One random box per sample: area uniform in ``scale``, log aspect ratio uniform in ``ratio``, position uniform.

    The first of ten attempts that fits is taken; if none fits, the largest central box whose ratio is allowed. Attempt
    ``a`` uses words ``4 a .. 4 a + 3`` of the sample: area, ratio, top, left. The words are drawn for a batch at once,
    the boxes when a header has told the size of an image. Arguments as for :meth:`RandomResizedCrop.draw`.
    """

    def __init__(self, crop: RandomResizedCrop, sample_ids: Tensor, key: Tensor) -> None:
        uniform = keyed_uniform(sample_ids, 4 * ATTEMPTS, key=key, domain=Domain.CROP)
        self._uniform = uniform.view(-1, ATTEMPTS, 4).numpy()
        self._crop = crop

    def box(self, row: int, height: int, width: int) -> Box:
        """The box of sample ``sample_ids[row]`` in an image of ``height`` x ``width`` pixels, each at least 1."""
        scale, ratio = self._crop.scale, self._crop.ratio
        low, high = math.log(ratio[0]), math.log(ratio[1])
        for u_area, u_ratio, u_top, u_left in self._uniform[row].tolist():
            area = height * width * (scale[0] + u_area * (scale[1] - scale[0]))
            aspect = math.exp(low + u_ratio * (high - low))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                return math.floor(u_top * (height - h + 1)), math.floor(u_left * (width - w + 1)), h, w
        h = max(1, min(height, round(width / ratio[0])))
        w = max(1, min(width, round(height * ratio[1])))
        return (height - h) // 2, (width - w) // 2, h, w

    def cut(self, row: int, image: OpenImage) -> tuple[Tensor, ...]:
        """The crop of sample ``sample_ids[row]`` from ``image``, as :meth:`RandomResizedCrop.cut` has it.

        What :meth:`dmjd.data.batch.Batch.of` takes of an image.
        """
        return self._crop.cut(image, self.box(row, *image.size))


def _lanczos(pixels: Pixels, size: Size) -> Tensor:
    """By Pillow, whose filter BEiT's codes were made with; older versions of torch have none."""
    resized = np.asarray(
        Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).resize(
            (size[1], size[0]), Image.Resampling.LANCZOS
        )
    )
    return torch.from_numpy(resized.reshape(*size, pixels.shape[-1]).copy())


def _resize(pixels: Pixels, size: Size, interpolation: str = "bicubic") -> Tensor:
    tensor = torch.from_numpy(pixels)
    if tensor.shape[:2] == size:
        return tensor
    # The batch axis comes before the permutation, so that strides say channels_last: torch's uint8 kernel is 3x faster.
    resized = F.interpolate(tensor.unsqueeze(0).permute(0, 3, 1, 2), size, mode=interpolation, antialias=True)
    return resized.permute(0, 2, 3, 1).squeeze(0)


def evaluation_view(image: OpenImage, size: Size, crop_pct: float = 1.0) -> Tensor:
    """The central ``size`` of the image, resized so that ``size`` spans ``crop_pct`` of its shorter side.

    Args:
        image: is decoded as a whole, at its own size.
        size: (height, width) of the result.
        crop_pct: in (0, 1]; 0.875 is ImageNet's 224 of 256.

    Returns:
        uint8 ``[h, w, C]``; the image itself if it has that size and ``crop_pct`` is 1.

    Raises:
        ValueError: if ``crop_pct`` is outside (0, 1].
        BadImage: if the pixels cannot be decoded.
    """
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct must be in (0, 1], got {crop_pct}")
    height, width = image.size
    part = Fraction(str(crop_pct))  # exact, so that 224 / 0.875 never becomes 257
    cover_h, cover_w = (math.ceil(side / part) for side in size)
    factor = max(Fraction(cover_h, height), Fraction(cover_w, width))
    resized = _resize(image.region((0, 0, height, width)), (round(height * factor), round(width * factor)))
    top, left = (resized.shape[0] - size[0]) // 2, (resized.shape[1] - size[1]) // 2
    return resized[top : top + size[0], left : left + size[1]]
