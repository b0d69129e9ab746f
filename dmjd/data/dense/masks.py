"""Masks of objects: polygons and run lengths as COCO stores them, drawn at any scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dmjd.data.dataset import Pixels, Size

Corners = tuple[float, float, float, float]
"""(x1, y1, x2, y2) in pixels of an image."""


@dataclass(frozen=True)
class MaskStore:
    """The masks of all objects of a data set: each some polygons, or run lengths.

    points: float32 ``[P]``, x and y of the polygons' corners in turn, in pixels.
    ends: int64 ``[Q + 1]``: polygon q has ``points[ends[q] : ends[q + 1]]``.
    polygons: int64 ``[A, 2]``: first polygon of an object, and the one after its last; equal for run lengths.
    runs: uint32 ``[R]``: lengths of zeros and ones in turn, down the columns of an image.
    spans: int64 ``[A, 2]``: the part of ``runs`` of an object.
    """

    points: npt.NDArray[np.float32]
    ends: npt.NDArray[np.int64]
    polygons: npt.NDArray[np.int64]
    runs: npt.NDArray[np.uint32]
    spans: npt.NDArray[np.int64]


class Masks:
    """The masks of an image's objects, not yet drawn.

    Args:
        store: masks of all objects.
        objects: those of the image.
        size: (height, width) of the image.
    """

    def __init__(self, store: MaskStore, objects: range, size: Size) -> None:
        self._store, self._objects, self._size = store, objects, size

    def __len__(self) -> int:
        return len(self._objects)

    def render(self, number: int, box: Corners, size: Size) -> Pixels:
        """Draw mask ``number``: the part ``box`` of the image, resized to ``size``.

        Polygons are scaled and then drawn by COCO's rule; the nearest pixel of run lengths is taken. With the whole
        image as box, and its size, this is COCO's own mask.

        Args:
            box: not empty.
            size: (height, width) of the result, at least 1.

        Returns:
            uint8 ``[height, width]``, 0 and 1.
        """
        place = self._objects[number]
        first, last = self._store.polygons[place].tolist()
        if first < last:
            ends = self._store.ends[first : last + 1].tolist()
            points = self._store.points[ends[0] : ends[-1]].reshape(-1, 2).astype(np.float64)
            height, width = self._size
            # Outlines far outside must not be traced pixel by pixel.
            points = points.clip((-width, -height), (2 * width, 2 * height))
            points = (points - box[:2]) * (size[1] / (box[2] - box[0]), size[0] / (box[3] - box[1]))
            flat, start = points.ravel(), ends[0]
            return _fill([flat[a - start : b - start] for a, b in pairwise(ends)], size)
        begin, end = self._store.spans[place].tolist()
        rows = _nearest(box[1], box[3], size[0], self._size[0])
        columns = _nearest(box[0], box[2], size[1], self._size[1])
        left, right = int(columns[0]), int(columns[-1]) + 1
        part = decode_columns(self._store.runs[begin:end], self._size[0], left, right)
        return np.ascontiguousarray(part[rows[:, None], columns - left])


def _fill(polygons: Sequence[npt.NDArray[np.float64]], size: Size) -> Pixels:
    """The union of polygons, x and y in turn, by COCO's rule; uint8 ``[h, w]``."""
    from faster_coco_eval.core import mask  # of the extra dmjd[dense]

    drawn = mask.frPyObjects([polygon.tolist() for polygon in polygons], *size)
    pixels: Pixels = mask.decode(drawn[0] if len(drawn) == 1 else mask.merge(drawn))
    return pixels


def _nearest(low: float, high: float, count: int, limit: int) -> npt.NDArray[np.int64]:
    """The pixel below ``limit`` at the centre of each of ``count`` parts of ``low .. high``."""
    centres = low + (np.arange(count) + 0.5) * ((high - low) / count)
    return np.floor(centres).astype(np.int64).clip(0, limit - 1)


def decode_columns(runs: npt.NDArray[np.uint32], height: int, left: int, right: int) -> Pixels:
    """Columns ``left .. right - 1`` of a mask of run lengths, uint8 ``[height, right - left]``."""
    ends = np.cumsum(runs, dtype=np.int64) - left * height
    inside = ends.clip(0, (right - left) * height)
    values = np.arange(len(runs), dtype=np.uint8) & 1
    return np.repeat(values, np.diff(inside, prepend=0)).reshape(right - left, height).T


def decode_counts(text: str) -> npt.NDArray[np.int64]:
    """The run lengths of a compressed COCO mask.

    Each number is written in groups of five bits, the lowest first, with 32 added to all but the last and 48 to every
    character; from the fourth on it is the difference to the number two places before.

    Raises:
        ValueError: if the text has other characters, or ends within a number.
    """
    codes = np.frombuffer(text.encode(errors="replace"), dtype=np.uint8).astype(np.int64) - 48
    if not len(codes):
        return codes
    last = np.flatnonzero(codes & 32 == 0)
    if codes.min() < 0 or codes.max() > 63 or not len(last) or last[-1] != len(codes) - 1:
        raise ValueError("counts that are not run lengths")
    starts = np.concatenate(([0], last[:-1] + 1))
    lengths = last - starts + 1
    if lengths.max() > 7:
        raise ValueError("counts that are not run lengths")
    shifts = 5 * (np.arange(len(codes)) - np.repeat(starts, lengths))
    numbers: npt.NDArray[np.int64] = np.add.reduceat((codes & 31) << shifts, starts)
    numbers -= np.where(codes[last] & 16, 1 << 5 * lengths, 0)
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers
