"""The interface of map-style data sets, indexed by a sample id that is stable over epochs, and data sets in memory."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
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
"""(top, left, height, width), inside the image."""


def evenly(total: int, count: int) -> npt.NDArray[np.int64]:
    """Up to ``count`` indices below ``total``, evenly spaced from 0 on, ascending."""
    count = min(count, total)
    return np.arange(count) * total // max(count, 1)


class OpenImage(Protocol):
    """An image of known size whose pixels are not yet decoded."""

    @property
    def size(self) -> Size: ...

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        """Decode the pixels of ``box``, uint8 ``[h, w, C]``.

        Args:
            at_least: if the box is at least twice this size in both directions, a decoder may return it at half size,
                aligned to even pixels.

        Raises:
            BadImage: if the pixels cannot be decoded.
        """
        ...


class InMemory:
    """An :class:`OpenImage` of uint8 ``[H, W, C]``."""

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self.size: Size = (pixels.shape[0], pixels.shape[1])

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        """See :class:`OpenImage`. Returns a view of the pixels."""
        top, left, height, width = box
        return self._pixels[top : top + height, left : left + width]


class ImageDataset(Protocol):
    """N images, with or without labels, read by index from any process.

    Loader workers are forked, and reading a Python object writes its reference count: a list of a million paths
    would be copied page by page into every worker. Whatever grows with N is therefore kept in numpy arrays.
    """

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 without labels."""
        ...

    @property
    def channels(self) -> int:
        """Channels of every image, 1 or 3."""
        ...

    def __len__(self) -> int: ...

    def open(self, index: int) -> OpenImage:
        """Open an image without decoding it. Raises BadImage if it cannot be used."""
        ...

    def image(self, index: int) -> Pixels:
        """All pixels, uint8 ``[H, W, C]``; sizes may differ. Raises BadImage if the image cannot be used."""
        ...

    def label(self, index: int) -> int:
        """The class in ``range(num_classes)``; -1 without labels."""
        ...

    def name(self, index: int) -> str:
        """A unique name of the image for errors: its path if it has one."""
        ...

    @property
    def bad(self) -> Mapping[int, BadImage]:
        """Bad images that the check at the start found and tolerated, by index; reading one raises the same error."""
        ...

    @property
    def skipped(self) -> Mapping[str, int]:
        """Number of files and folders that are no images of the data set, by kind."""
        ...


class ArrayDataset:
    """Images held in memory. Loaders read the array itself, so :meth:`image` is not for subclasses to change.

    Args:
        images: uint8 ``[N, H, W, C]``.
        labels: integers ``[N]``, in ``range(num_classes)``.
        num_classes: number of classes.
        source: origin of the images, for :meth:`name`.
    """

    def __init__(self, images: Pixels, labels: npt.NDArray[np.integer], num_classes: int, source: str) -> None:
        self._images = images
        self._labels = labels
        self._source = source
        self.num_classes = num_classes
        self.channels: int = images.shape[3]
        self.bad: Mapping[int, BadImage] = {}
        self.skipped: Mapping[str, int] = {}

    def __len__(self) -> int:
        return len(self._images)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of pixels and labels."""
        digest = hashlib.sha256(np.ascontiguousarray(self._images).data)
        digest.update(np.ascontiguousarray(self._labels, dtype="<i8").data)
        return digest.hexdigest()

    def open(self, index: int) -> OpenImage:
        return InMemory(self.image(index))

    def image(self, index: int) -> Pixels:
        pixels: Pixels = self._images[index]
        return pixels

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        return f"{self._source}[{index}]"


class Subset:
    """The images ``indices`` of a data set, in that order."""

    def __init__(self, dataset: ImageDataset, indices: npt.ArrayLike) -> None:
        self._dataset = dataset
        self._indices = np.asarray(indices, dtype=np.int64)

    @property
    def num_classes(self) -> int:
        return self._dataset.num_classes

    @property
    def classes(self) -> Sequence[str]:
        """Names of the classes; empty where the data set has none."""
        return getattr(self._dataset, "classes", ())

    @property
    def channels(self) -> int:
        return self._dataset.channels

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the data set's fingerprint and the indices."""
        whole: str = getattr(self._dataset, "fingerprint", "")
        return hashlib.sha256(whole.encode() + self._indices.astype("<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

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
        numbers = {original: number for number, original in enumerate(self._indices.tolist())}
        return {numbers[index]: bad for index, bad in self._dataset.bad.items() if index in numbers}

    @property
    def skipped(self) -> Mapping[str, int]:
        return self._dataset.skipped

    def _original(self, index: int) -> int:
        return int(self._indices[index])


def pixels_in_memory(dataset: ImageDataset, indices: npt.NDArray[np.int64]) -> Pixels | None:
    """Images ``indices`` of a data set in memory, uint8 ``[B, H, W, C]``, none of which is bad; None of other data
    sets."""
    if isinstance(dataset, Subset):
        return pixels_in_memory(dataset._dataset, dataset._indices[indices])
    return dataset._images[indices] if isinstance(dataset, ArrayDataset) else None


class EvenSubset(Subset):
    """``count`` evenly spaced images of a data set, so that a data set sorted by class stays balanced.

    If there are fewer, all are used and a line is logged.
    """

    def __init__(self, dataset: ImageDataset, count: int) -> None:
        if count > len(dataset) and os.environ.get("RANK", "0") == "0":
            _log.info("train_images=%d, but there are %d training images: all are used", count, len(dataset))
        super().__init__(dataset, evenly(len(dataset), count))
