"""From the bytes of an image as it was found to the bytes of a shard, which every decoder reads alike.

What a file is, its first bytes say and never its name. Every image is decoded to its last row before it is let in.

- A JPEG of 8 bits, baseline or progressive, in YCbCr or grey, keeps its bytes, but for the Exif block, which goes: some
  decoders turn an image by its orientation tag and others do not, and MAE's pixels are those of the file as it lies.
- Another image of up to 256 x 256 pixels that was lossless (PNG, GIF, BMP, TIFF, PPM) is a PNG, with the very pixels;
  a PNG that is plain already keeps its bytes.
- All else, CMYK and RGB JPEGs, WebP, AVIF and large lossless images, becomes a JPEG of quality 95 without chroma
  subsampling.

Pixels are those of ``data=folder``: alpha is dropped, an animation is its first frame, 16-bit grey keeps its high byte.
Damage inside a scan that still decodes cannot be told from a picture here; later damage the index's crc32 betrays.
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from dmjd.data.decode import FORMATS, read_whole
from dmjd.errors import BadImage

LOSSLESS_PIXELS = 256 * 256
JPEG_QUALITY = 95
MOST_SIDE = 65500  # libjpeg's

_LOSSLESS = ("PNG", "GIF", "BMP", "TIFF", "PPM")
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"RIFF", b"\0\0\0\x0cjP")
_PLAIN_PNG_CHUNKS = {b"IHDR", b"IDAT", b"IEND", b"sRGB", b"gAMA", b"cHRM", b"pHYs", b"tIME"}


class Encoded(NamedTuple):
    """``ending`` is jpg or png; ``height`` and ``width`` are in pixels."""

    data: bytes
    ending: str
    height: int
    width: int


def encode(name: str, data: bytes, channels: int) -> Encoded:
    """What a shard holds of the image file ``data``.

    Args:
        name: of the image, for the sentence about it.
        channels: 1 or 3; an image that has to be encoded anew is grey if 1, or if it was grey.

    Raises:
        BadImage: if it cannot be used: its kind is empty, magic (no image), truncated, undecodable, or too large.
    """
    with _decoded(name, data) as image:
        width, height = image.size
        if image.format in ("JPEG", "MPO") and _is_plain_jpeg(data):
            return Encoded(_without_exif(data), "jpg", height, width)
        small = height * width <= LOSSLESS_PIXELS and image.format in _LOSSLESS
        if small and image.format == "PNG" and _is_plain_png(data):
            return Encoded(data, "png", height, width)
        pixels, buffer = _eight_bits(image, channels), io.BytesIO()
        if small:
            pixels.save(buffer, "PNG")
        else:
            pixels.save(buffer, "JPEG", quality=JPEG_QUALITY, subsampling=0)
        return Encoded(buffer.getvalue(), "png" if small else "jpg", height, width)


def measure(name: str, data: bytes) -> tuple[int, int]:
    """(height, width) of an image that stays as it is, once it has decoded to its last row.

    Raises:
        BadImage: as :func:`encode` does.
    """
    with _decoded(name, data) as image:
        return image.height, image.width


@contextmanager
def _decoded(name: str, data: bytes) -> Iterator[Image.Image]:
    """The image, until the end of the block, for all of which BadImage is what any mishap becomes."""
    if not data:
        raise BadImage(name, "empty", "has no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Exif blocks, which do not matter, and large images
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if max(image.size) > MOST_SIDE:
                    raise BadImage(name, "too large", f"has a side of {max(image.size)} pixels, more than {MOST_SIDE}")
                read_whole(data, image)
                yield image
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        if data.startswith(_MAGIC):
            raise BadImage(name, "undecodable", "has a header that cannot be read") from error
        raise BadImage(name, "magic", f"is no image: it begins with {data[:12]!r}") from error
    except Image.DecompressionBombError as error:
        raise BadImage(name, "too large", f"cannot be decoded ({error})") from error
    except Exception as error:  # damaged files make Pillow's decoders raise almost anything
        truncated = isinstance(error, EOFError) or "truncated" in str(error).lower()
        kind = "truncated" if truncated else "undecodable"
        raise BadImage(name, kind, f"cannot be decoded ({str(error) or type(error).__name__})") from error


def _eight_bits(image: Image.Image, channels: int) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits; convert it to 8 bits")
    if image.mode.startswith("I;16"):  # convert() would clip everything above 255 to white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    grey = channels == 1 or image.mode in ("1", "L", "LA")
    if "transparency" in image.info:  # a palette's alpha goes in a second step
        image = image.convert("RGBA")
    return image.convert("L" if grey else "RGB")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of every segment before the first scan; ``start`` is that of its 0xff."""
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:  # these have no length
            position += 2
            continue
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        yield marker, position, end
        if marker == 0xDA:
            return
        position = end


def _is_plain_jpeg(data: bytes) -> bool:
    """Whether it is baseline, extended or progressive with Huffman codes, of 8 bits, and grey or YCbCr to libjpeg."""
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
    """Whether it is 8-bit grey or RGB and has nothing that some decoders heed and others do not."""
    depth, colour = data[24], data[25]
    position, chunks = 8, set()
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        chunks.add(kind)
        position += 12 + length
    return depth == 8 and colour in (0, 2) and chunks <= _PLAIN_PNG_CHUNKS
