"""Base of the data sets of segmentation and detection: image files below a folder, each with annotations."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dmjd.config.dense import DenseDataConfig
from dmjd.data.dataset import Box, OpenImage, Pixels, Size
from dmjd.data.decode import check_header, open_image, read_bytes
from dmjd.data.quarantine import check_share
from dmjd.data.regular import log_skipped
from dmjd.errors import BadImage
from dmjd.progress import track

_CHECK_THREADS = 16  # opening files is bound by the disk or the network
_CHECK_CHUNK = 256

Sizes = npt.NDArray[np.int32]


class AnnotatedImage:
    """An :class:`~dmjd.data.dataset.OpenImage`; subclasses add its annotations."""

    def __init__(self, image: OpenImage) -> None:
        self._image = image
        self.size: Size = image.size

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        """See :class:`~dmjd.data.dataset.OpenImage`."""
        return self._image.region(box, at_least)


class AnnotatedImages(ABC):
    """An :class:`~dmjd.data.dataset.ImageDataset` of files below ``folder``, without a label of their own.

    Whatever grows with the number of images is in numpy arrays, which forked workers share.

    Args:
        config: ``channels``, ``check`` and ``max_bad_percent`` are used.
        folder: folder of the images.
        paths: paths of the images relative to it, in the order of the sample ids.
        classes: names of the classes.
        annotations: bytes that identify the annotations, for :attr:`fingerprint`.
        sizes: (height, width) of each image, int32 ``[N, 2]``, where the annotations hold them; else headers are read.
        skipped: files and folders that belong to no image, by kind.

    Attributes:
        classes, num_classes: of the annotations.
        bad: images that :meth:`check` has found and tolerated, by index.
    """

    def __init__(
        self,
        config: DenseDataConfig,
        folder: Path,
        paths: Iterable[str],
        classes: Sequence[str],
        annotations: bytes,
        sizes: Sizes | None = None,
        skipped: Mapping[str, int] | None = None,
    ) -> None:
        self.channels: int = config.channels
        self.classes, self.num_classes = list(classes), len(classes)
        self.skipped: Mapping[str, int] = dict(skipped or {})
        self.bad: Mapping[int, BadImage] = {}
        self._config, self._folder = config, os.fspath(folder)
        encoded = [os.fsencode(path) for path in paths]
        self._paths = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self._sizes = np.zeros((len(encoded), 2), dtype=np.int32) if sizes is None else sizes
        self._annotations = hashlib.sha256("\0".join(self.classes).encode() + annotations).digest()

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the relative paths, which define the sample ids, the classes and the annotations; independent
        of the folder."""
        return hashlib.sha256(self._paths.tobytes() + self._ends.tobytes() + self._annotations).hexdigest()

    @abstractmethod
    def open(self, index: int) -> AnnotatedImage:
        """Open an image. Raises BadImage if it or its annotations cannot be used."""

    @abstractmethod
    def _check_annotations(self, index: int, size: Size, decode: bool) -> None:
        """Check the annotations of an image of ``size``; with ``decode`` all of their content. Raises BadImage."""

    @abstractmethod
    def require_annotations(self) -> None:
        """Raise DataError if no image of the data set is annotated. Reads no more than the first annotated image."""

    def image(self, index: int) -> Pixels:
        opened = self.open(index)
        return opened.region((0, 0, *opened.size))

    def size(self, index: int) -> Size:
        """(height, width) without decoding: known to the annotations or the check, else of the file's header.

        Raises:
            BadImage: if the header has to be read and cannot.
        """
        if not self._sizes[index].all():
            self._sizes[index] = check_header(self.name(index), (1, 1))
        height, width = self._sizes[index].tolist()
        return height, width

    def label(self, index: int) -> int:
        return -1

    def name(self, index: int) -> str:
        return os.path.join(self._folder, self.path(index))

    def path(self, index: int) -> str:
        """The path of an image below the folder."""
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._paths[start : self._ends[index]].tobytes())

    def report(self) -> None:
        """Log the number of entries that belong to no image, by kind."""
        log_skipped(self._folder, self.skipped)

    def _open_image(self, index: int) -> OpenImage:
        path = self.name(index)
        return open_image(read_bytes(path), path, self.channels)

    def check(self) -> None:
        """Check all images as ``config.check`` sets, and set :attr:`bad`. Subclasses call it once they are complete.

        Raises:
            DataError: if more than ``config.max_bad_percent`` percent are bad.
        """
        if self._config.check == "none":
            return
        decode = self._config.check == "decode"

        def inspect(start: int) -> list[tuple[int, BadImage]]:
            indices = range(start, min(start + _CHECK_CHUNK, len(self)))
            found = ((index, self._inspect(index, decode)) for index in indices)
            return [(index, bad) for index, bad in found if bad is not None]

        starts = range(0, len(self), _CHECK_CHUNK)
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:
            found = pool.map(inspect, starts)
            whole = track(found, f"groups of {_CHECK_CHUNK} images checked", len(starts))
            self.bad = dict(chain.from_iterable(whole))
        check_share(list(self.bad.values()), len(self), self._config.max_bad_percent)

    def _inspect(self, index: int, decode: bool) -> BadImage | None:
        try:
            if decode:
                self.image(index)
            size = check_header(self.name(index), (1, 1))
            self._check_annotations(index, size, decode)
            self._sizes[index] = size
        except BadImage as error:
            return error.copy()
        return None
