"""A folder of image files, with or without class folders."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from dmjd.data.dataset import OpenImage, Pixels, Split
from dmjd.data.decode import check_header, open_image, read_bytes
from dmjd.data.quarantine import check_share
from dmjd.data.regular import LOOP, kind_of_entry, log_skipped
from dmjd.errors import BadImage, DataError
from dmjd.files import FILE, FOLDER
from dmjd.progress import track

Check = Literal["none", "header", "decode"]

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

_CHECK_THREADS = 16  # opening files is bound by the disk or the network
_CHECK_CHUNK = 256


class ImageFolder:
    """All images below a folder, in sorted order. Dot files are ignored and symbolic links are followed.
    Named pipes, sockets, devices and dangling links are skipped and counted in a log line.

    Layouts: ``root/train`` with ``root/val`` or ``root/test``, or ``root`` alone as "train". Within a split, images are
    either all in class folders or all in the folder itself, without labels. :attr:`classes` are the sorted names of the
    class folders of the training split, empty without labels.

    Args:
        root: the folder.
        split: "train", or "test" for ``root/val`` or else ``root/test``.
        channels: 1 (grey) or 3 (RGB), to which every image is converted.
        check: before training, "none", "header" (each file opens and is large enough) or "decode" (and all its
            pixels decode).
        min_size: least (height, width) of an image, that of the crop, unless ``check`` is "none".
        max_bad_percent: percentage of files that may fail the check; they are kept, listed in :attr:`bad`, and raise
            when read.

    Raises:
        DataError: if the folder is missing, empty or of another layout, or too many files fail the check.
    """

    def __init__(
        self,
        root: str,
        split: Split,
        channels: Literal[1, 3],
        check: Check = "header",
        min_size: tuple[int, int] = (1, 1),
        max_bad_percent: float = 0.0,
    ) -> None:
        self.channels = channels
        self._folder, classes = _find_split(Path(root), split)
        skipped: Counter[str] = Counter()
        paths = list(_walk(self._folder, "", (), skipped))
        log_skipped(self._folder, skipped)
        labels = _assign_labels(self._folder, paths, classes)
        # One buffer of bytes and the end of each path; a numpy string array would pad every path to the longest.
        encoded = [os.fsencode(path) for path in paths]
        self._paths = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self._labels = np.array(labels, dtype=np.int64)
        self.classes = tuple(classes) if labels[0] >= 0 else ()
        self.num_classes = len(self.classes)
        self._min_size = (1, 1) if check == "none" else min_size
        self.bad: Mapping[int, BadImage] = {} if check == "none" else self._check(decode=check == "decode")
        check_share(list(self.bad.values()), len(self), max_bad_percent)

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the sorted relative paths, which define the sample ids; independent of ``root``."""
        return hashlib.sha256(self._paths.tobytes() + self._ends.tobytes()).hexdigest()

    def open(self, index: int) -> OpenImage:
        path = self.name(index)
        return open_image(read_bytes(path), path, self.channels, self._min_size)

    def image(self, index: int) -> Pixels:
        opened = self.open(index)
        return opened.region((0, 0, *opened.size))

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return os.path.join(self._folder, os.fsdecode(self._paths[start : self._ends[index]].tobytes()))

    def _check(self, decode: bool) -> dict[int, BadImage]:
        def inspect(start: int) -> list[tuple[int, BadImage]]:
            indices = range(start, min(start + _CHECK_CHUNK, len(self)))
            found = ((index, self._inspect(index, decode)) for index in indices)
            return [(index, bad) for index, bad in found if bad is not None]

        starts = range(0, len(self), _CHECK_CHUNK)
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:
            found = pool.map(inspect, starts)
            return dict(chain.from_iterable(track(found, f"groups of {_CHECK_CHUNK} images checked", len(starts))))

    def _inspect(self, index: int, decode: bool) -> BadImage | None:
        try:
            if decode:
                self.image(index)
            else:
                check_header(self.name(index), self._min_size)
        except BadImage as error:
            return error.copy()
        return None


def _find_split(root: Path, split: Split) -> tuple[str, list[str]]:
    """The folder of ``split``, and the sorted class folders of the training split."""
    if not root.is_dir():
        raise DataError(f"data.root={root} is not a folder; set data.root to a folder of images")
    divided = (root / "train").is_dir()
    held_out = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if split == "test" and held_out is None:
        raise DataError(f"{root} has no test split; put held-out images into its folder val/ or test/, beside train/")
    if held_out is not None and not divided:
        raise DataError(f"{root} has a folder {held_out.name}/ but no train/; put the training images into train/")
    train = root / "train" if divided else root
    classes = [name for name, kind in _list(str(train)) if kind == FOLDER]
    return str(held_out if split == "test" else train), classes


def _list(folder: str) -> list[tuple[str, str]]:
    """Sorted (name, kind) of all entries but dot files; kinds as in :func:`dmjd.data.regular.kind_of`."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry.name, kind_of_entry(entry)) for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"folder {folder} cannot be listed ({error.strerror or error})") from error


def _walk(folder: str, prefix: str, above: tuple[str, ...], skipped: Counter[str]) -> Iterator[str]:
    """Paths of the images below ``folder``, with ``prefix``; ``skipped`` counts other kinds of files."""
    real = os.path.realpath(folder)
    if real in above:
        skipped[LOOP] += 1
        return
    for name, kind in _list(folder):
        if kind == FOLDER:
            yield from _walk(os.path.join(folder, name), f"{prefix}{name}/", (*above, real), skipped)
        elif kind != FILE:
            skipped[kind] += 1
        elif name.lower().endswith(ENDINGS):
            yield prefix + name


def _assign_labels(folder: str, paths: list[str], classes: list[str]) -> list[int]:
    if not paths:
        raise DataError(f"folder {folder} holds no images; files must end in {', '.join(ENDINGS)}")
    nested = sum("/" in path for path in paths)
    if nested == 0:
        return [-1] * len(paths)
    if nested < len(paths):
        stray = next(path for path in paths if "/" not in path)
        raise DataError(f"folder {folder} mixes class folders with images beside them ({stray}); use one or the other")
    numbers = {name: number for number, name in enumerate(classes)}
    names = [path.split("/", 1)[0] for path in paths]
    unknown = next((name for name in names if name not in numbers), None)
    if unknown is not None:
        raise DataError(
            f"class folder {os.path.join(folder, unknown)} does not exist in the training split; add or remove it"
        )
    return [numbers[name] for name in names]
