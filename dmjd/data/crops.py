"""Random and evaluation crops, and their resampling to the training size.

Crops follow torchvision's RandomResizedCrop (Szegedy et al., 2015), but every draw is keyed by (seed, epoch, sample
id), so a crop does not depend on the batch or the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from torch import Tensor

from dmjd.data.augment import RandAugment, apply
from dmjd.data.batch import Batch
from dmjd.data.dataset import Box, InMemory, OpenImage, Pixels, Size
from dmjd.ops.philox import Domain, keyed_uniform

Range = tuple[float, float]

ATTEMPTS = 10
_GROUP = 4
"""Images for each width and height of boxes from which on :func:`_resize_boxes` is faster than one image at a time."""


@dataclass(frozen=True)
class RandomResizedCrop:
    """The random crop of training images: a box of each, resampled to one size.

    Args:
        size: (height, width) of the crops.
        scale: least and greatest area of a box, as fractions of the image's.
        ratio: least and greatest width / height of a box.
        single_draw: a first attempt that is larger than the image is cut to it, as in BYOL and MAE's linear probe.
        interpolation: "bicubic" or "bilinear", antialiased.
        second_size: (height, width) of a second resampling of the same box, for a target that reads another size.
        augment: applied to the resampled crop, and not to the second one.
    """

    size: Size
    scale: Range = (0.2, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    single_draw: bool = False
    interpolation: str = "bicubic"
    second_size: Size | None = None
    augment: RandAugment | None = None

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes that :meth:`cut` returns: ``size``, and ``second_size`` if it is set."""
        return (self.size,) if self.second_size is None else (self.size, self.second_size)

    def batch(self, views: Sequence[tuple[Tensor, ...]], sample_ids: Tensor, labels: Sequence[int]) -> Batch:
        """See :class:`~dmjd.data.transform.Transform`, as for the next two."""
        return Batch.of(views, sample_ids, labels)

    def empty(self, count: int, channels: int) -> Batch:
        return Batch.empty(count, self.sizes, channels)

    def nbytes(self, count: int, channels: int) -> int:
        return Batch.nbytes(count, self.sizes, channels)

    def draw(self, sample_ids: Tensor, key: Tensor) -> CropDraws:
        """Draw the crops of ``sample_ids``, int64 ``[B]``; ``key`` from :func:`dmjd.ops.philox.make_key`."""
        return CropDraws(self, sample_ids, key)

    def cut(self, image: OpenImage, box: Box) -> tuple[Tensor, ...]:
        """The pixels of ``box``, decoded once and resampled to each of :attr:`sizes`; to the second by Lanczos.

        Args:
            image: may decode the box at half size if it is then still as large as each of the sizes.
            box: top, left, height, width, inside the image.

        Returns:
            uint8 ``[h, w, C]`` each; shares memory with ``image`` where nothing is resampled.

        Raises:
            BadImage: if the pixels cannot be decoded.
        """
        heights, widths = zip(*self.sizes, strict=True)
        pixels = image.region(box, (max(heights), max(widths)))
        first = _resize(pixels, self.size, self.interpolation)
        return (first,) if self.second_size is None else (first, _lanczos(pixels, self.second_size))


class CropDraws:
    """One random box per sample: area uniform in ``scale``, log aspect ratio uniform in ``ratio``, position uniform.

    The first of ten attempts that fits is used; if none fits, the largest central box of an allowed ratio. Attempt a
    uses random words 4 a .. 4 a + 3 of the sample: area, ratio, top, left. The words are drawn for the whole batch, the
    box once the size of the image is known. Arguments as for :meth:`RandomResizedCrop.draw`.
    """

    def __init__(self, crop: RandomResizedCrop, sample_ids: Tensor, key: Tensor) -> None:
        uniform = keyed_uniform(sample_ids, 4 * ATTEMPTS, key=key, domain=Domain.CROP)
        self._uniform = uniform.view(-1, ATTEMPTS, 4).numpy()
        self._operations = None if crop.augment is None else crop.augment.draw(sample_ids, key)
        self._crop = crop

    def box(self, row: int, height: int, width: int) -> Box:
        """The box of sample ``sample_ids[row]`` in an image of ``height`` x ``width`` pixels, each at least 1."""
        scale, ratio = self._crop.scale, self._crop.ratio
        low, high = math.log(ratio[0]), math.log(ratio[1])
        for u_area, u_ratio, u_top, u_left in self._uniform[row].tolist():
            area = height * width * (scale[0] + u_area * (scale[1] - scale[0]))
            aspect = math.exp(low + u_ratio * (high - low))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if self._crop.single_draw:
                w, h = max(1, min(w, width)), max(1, min(h, height))
            if 0 < w <= width and 0 < h <= height:
                return math.floor(u_top * (height - h + 1)), math.floor(u_left * (width - w + 1)), h, w
        h = max(1, min(height, round(width / ratio[0])))
        w = max(1, min(width, round(height * ratio[1])))
        return (height - h) // 2, (width - w) // 2, h, w

    def cut(self, row: int, image: OpenImage) -> tuple[Tensor, ...]:
        """The crop of sample ``sample_ids[row]`` of ``image``, augmented; see :meth:`RandomResizedCrop.cut`."""
        first, *second = self._crop.cut(image, self.box(row, *image.size))
        return self._augmented(row, first), *second

    def cut_all(self, images: Pixels) -> list[tuple[Tensor, ...]]:
        """:meth:`cut` of every sample, ``images`` being uint8 ``[B, H, W, C]``, at least one: the same bits, and of a
        batch of 1024 small images in a third of the time."""
        boxes = [self.box(row, *images.shape[1:3]) for row in range(len(images))]
        groups = sum(len(set(sides)) for sides in list(zip(*boxes, strict=True))[2:])
        crops: Iterable[tuple[Tensor, ...]]
        if self._crop.second_size is None and len(images) >= _GROUP * groups:
            crops = zip(_resize_boxes(images, np.array(boxes), self._crop.size, self._crop.interpolation), strict=True)
        else:
            crops = map(self._crop.cut, map(InMemory, images), boxes)
        return [(self._augmented(row, first), *second) for row, (first, *second) in enumerate(crops)]

    def _augmented(self, row: int, crop: Tensor) -> Tensor:
        return crop if self._operations is None else apply(self._operations[row], crop)


def _resize_boxes(images: Pixels, boxes: npt.NDArray[np.int64], size: Size, interpolation: str) -> Tensor:
    """:func:`_resize` of a box of each image.

    Torch resamples uint8 along rows, rounds, and then along columns. So boxes of one width are resampled along rows in
    one call, stacked below each other, and boxes of one height along columns, side by side.

    Args:
        images: uint8 ``[B, H, W, C]``.
        boxes: ``[B, 4]``, as :data:`dmjd.data.dataset.Box`.

    Returns:
        uint8 ``[B, h, w, C]``.
    """
    count, height, _, channels = images.shape
    top, left, heights, widths = boxes.T
    wide = np.empty((count, height, size[1], channels), np.uint8)
    for width in np.unique(widths).tolist():
        rows = np.flatnonzero(widths == width)
        parts = np.moveaxis(sliding_window_view(images, width, axis=2), -1, 3)[rows, :, left[rows]]
        resized = _resize(parts.reshape(-1, width, channels), (len(rows) * height, size[1]), interpolation)
        wide[rows] = resized.numpy().reshape(-1, height, size[1], channels)
    crops = np.empty((count, *size, channels), np.uint8)
    for height in np.unique(heights).tolist():
        rows = np.flatnonzero(heights == height)
        parts = np.moveaxis(sliding_window_view(wide, height, axis=1), -1, 2)[rows, top[rows]]
        side_by_side = np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(height, -1, channels)
        resized = _resize(side_by_side, (size[0], len(rows) * size[1]), interpolation)
        crops[rows] = resized.numpy().reshape(size[0], -1, size[1], channels).swapaxes(0, 1)
    return torch.from_numpy(crops)


def _lanczos(pixels: Pixels, size: Size) -> Tensor:
    """Resample with Pillow's Lanczos filter, as BEiT does for its tokenizer; torch 2.11 has none."""
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
    # unsqueeze before permute gives channels_last strides, for which torch's uint8 kernel is 3x faster.
    resized = F.interpolate(tensor.unsqueeze(0).permute(0, 3, 1, 2), size, mode=interpolation, antialias=True)
    return resized.permute(0, 2, 3, 1).squeeze(0)


def evaluation_view(image: OpenImage, size: Size, crop_pct: float = 1.0) -> Tensor:
    """The central crop of ``size``, after a resize in which ``size`` spans ``crop_pct`` of the shorter side.

    Args:
        image: decoded as a whole, at full size.
        size: (height, width) of the result.
        crop_pct: in (0, 1]; 0.875 is ImageNet's 224 of 256.

    Returns:
        uint8 ``[h, w, C]``; the image itself if it has that size and ``crop_pct`` is 1.

    Raises:
        BadImage: if the pixels cannot be decoded.
    """
    height, width = image.size
    part = Fraction(str(crop_pct))  # exact: in floating point 224 / 0.875 may become 257
    cover_h, cover_w = (math.ceil(side / part) for side in size)
    factor = max(Fraction(cover_h, height), Fraction(cover_w, width))
    resized = _resize(image.region((0, 0, height, width)), (round(height * factor), round(width * factor)))
    top, left = (resized.shape[0] - size[0]) // 2, (resized.shape[1] - size[1]) // 2
    return resized[top : top + size[0], left : left + size[1]]
