"""Few-shot subsets of the training images: a share of each class, or a list of names. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
import math
import unicodedata
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from dmjd.data.dataset import ImageDataset, Subset
from dmjd.errors import ConfigError, DataError
from dmjd.files import read_file

_log = logging.getLogger("dmjd")


def few_shot_subset(dataset: ImageDataset, percent: float | None, names: str | None) -> ImageDataset:
    """The images of ``dataset`` that ``few_shot=percent`` or ``labels=names`` selects; all if both are None.

    Args:
        dataset: with labels.
        percent: share of each class in per cent, see :func:`share_of_classes`.
        names: file with a name per line, see :func:`listed_images`.

    Raises:
        ConfigError: if both are given.
        DataError: if the images have no labels; if the file cannot be read, or its names are not those of images of at
            least two classes.
    """
    if percent is None and names is None:
        return dataset
    if percent is not None and names is not None:
        raise ConfigError(f"few_shot={percent:g} and labels={names} both select training images; leave one out")
    if not dataset.num_classes:
        key = "labels" if percent is None else "few_shot"
        raise DataError(f"{key} selects images of each class, and the training images have no labels")
    return Subset(dataset, listed_images(dataset, names) if names else share_of_classes(dataset, percent or 0))


def share_of_classes(dataset: ImageDataset, percent: float) -> list[int]:
    """The sample ids of ``percent`` % of each class, rounded half up, and at least one image, in ascending order.

    A class keeps its images with the smallest SHA-256 of "few-shot/NAME", where NAME is the file's name without
    folders, as UTF-8 in Unicode form C. The choice depends on the names in a class only: it is the same on every
    machine and for any place of the data set, and an image that is added moves at most one other out.
    """
    ranked: dict[int, list[tuple[bytes, int]]] = defaultdict(list)
    for index in range(len(dataset)):
        name = unicodedata.normalize("NFC", f"few-shot/{_file_name(dataset.name(index))}")
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
        ranked[dataset.label(index)].append((digest, index))
    chosen = []
    for images in ranked.values():
        count = max(1, math.floor(Fraction(str(percent)) * len(images) / 100 + Fraction(1, 2)))
        chosen += [index for _, index in sorted(images)[:count]]
    return sorted(chosen)


def listed_images(dataset: ImageDataset, names: str) -> list[int]:
    """The sample ids of the images that the lines of the text file ``names`` name, in ascending order.

    A line names an image if it is the file's name ("n01440764_10043.JPEG", as the published 1 % and 10 % lists of
    ImageNet), or the end of its path from a folder on. Lines are compared with names only, never opened as paths. Empty
    lines are skipped.

    Raises:
        DataError: if the file cannot be read as UTF-8, is empty, has a line that names no image or several, or the
            images are of one class.
    """
    try:
        lines = [line.strip() for line in read_file(Path(names)).decode().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"labels={names} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    wanted = dict.fromkeys(filter(None, lines))
    if not wanted:
        raise DataError(f"labels={names} has no names; write the name of an image in each line")
    found: dict[str, list[int]] = {_file_name(line): [] for line in wanted}
    for index in range(len(dataset)):
        if (name := _file_name(dataset.name(index))) in found:
            found[name].append(index)
    matches = {
        line: [i for i in found[_file_name(line)] if f"/{dataset.name(i)}".endswith(f"/{line}")] for line in wanted
    }
    missing = [line for line, images in matches.items() if not images]
    if missing:
        raise DataError(
            f"labels={names}: {len(missing)} of {len(matches)} lines name no training image, the first is "
            f"{missing[0]!r}; the images have names such as {_file_name(dataset.name(0))!r}"
        )
    several = next((line for line, images in matches.items() if len(images) > 1), None)
    if several is not None:
        raise DataError(
            f"labels={names}: {several!r} is the name of {len(matches[several])} training images, such as "
            f"{dataset.name(matches[several][0])}; put the folder before it"
        )
    chosen = sorted({index for images in matches.values() for index in images})
    classes = len({dataset.label(index) for index in chosen})
    if classes < 2:
        raise DataError(f"labels={names} names {len(chosen)} image(s) of one class; a score needs two classes or more")
    if classes < dataset.num_classes:
        _log.warning("labels=%s has images of %d of the %d classes", names, classes, dataset.num_classes)
    return chosen


def digest_of(dataset: ImageDataset) -> str:
    """16 hex digits of the SHA-256 of the sorted file names and labels: equal for equal selections of one data set."""
    rows = sorted(f"{_file_name(dataset.name(index))} {dataset.label(index)}" for index in range(len(dataset)))
    return hashlib.sha256("\n".join(rows).encode(errors="surrogateescape")).hexdigest()[:16]


def few_shot_settings(dataset: ImageDataset, percent: float | None, names: str | None) -> dict[str, Any]:
    """Settings of a score on the images that :func:`few_shot_subset` selected; none if those are all."""
    if percent is None and names is None:
        return {}
    return {"few_shot": "list" if percent is None else percent, "few_shot_images": digest_of(dataset)}


def _file_name(name: str) -> str:
    return name.rpartition("/")[2]
