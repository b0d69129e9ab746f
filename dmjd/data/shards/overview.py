"""``dmjd shards stat`` and ``dmjd shards show``: a summary and a contact sheet of a shard set."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from dmjd.data.dataset import evenly
from dmjd.data.decode import decode_errors, identify, require_plausible
from dmjd.data.shards.index import ShardSet
from dmjd.data.shards.sample import image_bytes

FORMAT_SAMPLES = 1000
"""Images whose format is read from the file, evenly spaced, since the index has no formats."""

_MAGIC = ((b"\xff\xd8", "JPEG"), (b"\x89PNG", "PNG"), (b"GIF8", "GIF"), (b"BM", "BMP"), (b"RIFF", "WebP"))
_SIDES = (1, 64, 128, 256, 384, 512, 1024, 2048)
_BAR = 40
_CELL, _CAPTION, _GAP = 160, 28, 8  # pixels
_PAPER, _INK = "white", "#1f2328"


def describe(shards: ShardSet) -> Iterator[str]:
    """Lines: counts, labels, formats, sizes in bytes and pixels, and a histogram of the shorter side."""
    manifest, records = shards.manifest, shards.records
    total = sum(shard.bytes for shard in manifest.shards)
    yield f"source    {manifest.source}, written by dmjd {manifest.dmjd}"
    yield f"samples   {manifest.samples} in {len(manifest.shards)} shard(s) of {total / 1e6:.1f} MB together"
    yield f"channels  {manifest.channels}"
    yield f"labels    {_labels(records['label'], manifest.classes)}"
    if not len(records):
        return
    chosen = evenly(len(records), FORMAT_SAMPLES).tolist()
    formats = Counter(_format(image_bytes(shards, index)) for index in chosen)
    parts = ", ".join(f"{name} {100 * count / len(chosen):.1f} %" for name, count in formats.most_common())
    yield f"formats   {parts} (of {len(chosen)})"
    yield f"bytes     {_spread(records['size'])}"
    yield f"height    {_spread(records['height'])}"
    yield f"width     {_spread(records['width'])}"
    yield "shorter side in pixels"
    yield from _histogram(np.minimum(records["height"], records["width"]))


def _labels(labels: npt.NDArray[np.int32], classes: tuple[str, ...]) -> str:
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    if not len(classes):
        return "none"
    named = f"{len(classes)} classes of {counts.min()} to {counts.max()} samples"
    unlabelled = int((labels < 0).sum())
    return f"{named}; {unlabelled} samples have none" if unlabelled else named


def _format(data: bytes) -> str:
    return next((name for magic, name in _MAGIC if data.startswith(magic)), "other")


def _spread(values: npt.NDArray[np.unsignedinteger]) -> str:
    least, low, median, high, most = np.percentile(values, [0, 5, 50, 95, 100]).round().astype(int)
    return f"{least} to {most}, median {median}, 90 % within {low} to {high}"


def _histogram(sides: npt.NDArray[np.unsignedinteger]) -> Iterator[str]:
    edges = [*_SIDES, 1 << 16]
    counts, _ = np.histogram(sides, edges)
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        name = f"{low}..{high - 1}" if high < 1 << 16 else f"{low} and more"
        yield f"  {name:>13} {count:10} {'#' * round(_BAR * count / max(counts))}".rstrip()


def contact_sheet(shards: ShardSet, count: int) -> bytes:
    """A PNG of ``count`` samples, evenly spaced over the set, each with its number, size and class.

    Raises:
        BadImage: if one cannot be read.
    """
    chosen = evenly(len(shards.records), count).tolist()
    columns = math.ceil(math.sqrt(len(chosen)))
    rows = math.ceil(len(chosen) / columns)
    pitch, height = _CELL + _GAP, _CELL + _CAPTION + _GAP
    sheet = Image.new("RGB", (columns * pitch + _GAP, rows * height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for place, index in enumerate(chosen):
        left, top = place % columns * pitch + _GAP, place // columns * height + _GAP
        data = image_bytes(shards, index)
        with decode_errors(shards.name(index)), identify(io.BytesIO(data), "") as image:
            require_plausible(image.format, (image.height, image.width), len(data))
            size = f"{image.height}x{image.width}"
            image.draft("RGB", (_CELL, _CELL))
            picture = image.convert("RGB")
        picture.thumbnail((_CELL, _CELL))
        sheet.paste(picture, (left + (_CELL - picture.width) // 2, top + (_CELL - picture.height) // 2))
        label = int(shards.records["label"][index])
        name = shards.manifest.classes[label] if label >= 0 else ""
        draw.text((left, top + _CELL + 1), f"{index}  {size}\n{name[:26]}", fill=_INK, font_size=10)
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()
