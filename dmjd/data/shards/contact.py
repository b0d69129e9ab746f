"""``dmjd shards show``: a contact sheet."""

from __future__ import annotations

import io
import math

from PIL import Image, ImageDraw

from dmjd.data.decode import FORMATS, mishaps, require_plausible
from dmjd.data.shards.index import ShardSet
from dmjd.data.shards.sample import evenly, image_bytes

CELL, CAPTION, GAP = 160, 28, 8
_PAPER, _INK = "white", "#1f2328"


def contact_sheet(shards: ShardSet, count: int) -> bytes:
    """A PNG of ``count`` samples, evenly spaced over the set, each with its number, size and class.

    Raises:
        BadImage: if one cannot be read.
    """
    chosen = evenly(len(shards.records), count)
    columns = math.ceil(math.sqrt(len(chosen)))
    rows = math.ceil(len(chosen) / columns)
    pitch, height = CELL + GAP, CELL + CAPTION + GAP
    sheet = Image.new("RGB", (columns * pitch + GAP, rows * height + GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for place, index in enumerate(chosen):
        left, top = place % columns * pitch + GAP, place // columns * height + GAP
        data = image_bytes(shards, index)
        with mishaps(shards.name(index)), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            require_plausible(image.format, (image.height, image.width), len(data))
            size = f"{image.height}x{image.width}"
            image.draft("RGB", (CELL, CELL))
            picture = image.convert("RGB")
        picture.thumbnail((CELL, CELL))
        sheet.paste(picture, (left + (CELL - picture.width) // 2, top + (CELL - picture.height) // 2))
        label = int(shards.records["label"][index])
        name = shards.manifest.classes[label] if label >= 0 else ""
        draw.text((left, top + CELL + 1), f"{index}  {size}\n{name[:26]}", fill=_INK, font_size=10)
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()
