"""Encode the images of a shard set so that all decoders read the same pixels.

The format is detected by the first bytes of a file, never by its name. Every image is decoded to its last row first.

- JPEG, 8 bits, baseline or progressive, YCbCr or grey: keeps its bytes without the Exif block. Some decoders apply the
  orientation tag and others do not; MAE ignores it.
- Other lossless images (PNG, GIF, BMP, TIFF, PPM) of up to 256 x 256 pixels: a PNG of the same pixels. An 8-bit grey or
  RGB PNG keeps its bytes.
- Everything else (CMYK and RGB JPEG, WebP, AVIF, HEIC, larger lossless images): a JPEG of quality 95 without chroma
  subsampling.

Pixels are those of ``data=folder``: alpha is dropped, an animation is its first frame, 16-bit grey keeps its high byte.
Damage inside a JPEG scan that still decodes is not detected here; later damage is, by the crc32 of the index.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from dmjd.data.decode import identify, kind_of, read_whole, require_depth, to_mode
from dmjd.errors import BadImage

LOSSLESS_PIXELS = 256 * 256
JPEG_QUALITY = 95
MOST_SIDE = 65500  # limit of libjpeg

_LOSSLESS = ("PNG", "GIF", "BMP", "TIFF", "PPM")
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF", b"\0\0\0\x0cjP")
_PLAIN_PNG_CHUNKS = {b"IHDR", b"IDAT", b"IEND", b"sRGB", b"gAMA", b"cHRM", b"pHYs", b"tIME"}


class Encoded(NamedTuple):
    """An encoded image. ``ending``: "jpg" or "png"; ``height`` and ``width`` in pixels."""

    data: bytes
    ending: str
    height: int
    width: int


def encode(name: str, data: bytes, channels: int) -> Encoded:
    """Encode the image file ``data`` for a shard.

    Args:
        name: name of the image in errors.
        channels: 1 or 3; an image that is re-encoded becomes grey if 1, or if it is grey.

    Raises:
        BadImage: of kind empty, magic (not an image), truncated, undecodable or too large.
    """
    with _decoded(name, data) as image:
        width, height = image.size
        if image.format in ("JPEG", "MPO") and _is_plain_jpeg(data):
            return Encoded(_without_exif(data), "jpg", height, width)
        small = height * width <= LOSSLESS_PIXELS and image.format in _LOSSLESS
        if small and image.format == "PNG" and _is_plain_png(data):
            return Encoded(data, "png", height, width)
        require_depth(image)
        grey = channels == 1 or image.mode in ("1", "L", "LA") or image.mode.startswith("I")
        pixels, buffer = to_mode(image, "L" if grey else "RGB"), io.BytesIO()
        if small:
            pixels.save(buffer, "PNG")
        else:
            pixels.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        return Encoded(buffer.getvalue(), "png" if small else "jpg", height, width)


def measure(name: str, data: bytes) -> tuple[int, int]:
    """(height, width) of an image, after decoding it to its last row.

    Raises:
        BadImage: as :func:`encode` does.
    """
    with _decoded(name, data) as image:
        return image.height, image.width


@contextmanager
def _decoded(name: str, data: bytes) -> Iterator[Image.Image]:
    """Open and decode an image; any exception until the end of the block becomes BadImage."""
    if not data:
        raise BadImage(name, "empty", "has no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Exif blocks and large images
            with identify(io.BytesIO(data), name) as image:
                if max(image.size) > MOST_SIDE:
                    raise BadImage(name, "too large", f"has a side of {max(image.size)} pixels, more than {MOST_SIDE}")
                read_whole(data, image)
                yield image
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        if data.startswith(_MAGIC):
            raise BadImage(name, "undecodable", "has a header that cannot be read") from error
        raise BadImage(name, "magic", f"is not an image: it begins with {data[:12]!r}") from error
    except Image.DecompressionBombError as error:
        raise BadImage(name, "too large", f"cannot be decoded ({error})") from error
    except Exception as error:  # damaged files make Pillow's decoders raise almost anything
        raise BadImage(name, kind_of(error), f"cannot be decoded ({str(error) or type(error).__name__})") from error


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of every segment up to the first scan; ``start`` is the offset of its 0xff byte."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:  # markers without a length
            position += 2
            continue
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        yield marker, position, end
        if marker == 0xDA:
            return
        position = end


def _is_plain_jpeg(data: bytes) -> bool:
    """Whether a JPEG is baseline, extended or progressive with Huffman codes, 8 bits, and grey or YCbCr for libjpeg."""
    frame, jfif, adobe = b"", False, b""
    for marker, start, end in _jpeg_segments(data):
        body = data[start + 4 : end]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if marker > 0xC2:
                return False
            frame = body
        jfif |= marker == 0xE0 and body.startswith(b"JFIF\0")
        if marker == 0xEE and body.startswith(b"Adobe"):
            adobe = body
    if len(frame) < 6 or frame[0] != 8:
        return False
    if frame[5] == 1:
        return True
    if frame[5] != 3:
        return False
    if jfif:
        return True
    if len(adobe) >= 12:
        return adobe[11] != 0
    return frame[6:15:3] != b"RGB"


def _without_exif(data: bytes) -> bytes:
    cuts = [
        (start, end)
        for marker, start, end in _jpeg_segments(data)
        if marker == 0xE1 and data[start + 4 : start + 8] == b"Exif"
    ]
    for start, end in reversed(cuts):
        data = data[:start] + data[end:]
    return data


def _is_plain_png(data: bytes) -> bool:
    """Whether a PNG is 8-bit grey or RGB and has no chunk that decoders treat differently."""
    depth, colour = data[24], data[25]
    position, chunks = 8, set()
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        chunks.add(kind)
        position += 12 + length
    return depth == 8 and colour in (0, 2) and chunks <= _PLAIN_PNG_CHUNKS
