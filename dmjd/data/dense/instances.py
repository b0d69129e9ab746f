"""Reads COCO's annotation files (instances_NAME.json) into flat arrays, in pieces: they have hundreds of megabytes."""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dmjd.data.dense.masks import MaskStore, decode_counts
from dmjd.errors import DataError, NoSplit
from dmjd.files import open_regular
from dmjd.safe_load import json_items

MOST_SIDE, MOST_PIXELS = 65_535, 178_956_970
"""Limits of an image: the largest JPEG, and the pixels above which images are rejected as decompression bombs."""
_MOST_CLASSES = 100_000
_MOST_NUMBER = 1e9
_LONGEST_OUTLINE = 500
"""Limit of a polygon's perimeter, in perimeters of its image."""
_CHUNK = 1 << 22
_ARRAYS = ("images", "annotations", "categories")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

EMPTY, CROWD = "images without objects", "crowd regions"
NO_AREA, OUTSIDE, NO_MASK = "boxes without area", "boxes outside of their image", "objects without a mask"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Instances:
    """The images of an annotation file in the order of their ids, and their usable objects in the order of the file.

    names: names of the image files, relative to their folder.
    image_ids: int64 ``[N]``, ascending. sizes: int32 ``[N, 2]``, (height, width).
    category_ids: ascending; the label of an object is an index of it. classes: names of the categories.
    first: int64 ``[N + 1]``: image i has the objects ``first[i] .. first[i + 1] - 1``.
    boxes: float32 ``[A, 4]``, (x1, y1, x2, y2) inside the image. labels: int64 ``[A]``. masks: of the objects.
    skipped: number of annotations that are not usable objects, by kind.
    """

    names: list[str]
    image_ids: Ints
    sizes: npt.NDArray[np.int32]
    category_ids: list[int]
    classes: list[str]
    first: Ints
    boxes: npt.NDArray[np.float32]
    labels: Ints
    masks: MaskStore
    skipped: Mapping[str, int]


def read_instances(path: Path) -> Instances:
    """Read and check an annotation file.

    Raises:
        NoSplit: if it does not exist.
        DataError: in one line with its path, if it is no such file: other JSON, wrong types, ids that occur twice or
            are unknown, sizes beyond the limits, polygons of an odd number of values, run lengths of another size than
            the image, names of files outside of the folder, numbers that are not finite.
    """
    reader = _Reader()
    try:
        with open_regular(path) as file:
            for key, item in json_items(file, _ARRAYS):
                reader.add(key, item)
        return reader.instances()
    except FileNotFoundError as error:
        raise NoSplit(f"annotation file {path} does not exist; set data.root, data.train and data.val") from error
    except OSError as error:
        raise DataError(f"annotation file {path} cannot be read ({error.strerror or error})") from error
    except _Fault as error:
        raise DataError(f"annotation file {path} {error}; correct the file") from error
    except ValueError as error:
        raise DataError(
            f"annotation file {path} cannot be read: {error}; it has to be a JSON object with the arrays "
            f"{', '.join(_ARRAYS)}"
        ) from error


class _Fault(ValueError):
    """A fault of the file; the message continues a line that begins with its path."""


class _Reader:
    """Collects the elements of an annotation file in flat arrays."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._image_ids, self._sizes = array("q"), array("i")
        self._categories: dict[int, str] = {}
        # Of all annotations, in the order of the file.
        self._ids, self._image_of, self._category_of = array("q"), array("q"), array("q")
        self._crowd, self._boxes = array("b"), array("d")
        self._points, self._ends, self._polygons = array("f"), array("q", [0]), array("q", [0])
        self._runs, self._spans = array("I"), array("q", [0])
        self._run_sizes = array("q")  # of each mask of run lengths: its annotation, height, width

    def add(self, key: str, item: Any) -> None:
        """Add an element of the array ``key``. Raises ValueError."""
        if key == "annotations":
            add, count = self._annotation, len(self._ids)
        elif key == "images":
            add, count = self._image, len(self._image_ids)
        else:
            add, count = self._category, len(self._categories)
        try:
            if type(item) is not dict:
                raise _Fault(f"{_shown(item)}, which is not an object")
            add(item)
        except _Fault as error:
            raise _Fault(f"has {key}[{count}]: {error}") from error

    def _image(self, item: dict[str, Any]) -> None:
        number, name = _integer(item, "id"), item.get("file_name")
        sides = _integer(item, "height"), _integer(item, "width")
        if min(sides) < 1 or max(sides) > MOST_SIDE or sides[0] * sides[1] > MOST_PIXELS:
            raise _Fault(
                f"image {number} of {sides[0]}x{sides[1]} pixels (height x width), which must be 1 to {MOST_SIDE} each "
                f"and {MOST_PIXELS} in all"
            )
        if type(name) is not str or not _inside(name):
            raise _Fault(f"image {number} with file_name={_shown(name)}, which must be a path below the images' folder")
        self._names.append(name)
        self._image_ids.append(number)
        self._sizes.extend(sides)

    def _category(self, item: dict[str, Any]) -> None:
        number, name = _integer(item, "id"), item.get("name")
        if type(name) is not str or not _encodable(name) or _CONTROL.search(name):
            raise _Fault(f"category {number} with name={_shown(name)}, which must be a line of text")
        if number in self._categories:
            raise _Fault(f"category {number}, which occurs twice")
        if len(self._categories) == _MOST_CLASSES:
            raise _Fault(f"category {number}, more than {_MOST_CLASSES} categories")
        self._categories[number] = name

    def _annotation(self, item: dict[str, Any]) -> None:
        number, image, category = _integer(item, "id"), _integer(item, "image_id"), _integer(item, "category_id")
        crowd, box, mask = item.get("iscrowd", 0), item.get("bbox"), item.get("segmentation")
        if type(crowd) not in (int, bool) or crowd not in (0, 1):
            raise _Fault(f"annotation {number} with iscrowd={_shown(crowd)}, which must be 0 or 1")
        # The comparison is false for NaN.
        if (
            type(box) is not list
            or len(box) != 4
            or not all(type(value) in (float, int) and -_MOST_NUMBER <= value <= _MOST_NUMBER for value in box)
        ):
            raise _Fault(f"annotation {number} with bbox={_shown(box)}, which must be four numbers x, y, width, height")
        if type(mask) is dict:
            self._run_lengths(number, mask)
        elif type(mask) is list:
            for polygon in mask:
                self._polygon(number, polygon)
        elif mask is not None:
            raise _Fault(f"annotation {number} with segmentation={_shown(mask)}, which must be polygons or run lengths")
        self._ids.append(number)
        self._image_of.append(image)
        self._category_of.append(category)
        self._crowd.append(crowd)
        self._boxes.extend(box)
        self._polygons.append(len(self._ends) - 1)
        self._spans.append(len(self._runs))

    def _polygon(self, number: int, polygon: Any) -> None:
        if type(polygon) is not list or len(polygon) % 2:
            count = f"{len(polygon)} values" if type(polygon) is list else _shown(polygon)
            raise _Fault(f"annotation {number} with a polygon of {count}, which must be x and y of each corner")
        try:
            if len(polygon) >= 6:  # fewer corners have no area
                self._points.fromlist(polygon)
                self._ends.append(len(self._points))
        except (TypeError, OverflowError) as error:
            raise _Fault(f"annotation {number} with a polygon of values that are not numbers") from error

    def _run_lengths(self, number: int, mask: dict[str, Any]) -> None:
        size, counts = mask.get("size"), mask.get("counts")
        if (
            type(size) is not list
            or len(size) != 2
            or not all(type(side) is int and 1 <= side <= MOST_SIDE for side in size)
        ):
            raise _Fault(f"annotation {number} with a mask of size={_shown(size)}, which must be [height, width]")
        try:
            if type(counts) is str:
                runs = decode_counts(counts)
            elif type(counts) is list and all(type(count) is int for count in counts):
                runs = np.array(counts, dtype=np.int64)
            else:
                raise ValueError
            pixels = size[0] * size[1]
            if len(runs) and (runs.min() < 0 or runs.max() > pixels or runs.sum() != pixels):
                raise ValueError
        except (ValueError, OverflowError) as error:
            raise _Fault(
                f"annotation {number} with counts={_shown(counts)}, which must be run lengths of {size[0]}x{size[1]} "
                "pixels in all"
            ) from error
        self._run_sizes.extend((len(self._ids), *size))
        self._runs.frombytes(runs.astype(np.uint32).tobytes())

    def instances(self) -> Instances:
        """All that was added, checked as a whole. Raises ValueError."""
        for kind, ids in (("image", self._image_ids), ("annotation", self._ids)):
            numbers = np.sort(_array(ids))
            again = numbers[1:][numbers[1:] == numbers[:-1]]
            if len(again):
                raise _Fault(f"has {kind} {again[0]} twice")
        if not self._image_ids or not self._categories:
            raise _Fault(f"has no {'categories' if self._image_ids else 'images'}")
        categories = sorted(self._categories)
        order = np.argsort(_array(self._image_ids))
        image_ids = _array(self._image_ids)[order]
        sizes = np.frombuffer(self._sizes, dtype=np.int32).reshape(-1, 2)[order]
        images = self._places("image", self._image_of, image_ids)
        labels = self._places("category", self._category_of, np.array(categories))
        self._check_run_sizes(images, sizes)
        self._check_polygons(images, sizes)

        boxes = np.frombuffer(self._boxes, dtype=np.float64).reshape(-1, 4)
        heights, widths = sizes[images].T
        corners = np.column_stack((boxes[:, :2], boxes[:, :2] + boxes[:, 2:]))
        corners = corners.clip(0, np.column_stack((widths, heights, widths, heights)))
        polygons, spans = _array(self._polygons), _array(self._spans)
        without = (
            (CROWD, np.frombuffer(self._crowd, dtype=np.bool_)),
            (NO_AREA, (boxes[:, 2:] <= 0).any(1)),
            (OUTSIDE, (corners[:, 2:] <= corners[:, :2]).any(1)),
            (NO_MASK, (np.diff(polygons) == 0) & (np.diff(spans) == 0)),
        )
        skipped, usable = Counter[str](), np.ones(len(images), dtype=np.bool_)
        for kind, fault in without:
            skipped[kind] = int((usable & fault).sum())
            usable &= ~fault
        chosen = np.flatnonzero(usable)
        chosen = chosen[np.argsort(images[chosen], kind="stable")]
        store = MaskStore(
            np.frombuffer(self._points, dtype=np.float32),
            _array(self._ends),
            np.column_stack((polygons[chosen], polygons[chosen + 1])),
            np.frombuffer(self._runs, dtype=np.uint32),
            np.column_stack((spans[chosen], spans[chosen + 1])),
        )
        return Instances(
            names=[self._names[place] for place in order.tolist()],
            image_ids=image_ids,
            sizes=sizes,
            category_ids=categories,
            classes=[self._categories[number] for number in categories],
            first=np.searchsorted(images[chosen], np.arange(len(image_ids) + 1)),
            boxes=corners[chosen].astype(np.float32),
            labels=labels[chosen],
            masks=store,
            skipped={kind: count for kind, count in skipped.items() if count},
        )

    def _places(self, kind: str, used: array[int], known: Ints) -> Ints:
        """The index of each id ``used`` by an annotation among ``known``, ascending."""
        ids = _array(used)
        places = np.searchsorted(known, ids).clip(max=len(known) - 1)
        unknown = np.flatnonzero(known[places] != ids)
        if len(unknown):
            number = unknown[0]
            raise _Fault(f"has annotation {self._ids[number]} of the unknown {kind} {ids[number]}")
        return places

    def _check_run_sizes(self, images: Ints, sizes: npt.NDArray[np.int32]) -> None:
        rows = _array(self._run_sizes).reshape(-1, 3)
        wrong = np.flatnonzero((sizes[images[rows[:, 0]]] != rows[:, 1:]).any(1))
        if len(wrong):
            annotation, *size = rows[wrong[0]].tolist()
            height, width = sizes[images[annotation]].tolist()
            raise _Fault(
                f"has annotation {self._ids[annotation]} with a mask of {size[0]}x{size[1]} pixels (height x width), "
                f"and its image has {height}x{width}"
            )

    def _check_polygons(self, images: Ints, sizes: npt.NDArray[np.int32]) -> None:
        """Raise ValueError for corners that are not finite, and for outlines that would take gigabytes to draw."""
        points, ends = np.frombuffer(self._points, dtype=np.float32), _array(self._ends)
        firsts = np.unique(np.searchsorted(ends, np.arange(0, len(points), _CHUNK), side="right") - 1)
        for start, stop in pairwise([*firsts.tolist(), len(ends) - 1]):
            part, cuts = points[ends[start] : ends[stop]].reshape(-1, 2), ends[start:stop] // 2 - ends[start] // 2
            owner = images[np.searchsorted(_array(self._polygons), np.arange(start, stop), side="right") - 1]
            limit = sizes[owner].sum(1)
            corners = np.repeat(limit, np.diff(ends[start : stop + 1]) // 2)[:, None].astype(np.float32)
            finite = np.isfinite(part).all(1)
            # A corner far outside counts as one nearby, as where it is drawn.
            steps = np.abs(np.diff(part.clip(-corners, 2 * corners), axis=0, append=0)).sum(1)
            steps[cuts[1:] - 1] = 0  # between two polygons
            steps[-1:] = 0
            bad = np.add.reduceat(steps, cuts) > 2 * _LONGEST_OUTLINE * limit
            bad |= ~np.logical_and.reduceat(finite, cuts)
            if bad.any():
                polygon = start + np.flatnonzero(bad)[0]
                annotation = np.searchsorted(_array(self._polygons), polygon, side="right") - 1
                raise _Fault(
                    f"has annotation {self._ids[annotation]} with a polygon whose corners are not finite, or whose "
                    f"outline is longer than {_LONGEST_OUTLINE} times its image's"
                )


def _array(values: array[int]) -> Ints:
    return np.frombuffer(values, dtype=np.int64)


def _integer(item: Mapping[str, Any], key: str) -> int:
    value = item.get(key)
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise _Fault(f"{key}={_shown(value)}, which must be an integer")
    return value


def _inside(name: str) -> bool:
    """Whether ``name`` is the path of a file below a folder, on this system."""
    parts = name.split("/")
    return _encodable(name) and "\0" not in name and not {"", ".", ".."}.intersection(parts)


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
