"""Large-scale jitter (Ghiasi et al., 2021) of images with objects, and their form in testing.

As detectron2's ResizeScale, FixedSizeCrop and RandomFlip, with draws keyed by (seed, epoch, sample id). Padding is at
the bottom and the right, and grey (128), as FixedSizeCrop's; ViTDet's configuration pads with the mean colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.config.dense import DetectDataConfig
from dmjd.data.batch import Batch
from dmjd.data.dataset import OpenImage, Pixels, Size
from dmjd.data.dense.coco import CocoImage
from dmjd.errors import ConfigError
from dmjd.ops.philox import Domain, keyed_uniform

GREY = 128
"""Value of padding."""

USUAL_OBJECTS = 100
"""Most objects of an image where the data are not known; COCO's training images have at most 93."""

_LEAST_SIDE = 1.0


@dataclass(frozen=True)
class LargeScaleJitter:
    """Resize into ``size`` times a random factor, crop or pad to ``size``, flip at random.

    Boxes are clipped to the crop. Objects without a pixel in it, or with a side below one pixel, are left out; those
    that the crop cuts get the box of their visible pixels.

    Args:
        size: (height, width) of the result.
        scale: least and greatest factor.
        flip: mirror half of the images.
        most_objects: largest number of objects in an image of the data.
    """

    size: Size
    scale: tuple[float, float] = (0.1, 2.0)
    flip: bool = True
    most_objects: int = USUAL_OBJECTS

    @classmethod
    def of(cls, config: DetectDataConfig, most_objects: int = USUAL_OBJECTS) -> LargeScaleJitter:
        """The transform of a configuration. Raises ConfigError if the greatest factor comes first."""
        (height, width), (least, greatest) = config.image_size, config.scale
        if least > greatest:
            raise ConfigError(f"data.scale must be least <= greatest, got [{least}, {greatest}]")
        return cls((height, width), (least, greatest), config.flip, most_objects)

    def draw(self, sample_ids: Tensor, key: Tensor) -> JitterDraws:
        """See :class:`~dmjd.data.transform.Transform`, as for the rest."""
        return JitterDraws(self, sample_ids, key)

    def batch(self, views: Sequence[tuple[Tensor, ...]], sample_ids: Tensor, labels: Sequence[int]) -> Batch:
        most = max(1, *(len(view[1]) for view in views))
        batch = self._padded(len(views), most, torch.stack([view[0] for view in views]), sample_ids.clone())
        for row, (_, boxes, classes, masks) in enumerate(views):
            count = len(classes)
            batch.boxes[row, :count], batch.labels[row, :count], batch.masks[row, :count] = boxes, classes, masks
        return batch

    def empty(self, count: int, channels: int) -> Batch:
        images = torch.zeros(count, *self.size, channels, dtype=torch.uint8)
        return self._padded(count, 1, images, torch.zeros(count, dtype=torch.int64))

    def nbytes(self, count: int, channels: int) -> int:
        """The size with ``most_objects`` objects in each image."""
        (height, width), box_and_label = self.size, 4 * 4 + 8
        objects = self.most_objects * (height * _packed(width) + box_and_label)
        return count * (height * width * channels + 8 + objects)

    def _padded(self, count: int, most: int, images: Tensor, sample_ids: Tensor) -> Batch:
        """A batch with ``most`` places for objects of each image, all of them empty."""
        height, width = self.size
        return Batch(
            images,
            sample_ids,
            torch.full((count, most), -1),
            boxes=torch.zeros(count, most, 4),
            masks=torch.zeros(count, most, height, _packed(width), dtype=torch.uint8),
        )


class JitterDraws:
    """The factor, the place and the flip of each sample. Arguments as for :meth:`LargeScaleJitter.draw`.

    Words 0 and 1 of a sample in ``Domain.CROP``: factor, and place on both axes, as detectron2 draws it.
    """

    def __init__(self, jitter: LargeScaleJitter, sample_ids: Tensor, key: Tensor) -> None:
        self._jitter = jitter
        self._geometry = keyed_uniform(sample_ids, 2, key=key, domain=Domain.CROP).tolist()
        self._flip = keyed_uniform(sample_ids, 1, key=key, domain=Domain.FLIP)[:, 0].tolist()

    def cut(self, row: int, image: CocoImage) -> tuple[Tensor, ...]:
        """Sample ``sample_ids[row]`` of ``image``.

        Returns:
            uint8 ``[H, W, C]``; of the M objects in it, boxes float32 ``[M, 4]``, labels int64 ``[M]``, and masks uint8
            ``[M, H, ceil(W / 8)]``.
        """
        jitter, (u_scale, u_place) = self._jitter, self._geometry[row]
        flip = jitter.flip and self._flip[row] < 0.5
        least, greatest = jitter.scale
        resized = _fitting(image.size, jitter.size, least + u_scale * (greatest - least))
        height, width = min(resized[0], jitter.size[0]), min(resized[1], jitter.size[1])
        top, left = (round(u_place * (whole - part)) for whole, part in zip(resized, (height, width), strict=True))
        pixels = _resize(image, resized)[top : top + height, left : left + width]
        view = _on_square(pixels.flip(1) if flip else pixels, jitter.size)
        return view, *self._objects(image, resized, (top, left, height, width), flip)

    def _objects(
        self, image: CocoImage, resized: Size, part: tuple[int, int, int, int], flip: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes, labels and masks of the objects in ``part`` (top, left, height, width) of the resized image."""
        objects, canvas, (top, left, height, width) = image.objects(), self._jitter.size, part
        scale = np.array((resized[1] / image.size[1], resized[0] / image.size[0]) * 2)
        offset, limit = np.array((left, top) * 2), np.array((width, height) * 2)
        whole = objects.boxes * scale - offset
        inside = whole.clip(0, limit)
        cut = (np.abs(whole - inside) > 1e-3).any(1)
        boxes, labels, masks = [], [], []
        for number in np.flatnonzero(((inside[:, 2:] - inside[:, :2]) >= _LEAST_SIDE).all(1)).tolist():
            box = inside[number]
            # Whole pixels around the box, with one more in case the mask is larger than its box.
            x1, y1 = np.maximum(np.floor(box[:2]).astype(int) - 1, 0).tolist()
            x2, y2 = np.minimum(np.ceil(box[2:]).astype(int) + 1, (width, height)).tolist()
            corners = (np.array((x1, y1, x2, y2)) + offset) / scale
            x_low, y_low, x_high, y_high = corners.tolist()
            mask = objects.masks.render(number, (x_low, y_low, x_high, y_high), (y2 - y1, x2 - x1))
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            if not len(rows):
                continue
            if cut[number]:
                box = box.clip((columns[0] + x1, rows[0] + y1) * 2, (columns[-1] + 1 + x1, rows[-1] + 1 + y1) * 2)
                if ((box[2:] - box[:2]) < _LEAST_SIDE).any():
                    continue
            if flip:
                mask, x1, box = mask[:, ::-1], width - x2, np.array((width - box[2], box[1], width - box[0], box[3]))
            boxes.append(box)
            labels.append(objects.labels[number])
            masks.append(_pack(mask, y1, x1, canvas))
        return (
            torch.from_numpy(np.array(boxes, dtype=np.float32).reshape(-1, 4)),
            torch.from_numpy(np.array(labels, dtype=np.int64)),
            torch.from_numpy(np.array(masks, dtype=np.uint8).reshape(-1, canvas[0], _packed(canvas[1]))),
        )


def test_image(image: OpenImage, size: Size) -> tuple[Tensor, Size]:
    """An image in testing: resized into ``size`` without distortion, and padded to it.

    Returns:
        uint8 ``[H, W, C]`` of ``size``, and the (height, width) of the image in it, from the top left.

    Raises:
        BadImage: if the pixels cannot be decoded.
    """
    resized = _fitting(image.size, size, 1.0)
    return _on_square(_resize(image, resized), size), resized


def _fitting(size: Size, target: Size, factor: float) -> Size:
    """The size of an image of ``size`` that just fits into ``factor`` times ``target``."""
    scale = min(factor * target[0] / size[0], factor * target[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _resize(image: OpenImage, size: Size) -> Tensor:
    """All of ``image``, bilinear and antialiased, uint8 ``[h, w, C]``; large ones are decoded at half size."""
    tensor = torch.from_numpy(image.region((0, 0, *image.size), size))
    if tensor.shape[:2] == size:
        return tensor
    # unsqueeze before permute gives channels_last strides, for which torch's uint8 kernel is 3x faster.
    resized = F.interpolate(tensor.unsqueeze(0).permute(0, 3, 1, 2), size, mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1).squeeze(0)


def _on_square(pixels: Tensor, size: Size) -> Tensor:
    """``pixels`` at the top left of a grey image of ``size``."""
    height, width, channels = pixels.shape
    square = torch.full((*size, channels), GREY, dtype=torch.uint8)
    square[:height, :width] = pixels
    return square


def _packed(width: int) -> int:
    """Bytes of a row of a packed mask."""
    return -(-width // 8)


def _pack(mask: Pixels, top: int, left: int, size: Size) -> Pixels:
    """The bits of a mask of ``size`` that is ``mask`` at (top, left) and 0 elsewhere, uint8 ``[H, ceil(W / 8)]``."""
    height, width = mask.shape
    first, last = left // 8, _packed(left + width)
    aligned = np.zeros((height, 8 * (last - first)), dtype=np.uint8)
    aligned[:, left - 8 * first : left - 8 * first + width] = mask
    packed = np.zeros((size[0], _packed(size[1])), dtype=np.uint8)
    packed[top : top + height, first:last] = np.packbits(aligned, axis=1)
    return packed
