"""One batch of training images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from dmjd.data.dataset import Size


class Batch(NamedTuple):
    """The unique images of one step. A named tuple, which torch's loader can pin.

    images: uint8 ``[B, H, W, C]``, cropped, neither flipped nor normalised; flipped with the annotations of
        segmentation and detection.
    sample_ids: int64 ``[B]``, stable over epochs; keys of every random draw.
    labels: int64 ``[B]``, -1 without labels; of detection ``[B, M]``, -1 in the places without an object. Not used by
        pre-training.
    second: uint8 ``[B, h, w, C]``, the same crops at the size of the target; empty if the target reads ``images``.
    maps: of segmentation, uint8 ``[B, H, W]``: the class of each pixel, 255 for none; empty elsewhere.
    boxes: of detection, float32 ``[B, M, 4]``: (x1, y1, x2, y2) in pixels of ``images``; M >= 1 is the largest number
        of objects in an image of the batch.
    masks: of detection, uint8 ``[B, M, H, ceil(W / 8)]``: ``numpy.packbits`` of each object's mask along its rows.
    """

    images: Tensor
    sample_ids: Tensor
    labels: Tensor
    second: Tensor = torch.empty(0, dtype=torch.uint8)
    maps: Tensor = torch.empty(0, dtype=torch.uint8)
    boxes: Tensor = torch.empty(0)
    masks: Tensor = torch.empty(0, dtype=torch.uint8)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``change`` to every tensor."""
        return Batch(*(change(field) for field in self))

    @classmethod
    def empty(cls, count: int, sizes: Sequence[Size], channels: int) -> Batch:
        """``count`` black images with sample id 0; ``sizes`` as :attr:`dmjd.data.crops.RandomResizedCrop.sizes`."""
        images, *second = (torch.zeros(count, *each, channels, dtype=torch.uint8) for each in sizes)
        return cls(images, torch.zeros(count, dtype=torch.int64), torch.full((count,), -1), *second)

    @classmethod
    def of(cls, views: Sequence[tuple[Tensor, ...]], sample_ids: Tensor, labels: Sequence[int]) -> Batch:
        """Stack the views of images: of each, the crop, uint8 ``[H, W, C]``, and perhaps the second crop."""
        images, *second = (torch.stack(column) for column in zip(*views, strict=True))
        return cls(images, sample_ids.clone(), torch.tensor(labels), *second)

    @staticmethod
    def nbytes(count: int, sizes: Sequence[Size], channels: int) -> int:
        """Size of a batch in bytes; arguments as for :meth:`empty`."""
        ids_and_labels = 2 * 8
        return count * (sum(height * width for height, width in sizes) * channels + ids_and_labels)

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to ``device``, asynchronously from pinned memory."""
        return self.map(lambda field: field.to(device, non_blocking=True))

    def split(self, parts: int) -> list[Batch]:
        """``parts`` micro-batches of equal size, in order."""
        assert self.images.shape[0] % parts == 0, "build_step checks that grad_accum_steps divides the batch"
        size = self.images.shape[0] // parts
        return [self.map(itemgetter(slice(start, start + size))) for start in range(0, size * parts, size)]
