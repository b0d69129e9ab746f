"""Pictures of segmentations and detections over their images. Imports no torch."""

from __future__ import annotations

import colorsys
import io
import json
import logging
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from dmjd.files import replace_file
from dmjd.runs.paths import RunPaths

Picture = NDArray[np.uint8]
"""uint8 ``[H, W, 3]``."""
Map = NDArray[np.uint8]
"""Classes, uint8 ``[H, W]``; 255: none."""

EXAMPLES = 4
"""Images in the picture of a validation."""
PREDICTIONS = "predictions.png"
PER_CLASS = "per_class.json"

_IGNORED = 255
_OPACITY = 0.55
_STEPS = 1.22074408 ** -np.arange(1.0, 4.0)  # an additive recurrence that fills the cube of HSV evenly
_MARGIN, _GAP, _HEAD, _LINE = 8, 6, 20, 16
_CELLS = (288, 224, 176, 136, 104)
_MAX_BYTES = 300_000  # reports embed the file
_INK, _PAPER = (40, 44, 52), (255, 255, 255)
_LEGEND, _LETTERS = 24, 22

_log = logging.getLogger("dmjd")


class Objects(NamedTuple):
    """M objects of an image.

    boxes: float ``[M, 4]``, (x1, y1, x2, y2) in pixels. labels: int ``[M]``. scores: float ``[M]``; None for
    annotations. masks: M arrays, bool ``[H, W]``; None without masks.
    """

    boxes: NDArray[np.floating]
    labels: NDArray[np.integer]
    scores: NDArray[np.floating] | None = None
    masks: Sequence[NDArray[np.bool_]] | None = None


def palette(count: int) -> NDArray[np.uint8]:
    """``count`` distinct colours, uint8 ``[count, 3]``. The first ones do not depend on ``count``."""
    steps = (np.arange(count)[:, None] * _STEPS + (0, 0.5, 0.5)) % 1
    hues, saturations, values = (steps * (1, 0.5, 0.5) + (0, 0.5, 0.5)).T.tolist()
    colours = [colorsys.hsv_to_rgb(*each) for each in zip(hues, saturations, values, strict=True)]
    return (255 * np.array(colours).reshape(count, 3)).round().astype(np.uint8)


def overlay(image: NDArray[np.uint8], found: Map | Objects, names: Sequence[str]) -> Picture:
    """``image``, uint8 ``[H, W, C]``, under the classes of a map, or the masks, boxes and names of objects.

    Pixels without one of the classes stay as they are. Objects are drawn from the lowest score to the highest.
    """
    colours = palette(len(names))
    picture = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image.copy()
    if isinstance(found, np.ndarray):
        known = found < len(names)  # a wider head may predict more
        picture[known] = _blend(picture[known], colours[found[known]])
        return picture
    order = list(range(len(found.labels)))
    if found.scores is not None:
        order = np.argsort(found.scores, kind="stable").tolist()
    if found.masks is not None:
        for number in order:
            mask = found.masks[number]
            picture[mask] = _blend(picture[mask], colours[found.labels[number]])
    drawn = Image.fromarray(picture)
    draw = ImageDraw.Draw(drawn)
    for number in order:
        x1, y1, x2, y2 = (float(value) for value in found.boxes[number])
        colour = _colour(colours[found.labels[number]])
        right, bottom = max(x1, x2 - 1), max(y1, y2 - 1)  # x2 and y2 are the pixels after the last
        draw.rectangle((x1, y1, right, bottom), outline=colour, width=2)
        score = "" if found.scores is None else f" {found.scores[number]:.2f}"
        _label(draw, (x1, y1), f"{_shown(names, int(found.labels[number]))}{score}", colour, drawn.width)
    return np.asarray(drawn)


def _shown(names: Sequence[str], label: int) -> str:
    """The name of a class in ASCII, as Pillow's font has few other letters, behind its number if some are lost."""
    letters = "".join(each for each in unicodedata.normalize("NFKD", names[label]) if not unicodedata.combining(each))
    known = letters.encode("ascii", "replace").decode()
    return (known if known == letters else f"{label} {known}")[:_LETTERS]


def _blend(pixels: NDArray[np.uint8], colours: NDArray[np.uint8]) -> NDArray[np.uint8]:
    mixed: NDArray[np.uint8] = ((1 - _OPACITY) * pixels + _OPACITY * colours).round().astype(np.uint8)
    return mixed


def _label(
    draw: ImageDraw.ImageDraw, corner: tuple[float, float], text: str, colour: tuple[int, ...], width: int
) -> None:
    """Write ``text`` above ``corner``, within a picture of ``width``."""
    font = ImageFont.load_default(11)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    x, y = max(min(corner[0], width - (right - left) - 5), 0), max(corner[1] - (bottom - top) - 4, 0)
    draw.rectangle((x, y, x + right - left + 4, y + bottom - top + 4), fill=colour)
    draw.text((x + 2 - left, y + 2 - top), text, fill=_contrast(colour), font=font)


def _contrast(colour: Sequence[int]) -> tuple[int, int, int]:
    return _INK if 0.3 * colour[0] + 0.6 * colour[1] + 0.1 * colour[2] > 128 else _PAPER


def _colour(values: NDArray[np.uint8]) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in values)
    return red, green, blue


def predictions_picture(
    images: Sequence[NDArray[np.uint8]],
    truths: Sequence[Map | Objects],
    predictions: Sequence[Map | Objects],
    names: Sequence[str],
) -> bytes:
    """A PNG with a row for each image: the image, its annotation and the prediction; below them the classes of maps.

    It has at most 300 kB: its cells are smaller where needed.
    """
    rows = list(zip(images, truths, predictions, strict=True))
    maps = [each for each in (*truths, *predictions) if isinstance(each, np.ndarray)]
    present = np.unique(np.concatenate([np.unique(each) for each in maps])) if maps else np.array([], int)
    legend = [int(label) for label in present if label < len(names)][:_LEGEND]
    colours, content = [_PAPER, _INK, *map(_colour, palette(len(names))[legend])], b""
    for cell in _CELLS:
        content = _png(_sheet(rows, legend, names, cell), colours)
        if len(content) <= _MAX_BYTES:
            break
    return content


def _sheet(
    rows: Sequence[tuple[NDArray[np.uint8], Map | Objects, Map | Objects]],
    legend: Sequence[int],
    names: Sequence[str],
    cell: int,
) -> Image.Image:
    sizes = [_fitted(image.shape[:2], cell) for image, *_ in rows]
    width = 2 * _MARGIN + 3 * cell + 2 * _GAP
    columns = max(1, width // 150)
    lines = -(-len(legend) // columns)
    height = _HEAD + sum(tall + _GAP for tall, _ in sizes) + _LINE * lines + _MARGIN
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for column, title in enumerate(("image", "annotation", "prediction")):
        draw.text((_MARGIN + column * (cell + _GAP), 4), title, fill=_INK, font=font)
    top = _HEAD
    for (image, *found), (tall, wide) in zip(rows, sizes, strict=True):
        colour = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
        small = np.asarray(Image.fromarray(colour).resize((wide, tall), Image.Resampling.BOX))
        cells = [small, *(overlay(small, _resized(each, image.shape[:2], (tall, wide)), names) for each in found)]
        for column, picture in enumerate(cells):
            sheet.paste(Image.fromarray(picture), (_MARGIN + column * (cell + _GAP), top))
        top += tall + _GAP
    colours = palette(len(names))
    for number, label in enumerate(legend):
        x, y = _MARGIN + number % columns * 150, top + number // columns * _LINE
        draw.rectangle((x, y + 2, x + 11, y + 13), fill=_colour(colours[label]))
        draw.text((x + 16, y), _shown(names, label), fill=_INK, font=font)
    return sheet


def _resized(found: Map | Objects, size: Sequence[int], target: tuple[int, int]) -> Map | Objects:
    """Classes or objects of an image of ``size`` after it is resized to ``target``."""
    rows, columns = (np.arange(new) * old // new for old, new in zip(size, target, strict=True))
    if isinstance(found, np.ndarray):
        return found[rows[:, None], columns]
    scale = np.array([target[1] / size[1], target[0] / size[0]] * 2)
    masks = None if found.masks is None else [mask[rows[:, None], columns] for mask in found.masks]
    return found._replace(boxes=np.asarray(found.boxes) * scale, masks=masks)


def _fitted(size: Sequence[int], cell: int) -> tuple[int, int]:
    height, width = size
    scale = cell / max(height, width)
    return max(1, round(height * scale)), max(1, round(width * scale))


def _png(sheet: Image.Image, exact: Sequence[tuple[int, int, int]]) -> bytes:
    """A PNG of 256 colours, of which those in ``exact`` are kept as they are."""
    free = 256 - len(exact)
    reduced = sheet.quantize(free, dither=Image.Dither.NONE)
    pixels, indices = np.asarray(sheet), np.array(reduced)
    for number, colour in enumerate(exact):
        indices[(pixels == colour).all(2)] = free + number
    chosen = (reduced.getpalette() or [])[: 3 * free]
    image, buffer = Image.fromarray(indices), io.BytesIO()
    image.putpalette([*chosen, *[0] * (3 * free - len(chosen)), *np.ravel(exact).tolist()])
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def write_validation(
    run: RunPaths, step: int, picture: bytes, names: Sequence[str], columns: Mapping[str, Sequence[float | None]]
) -> None:
    """Write ``pictures/predictions.png`` and ``per_class.json`` of ``run``: the scores of each class after ``step``.

    A file that cannot be written is logged as a warning: it is no result.
    """
    try:
        run.pictures.mkdir(exist_ok=True)
        replace_file(run.pictures / PREDICTIONS, picture)
        table = {"step": step, "classes": list(names), **{name: list(values) for name, values in columns.items()}}
        replace_file(run.path / PER_CLASS, json.dumps(table, indent=1) + "\n")
    except OSError as error:
        _log.warning("predictions of the validation are not shown: %s", error)
