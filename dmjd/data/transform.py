"""The interface of a training transform: from opened images to the batch of a step, with draws keyed by sample ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from dmjd.data.batch import Batch


class Draws(Protocol):
    """The random draws of some samples."""

    def cut(self, row: int, image: Any) -> tuple[Tensor, ...]:
        """The view of sample ``sample_ids[row]`` of an opened image. Raises BadImage if it cannot be used."""
        ...


class Transform(Protocol):
    """The random transform of training images. Draws are a pure function of (seed, epoch, sample id)."""

    def draw(self, sample_ids: Tensor, key: Tensor) -> Draws:
        """Draw for ``sample_ids``, int64 ``[B]``; ``key`` from :func:`dmjd.ops.philox.make_key`."""
        ...

    def batch(self, views: Sequence[tuple[Tensor, ...]], sample_ids: Tensor, labels: Sequence[int]) -> Batch:
        """The batch of views that :meth:`Draws.cut` has returned."""
        ...

    def empty(self, count: int, channels: int) -> Batch:
        """A batch of ``count`` black images with sample id 0, without annotations."""
        ...

    def nbytes(self, count: int, channels: int) -> int:
        """Size of a batch of ``count`` images in bytes; an upper bound where it depends on the images."""
        ...
