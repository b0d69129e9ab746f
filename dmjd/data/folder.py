"""A folder of image files, with or without class folders."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dmjd.config.data import ENDINGS, SKIPPED_FOLDERS
from dmjd.data.dataset import OpenImage, Pixels, Split
from dmjd.data.decode import check_header, open_image, package_for, read_bytes
from dmjd.data.held_out import HeldOut, one_sided, report_one_sided
from dmjd.data.quarantine import check_share
from dmjd.data.regular import LOOP, counts, kind_of_entry, log_skipped
from dmjd.errors import BadImage, DataError, NoSplit
from dmjd.files import FILE, FOLDER
from dmjd.progress import track

Check = Literal["none", "header", "decode"]

_log = logging.getLogger("dmjd")

_CHECK_THREADS = 16  # opening files is bound by the disk or the network
_CHECK_CHUNK = 256
_OTHER_SPLITS = [
    spelled
    for name in ("train", "training", "trainset", "val", "valid", "validation", "dev", "test", "testing")
    for spelled in (name, name.capitalize(), name.upper())
]
"""Names of splits elsewhere: train/ is found in this spelling alone."""
_PLAIN_ENDING = re.compile(r"\.[a-z0-9]{1,8}")


class ImageFolder:
    """All images below a folder, in sorted order. Symbolic links are followed. Files with other endings, hidden files,
    named pipes, sockets, devices and dangling links are skipped.

    Layouts: ``root/train`` with ``root/val`` or ``root/test``, or ``root`` alone as "train". Within a split, images are
    either all in class folders or all in the folder itself, without labels. :attr:`classes` are the sorted names of the
    class folders of the training split that hold an image; empty without labels. :attr:`skipped` is the number of
    skipped entries by kind: ``{"empty folders": 2, ".txt files": 3}``.

    Args:
        root: the folder.
        split: "train", or "test" for ``root/val`` or else ``root/test``.
        channels: 1 (grey) or 3 (RGB), to which every image is converted.
        check: before training, "none", "header" (each file opens and is large enough) or "decode" (and all its
            pixels decode).
        min_size: least (height, width) of an image, that of the crop, unless ``check`` is "none".
        max_bad_percent: percentage of files that may fail the check; they are kept, listed in :attr:`bad`, and raise
            when read.
        endings: endings of image files, in lower case.
        skipped_folders: names of folders to skip.
        held_out: with a percentage, "train" has the images that are not held out and "test" those that are. Both have
            the labels of the whole folder.

    Raises:
        DataError: if the folder is missing, empty or of another layout, too many files fail the check, the decoder of
            a format is missing, or one side of the split is empty.
    """

    def __init__(
        self,
        root: str,
        split: Split,
        channels: Literal[1, 3],
        check: Check = "header",
        min_size: tuple[int, int] = (1, 1),
        max_bad_percent: float = 0.0,
        *,
        endings: Sequence[str] = ENDINGS,
        skipped_folders: Sequence[str] = SKIPPED_FOLDERS,
        held_out: HeldOut | None = None,
    ) -> None:
        self.channels = channels
        rules = _Rules(tuple(endings), frozenset(skipped_folders))
        skipped: Counter[str] = Counter()
        self._folder, train = _find_split(Path(root), split, held_out is not None, skipped)
        paths = _walk(self._folder, "", (), rules, skipped)
        if not paths:
            found = f" ({counts(skipped)})" if skipped else ""
            raise DataError(
                f"folder {self._folder} holds no images{found}; files must end in {', '.join(rules.endings)}"
            )
        self.skipped: Mapping[str, int] = dict(skipped)
        _require_decoders(self._folder, paths, rules)
        labels, classes = _assign_labels(self._folder, paths, train, rules)
        self._sides = ""
        self._rule = "" if held_out is None else f"{held_out.percent!r} {held_out.seed}"
        self.one_sided: Sequence[str] = ()
        if held_out is not None:
            below = os.path.relpath(self._folder, root)
            prefix = "" if below == "." else f"{below}/"
            sides = held_out.sides(prefix + path for path in paths)
            held_out.require_both(sides, (prefix + path for path in paths), root)
            self._sides = f"{held_out}, {sum(sides)} of {len(paths)} images"
            self.one_sided = one_sided(labels, sides, classes)
            kept = [number for number, side in enumerate(sides) if side == (split == "test")]
            paths, labels = [paths[number] for number in kept], [labels[number] for number in kept]
        # One buffer of bytes and the end of each path; a numpy string array would pad every path to the longest.
        encoded = [os.fsencode(path) for path in paths]
        self._paths = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        self._labels = np.array(labels, dtype=np.int64)
        self.classes = classes
        self.num_classes = len(self.classes)
        self._min_size = (1, 1) if check == "none" else min_size
        self.bad: Mapping[int, BadImage] = {} if check == "none" else self._check(decode=check == "decode")
        check_share(list(self.bad.values()), len(self), max_bad_percent)

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the sorted relative paths, which define the sample ids, and of the rule that holds images out;
        independent of ``root``."""
        return hashlib.sha256(self._paths.tobytes() + self._ends.tobytes() + self._rule.encode()).hexdigest()

    def open(self, index: int) -> OpenImage:
        path = self.name(index)
        return open_image(read_bytes(path), path, self.channels, self._min_size)

    def image(self, index: int) -> Pixels:
        opened = self.open(index)
        return opened.region((0, 0, *opened.size))

    def paths(self) -> Iterator[bytes]:
        """The path of each image below the split's folder."""
        start = 0
        for end in self._ends:
            yield self._paths[start:end].tobytes()
            start = end

    def restrict(self, keep: npt.NDArray[np.bool_]) -> None:
        """Leave out the images for which ``keep``, bool ``[N]``, is false; the index of later ones decreases."""
        lengths, index = np.diff(self._ends, prepend=0), np.cumsum(keep) - 1
        self._paths = self._paths[np.repeat(keep, lengths)]
        self._ends, self._labels = np.cumsum(lengths[keep]), self._labels[keep]
        self.bad = {int(index[old]): error for old, error in self.bad.items() if keep[old]}

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def name(self, index: int) -> str:
        index = range(len(self))[index]
        start = self._ends[index - 1] if index else 0
        return os.path.join(self._folder, os.fsdecode(self._paths[start : self._ends[index]].tobytes()))

    def report(self) -> None:
        """Log what was skipped, the number of held-out images, and classes on one side of the split; a line each."""
        log_skipped(self._folder, self.skipped)
        if self._sides:
            _log.info("%s: %s", self._folder, self._sides)
        report_one_sided(self._folder, self.one_sided)

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


def images_below(folder: str, skipped: Counter[str] | None = None, endings: Sequence[str] = ENDINGS) -> list[str]:
    """Sorted paths of all images below ``folder``, relative to it, as :class:`ImageFolder` lists them. ``skipped``
    counts other entries by kind. Raises DataError if a folder cannot be listed."""
    rules = _Rules(tuple(endings), frozenset(SKIPPED_FOLDERS))
    return _walk(folder, "", (), rules, Counter() if skipped is None else skipped)


class _Rules(NamedTuple):
    """Which entries of a folder are listed: see :class:`ImageFolder`."""

    endings: tuple[str, ...]
    skipped_folders: frozenset[str]


def _find_split(root: Path, split: Split, split_by_hash: bool, skipped: Counter[str]) -> tuple[str, str]:
    """The folder of ``split``, and that of the training split. ``skipped`` counts what lies beside them. Raises NoSplit
    if no images are held out."""
    if not root.is_dir():
        raise DataError(f"data.root={root} is not a folder; set data.root to a folder of images")
    divided = (root / "train").is_dir()
    held_out = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if held_out is not None and not divided:
        raise DataError(f"{root} has a folder {held_out.name}/ but no train/; put the training images into train/")
    train = root / "train" if divided else root
    splits = [] if divided else sorted(name for name in _OTHER_SPLITS if (root / name).is_dir())
    if len(splits) > 1 and splits == [name for name, kind in _list(str(root), Counter()) if kind == FOLDER]:
        raise DataError(
            f"{root} has the folders {', '.join(splits)}, which would be classes; name those of a split train/ and "
            "val/ or test/, or set data.root to one of them"
        )
    if split_by_hash:
        if held_out is not None:
            raise DataError(
                f"{root} has held-out images in {held_out.name}/; set data.val_percent=0, or move that folder away"
            )
        held_out = train
    if split == "test" and held_out is None:
        raise NoSplit(
            f"{root} has no test split; set data.val_percent=10 to hold out 10 % of the images, or put held-out images "
            "into its folder val/ or test/, beside train/"
        )
    if divided and split == "train":
        beside = [name for name, _ in _list(str(root), Counter()) if root / name not in (train, held_out)]
        if held_out == root / "val" and "test" in beside:
            beside.remove("test")
            skipped["unused test/ beside val/"] = 1
        skipped.update({"entries beside train": len(beside)} if beside else {})
    return str(held_out if split == "test" else train), str(train)


def _list(folder: str, skipped: Counter[str]) -> list[tuple[str, str]]:
    """Sorted (name, kind) of all entries but hidden ones; kinds as in :func:`dmjd.data.regular.kind_of`."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    skipped["hidden folders" if entry.is_dir(follow_symlinks=False) else "hidden files"] += 1
                else:
                    found.append((entry.name, kind_of_entry(entry)))
    except OSError as error:
        raise _unlisted(folder, error) from error
    return sorted(found)


def _unlisted(folder: str, error: OSError) -> DataError:
    return DataError(f"folder {folder} cannot be listed ({error.strerror or error})")


def _walk(folder: str, prefix: str, above: tuple[str, ...], rules: _Rules, skipped: Counter[str]) -> list[str]:
    """Paths of the images below ``folder``, with ``prefix``; ``skipped`` counts other entries by kind."""
    real = os.path.realpath(folder)
    if real in above:
        skipped[LOOP] += 1
        return []
    paths = []
    for name, kind in _list(folder, skipped):
        if kind == FOLDER and name in rules.skipped_folders:
            skipped[f"{name} folders"] += 1
        elif kind == FOLDER:
            inside: Counter[str] = Counter()
            below = _walk(os.path.join(folder, name), f"{prefix}{name}/", (*above, real), rules, inside)
            if not below and LOOP not in inside:
                inside["empty folders"] = 1  # with all folders in it
            skipped.update(inside)
            paths += below
        elif kind != FILE:
            skipped[kind] += 1
        elif name.lower().endswith(rules.endings):
            paths.append(prefix + name)
        else:
            ending = os.path.splitext(name)[1].lower()
            skipped[f"{ending} files" if _PLAIN_ENDING.fullmatch(ending) else "files of other endings"] += 1
    return paths


def _has_image(folder: str, above: tuple[str, ...], rules: _Rules) -> bool:
    """Whether ``folder`` holds an image; stops at the first."""
    real = os.path.realpath(folder)
    if real in above:
        return False
    folders = []
    try:
        with os.scandir(folder) as entries:
            for entry in (entry for entry in entries if not entry.name.startswith(".")):
                kind = kind_of_entry(entry)
                if kind == FILE and entry.name.lower().endswith(rules.endings):
                    return True
                if kind == FOLDER and entry.name not in rules.skipped_folders:
                    folders.append(entry.path)
    except OSError as error:
        raise _unlisted(folder, error) from error
    return any(_has_image(each, (*above, real), rules) for each in folders)


def _require_decoders(folder: str, paths: list[str], rules: _Rules) -> None:
    for ending in rules.endings:
        package = package_for(ending)
        count = sum(path.lower().endswith(ending) for path in paths) if package else 0
        if count:
            raise DataError(
                f"{folder} has {count} file(s) ending in {ending}, whose decoder is not installed: pip install "
                f"{package}; or skip them with data.skip_undecodable=true"
            )


def _assign_labels(folder: str, paths: list[str], train: str, rules: _Rules) -> tuple[list[int], tuple[str, ...]]:
    """Labels of ``paths``, -1 without class folders, and the names of the classes in the folder ``train``."""
    nested = sum("/" in path for path in paths)
    if nested == 0:
        return [-1] * len(paths), ()
    if nested < len(paths):
        stray = next(path for path in paths if "/" not in path)
        raise DataError(f"folder {folder} mixes class folders with images beside them ({stray}); use one or the other")
    names = [path.split("/", 1)[0] for path in paths]
    classes = sorted(set(names)) if folder == train else _class_folders(train, rules)
    numbers = {name: number for number, name in enumerate(classes)}
    unknown = next((name for name in names if name not in numbers), None)
    if unknown is not None:
        raise DataError(
            f"class folder {os.path.join(folder, unknown)} has no images in the training split; add some or remove it"
        )
    return [numbers[name] for name in names], tuple(classes)


def _class_folders(train: str, rules: _Rules) -> list[str]:
    return [
        name
        for name, kind in _list(train, Counter())
        if kind == FOLDER and name not in rules.skipped_folders and _has_image(os.path.join(train, name), (), rules)
    ]
