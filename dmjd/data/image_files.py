"""Image files and folders that are named one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from dmjd.data.dataset import OpenImage, Pixels
from dmjd.data.decode import open_image, read_bytes
from dmjd.data.folder import images_below
from dmjd.errors import BadImage, DataError

_SPLITS = ("train", "val", "test")


class ImageFiles:
    """Files in the order in which they are named, and of a folder all images below it in sorted order.

    An image below a folder has a label if its first folder there, or the one after ``train``, ``val`` or ``test``, is
    one of ``classes``.

    Args:
        paths: files, of any ending, and folders.
        channels: 1 (grey) or 3 (RGB), to which every image is converted.
        classes: names of classes.

    Raises:
        DataError: if a folder has no images.
    """

    def __init__(self, paths: Sequence[str], channels: Literal[1, 3], classes: Sequence[str] = ()) -> None:
        self.channels = channels
        self.classes, self.num_classes = tuple(classes), len(classes)
        self.bad: Mapping[int, BadImage] = {}
        self.skipped: Mapping[str, int] = {}
        numbers = {name: number for number, name in enumerate(classes)}
        found = [(os.fsencode(path), _label(folders, numbers)) for path, folders in _listed(paths)]
        self._paths = np.frombuffer(b"".join(path for path, _ in found), dtype=np.uint8)
        self._ends = np.cumsum([len(path) for path, _ in found], dtype=np.int64)
        self._labels = np.array([label for _, label in found], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def open(self, index: int) -> OpenImage:
        path = self.name(index)
        return open_image(read_bytes(path), path, self.channels)

    def image(self, index: int) -> Pixels:
        opened = self.open(index)
        return opened.region((0, 0, *opened.size))

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._paths[start : self._ends[index]].tobytes())


def _listed(paths: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Each file, with the folders between the folder that was named and the file."""
    for path in paths:
        if not os.path.isdir(path):
            yield path, ()
            continue
        below = images_below(path)
        if not below:
            raise DataError(f"folder {path} holds no images")
        for name in below:
            yield os.path.join(path, name), name.split("/")[:-1]


def _label(folders: Sequence[str], numbers: Mapping[str, int]) -> int:
    inner = folders[1:2] if folders[:1] and folders[0] in _SPLITS else []
    return next((numbers[name] for name in (*folders[:1], *inner) if name in numbers), -1)
