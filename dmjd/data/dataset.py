"""What every data set offers: map-style, indexed by a sample id that is stable over epochs."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from dmjd.errors import BadImage

_log = logging.getLogger("dmjd")

Split = Literal["train", "test"]
Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]
"""Height, width."""
Box = tuple[int, int, int, int]
"""Top, left, height, width; inside the image."""


class OpenImage(Protocol):
    """One image whose size is known and whose pixels are still to be decoded."""

    @property
    def size(self) -> Size: ...

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        """uint8 ``[h, w, C]``: the pixels of ``box``.

        ``at_least`` allows fewer where decoding them is cheaper: a box of twice that size or more, in both directions,
        may come back half as large, and moved by less than a pixel to where the halves begin.

        Raises:
            BadImage: if they cannot be decoded.
        """
        ...


class InMemory:
    """An :class:`OpenImage` of uint8 ``[H, W, C]``."""

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self.size: Size = (pixels.shape[0], pixels.shape[1])

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        """See :class:`OpenImage`; shares memory."""
        top, left, height, width = box
        return self._pixels[top : top + height, left : left + width]


class ImageDataset(Protocol):
    """N labelled or unlabelled images, read by index from any process.

    Loader workers are forked, and touching a Python object writes its reference count: a list of a million paths is
    copied page by page into every worker. So whatever grows with N is kept in numpy arrays.
    """

    @property
    def num_classes(self) -> int:
        """Labels are in ``range(num_classes)``; 0 if there are none."""
        ...

    @property
    def channels(self) -> int:
        """C of every image: 1 or 3."""
        ...

    def __len__(self) -> int: ...

    def open(self, index: int) -> OpenImage:
        """One image, for a part of it. Raises BadImage if it cannot be used, as may reading its pixels."""
        ...

    def image(self, index: int) -> Pixels:
        """uint8 ``[H, W, C]``; H and W may differ between images. Raises BadImage if this one cannot be used."""
        ...

    def label(self, index: int) -> int:
        """The class, or -1 if the data set has none."""
        ...

    def name(self, index: int) -> str:
        """What to call the image in a sentence, and no other image: a path where it has one."""
        ...

    @property
    def bad(self) -> Mapping[int, BadImage]:
        """What a check at the start found and tolerated, by index; reading one of these raises the same."""
        ...


class ArrayDataset:
    """Images that fit in memory.

    Args:
        images: uint8 ``[N, H, W, C]``.
        labels: integers ``[N]``, in ``range(num_classes)``.
        num_classes: how many classes there are.
        source: where the images come from, for :meth:`name`.
    """

    def __init__(self, images: Pixels, labels: npt.NDArray[np.integer], num_classes: int, source: str) -> None:
        assert images.ndim == 4
        assert labels.shape == images.shape[:1]
        self._images = images
        self._labels = labels
        self._source = source
        self.num_classes = num_classes
        self.channels: int = images.shape[3]
        self.bad: Mapping[int, BadImage] = {}

    def __len__(self) -> int:
        return len(self._images)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of pixels and labels."""
        digest = hashlib.sha256(np.ascontiguousarray(self._images).data)
        digest.update(np.ascontiguousarray(self._labels, dtype="<i8").data)
        return digest.hexdigest()

    def open(self, index: int) -> OpenImage:
        """See :class:`ImageDataset`."""
        return InMemory(self.image(index))

    def image(self, index: int) -> Pixels:
        """See :class:`ImageDataset`."""
        pixels: Pixels = self._images[index]
        return pixels

    def label(self, index: int) -> int:
        """See :class:`ImageDataset`."""
        return int(self._labels[index])

    def name(self, index: int) -> str:
        """See :class:`ImageDataset`."""
        return f"{self._source}[{index}]"


class EvenSubset:
    """``count`` images of a data set, evenly spaced, so that one sorted by class keeps its balance.

    All of them, and a line that says so, where there are fewer.
    """

    def __init__(self, dataset: ImageDataset, count: int) -> None:
        assert count >= 1
        if count > len(dataset) and os.environ.get("RANK", "0") == "0":
            _log.info("train_images=%d, but there are %d training images: all are used", count, len(dataset))
        self._dataset = dataset
        self._count = min(count, len(dataset))

    @property
    def num_classes(self) -> int:
        return self._dataset.num_classes

    @property
    def channels(self) -> int:
        return self._dataset.channels

    def __len__(self) -> int:
        return self._count

    def open(self, index: int) -> OpenImage:
        return self._dataset.open(self._original(index))

    def image(self, index: int) -> Pixels:
        return self._dataset.image(self._original(index))

    def label(self, index: int) -> int:
        return self._dataset.label(self._original(index))

    def name(self, index: int) -> str:
        return self._dataset.name(self._original(index))

    @property
    def bad(self) -> Mapping[int, BadImage]:
        numbers = {self._original(number): number for number in range(self._count)}
        return {numbers[index]: bad for index, bad in self._dataset.bad.items() if index in numbers}

    def _original(self, index: int) -> int:
        return range(self._count)[index] * len(self._dataset) // self._count
