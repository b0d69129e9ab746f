"""What a loader hands to a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from dmjd.data.dataset import Size


class Batch(NamedTuple):
    """One step's unique images. A named tuple, so that torch's loader can pin it.

    images: uint8 ``[B, H, W, C]``, cropped, not yet flipped or normalised.
    sample_ids: int64 ``[B]``, stable over epochs; they key every random draw of the sample.
    labels: int64 ``[B]``, -1 where the data set has none. Never seen by pre-training.
    second: uint8 ``[B, h, w, C]``, the same crops at the size that a target reads; empty where it reads ``images``.
    """

    images: Tensor
    sample_ids: Tensor
    labels: Tensor
    second: Tensor = torch.empty(0, dtype=torch.uint8)

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """``change`` of every tensor."""
        return Batch(*(change(field) for field in self))

    @classmethod
    def empty(cls, count: int, sizes: Sequence[Size], channels: int) -> Batch:
        """``count`` black images, all of them sample 0; ``sizes`` as :class:`dmjd.data.crops.RandomResizedCrop` has."""
        images, *second = (torch.zeros(count, *each, channels, dtype=torch.uint8) for each in sizes)
        return cls(images, torch.zeros(count, dtype=torch.int64), torch.full((count,), -1), *second)

    @classmethod
    def of(cls, views: Sequence[tuple[Tensor, ...]], sample_ids: Tensor, labels: Sequence[int]) -> Batch:
        """A batch of images, each of them its view, uint8 ``[H, W, C]``, or its view and the second crop."""
        images, *second = (torch.stack(column) for column in zip(*views, strict=True))
        return cls(images, sample_ids.clone(), torch.tensor(labels), *second)

    @staticmethod
    def nbytes(count: int, sizes: Sequence[Size], channels: int) -> int:
        """Bytes of a batch; arguments as for :meth:`empty`."""
        ids_and_labels = 2 * 8
        return count * (sum(height * width for height, width in sizes) * channels + ids_and_labels)

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``; the copy is asynchronous from pinned memory."""
        return self.map(lambda field: field.to(device, non_blocking=True))

    def split(self, parts: int) -> list[Batch]:
        """``parts`` micro-batches of equal size, in order."""
        assert self.images.shape[0] % parts == 0, "the configuration checks that accumulation divides the batch"
        size = self.images.shape[0] // parts
        return [self.map(itemgetter(slice(start, start + size))) for start in range(0, size * parts, size)]
