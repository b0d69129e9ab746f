"""What a loader hands to a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """One step's unique images. A named tuple, so that torch's loader can pin it.

    images: uint8 ``[B, H, W, C]``, cropped, not yet flipped or normalised.
    sample_ids: int64 ``[B]``, stable over epochs; they key every random draw of the sample.
    labels: int64 ``[B]``, -1 where the data set has none. Never seen by pre-training.
    """

    images: Tensor
    sample_ids: Tensor
    labels: Tensor

    @classmethod
    def empty(cls, count: int, size: Sequence[int], channels: int) -> Batch:
        """``count`` black images of (height, width) ``size``, all of them sample 0."""
        images = torch.zeros(count, *size, channels, dtype=torch.uint8)
        return cls(images, torch.zeros(count, dtype=torch.int64), torch.full((count,), -1))

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``; the copy is asynchronous from pinned memory."""
        return Batch(*(field.to(device, non_blocking=True) for field in self))

    def split(self, parts: int) -> list[Batch]:
        """``parts`` micro-batches of equal size, in order."""
        assert self.images.shape[0] % parts == 0, "the configuration checks that accumulation divides the batch"
        return [Batch(*fields) for fields in zip(*(field.chunk(parts) for field in self), strict=True)]
