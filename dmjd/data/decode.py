"""Image files as bytes, and as much of their pixels as a crop needs.

JPEG files are decoded by the first of these that is there, whose pixels are the same bit for bit:

    dmjd._jpeg    only the region asked for, on libjpeg-turbo; also refuses damage that the others paper over
    torchcodec    whole colour images without EXIF data, whose orientation it would apply
    Pillow        everything else: other formats, and JPEG files that are neither grey nor RGB nor common YCbCr

Always: the EXIF orientation is ignored (as MAE and torchvision do), alpha is dropped, an animation is its first frame,
and 16-bit grey keeps its high byte.
"""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from io import BytesIO
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from dmjd.data.dataset import Box, OpenImage, Pixels, Size
from dmjd.errors import BadImage
from dmjd.files import open_regular

TOO_SMALL = "too small"

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP", "AVIF", "JPEG2000")
"""Pillow's other plugins start programs (EPS) or are no image formats of a data set."""

_JPEG_MAGIC = b"\xff\xd8\xff"
_DENSEST = {"JPEG": 1024, "MPO": 1024, "GIF": 2560, "PNG": 8256}
"""The most pixels that a byte of a file can stand for: one bit for 8x8 samples of which at most 4x4 share one pixel's
place in Huffman codes, strings of 3840 in 12 bits in LZW, 1032 bytes of 8 pixels in deflate."""

_PNG_CHANNELS = {2: 3, 4: 2, 6: 4}  # by colour type; the others have one
_PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_PNG_PIECE = 1 << 18

_JPEGS = ("JPEG", "MPO")  # what Pillow calls files that begin so; the second holds more than one picture

# Pillow says so for a dozen harmless ImageNet files, once per file, epoch and worker; the pixels are fine.
warnings.filterwarnings("ignore", message="(Possibly c|C)orrupt EXIF data", category=UserWarning)
# It says so between 89 and 179 million pixels, beyond which it raises; the size is compared with the file's below.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def _find_native() -> ModuleType | None:
    """dmjd._jpeg, unless it was built without libjpeg-turbo, does not find it here, or DMJD_DISABLE_EXT=1 is set."""
    if os.environ.get("DMJD_DISABLE_EXT", "0") in ("", "0"):
        with suppress(ImportError):
            return import_module("dmjd._jpeg")
    return None


def _find_torchcodec() -> Callable[..., Any] | None:
    """torchcodec's ``decode_jpeg``; older ones have none, and one for another torch does not load."""
    with suppress(ImportError, OSError, RuntimeError, AttributeError):
        return import_module("torchcodec.decoders").decode_jpeg
    return None


_native = _find_native()
_torchcodec = None if _native else _find_torchcodec()


def jpeg_decoder() -> str:
    """Which of the above decodes JPEG files here."""
    return "dmjd._jpeg" if _native else "torchcodec" if _torchcodec else "Pillow"


def open_image(data: bytes, name: str, channels: int, min_size: Size = (1, 1)) -> OpenImage:
    """The image in ``data``, of which only the header is read yet.

    Args:
        data: a whole file of one of :data:`FORMATS`.
        name: what to call it in a sentence.
        channels: 1 (grey) or 3 (RGB), to which its pixels are converted.
        min_size: (height, width) it may not fall short of.

    Raises:
        BadImage: if it is empty, too small, or not an image.
    """
    with decode_errors(name):
        if not data:
            raise EOFError("the file is empty")
        if _native and data.startswith(_JPEG_MAGIC):
            height, width, plain = _native.header(data)
            # Pillow rejects those that are so large that they must be an attack.
            if plain and height * width <= 2 * (Image.MAX_IMAGE_PIXELS or height * width):
                require_plausible("JPEG", (height, width), len(data))
                _require(name, (height, width), min_size)
                return _NativeJpeg(data, name, channels, (height, width))
        image = Image.open(BytesIO(data), formats=FORMATS)
        _require_usable(image, len(data), name, min_size)
        plain = image.format == "JPEG" and image.mode == "RGB" and "exif" not in image.info
        decoder = _TorchcodecJpeg if _torchcodec and plain and channels == 3 else _PillowImage
        return decoder(data, name, channels, image)


def check_header(path: str, min_size: Size) -> None:
    """Read what comes before the pixels of the file ``path``.

    Raises:
        BadImage: as :func:`open_image`.
    """
    with decode_errors(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise EOFError("the file is empty")
        with Image.open(file, formats=FORMATS) as image:
            _require_usable(image, size, path, min_size)


def read_bytes(path: str) -> bytes:
    """The file ``path``. Raises BadImage if it is missing or cannot be read."""
    with decode_errors(path), open_regular(path) as file:
        return file.read()


@contextmanager
def decode_errors(name: str) -> Iterator[None]:
    """BadImage is what any mishap with the image ``name`` becomes within this block."""
    try:
        yield
    except BadImage:
        raise
    except Exception as error:  # damaged files make Pillow's decoders raise almost anything
        raise BadImage(name, _kind(error), f"cannot be read as an image ({_reason(error)})") from error


class _NativeJpeg:
    """See :class:`dmjd.data.dataset.OpenImage`."""

    def __init__(self, data: bytes, name: str, channels: int, size: Size) -> None:
        self._data, self._name, self._channels = data, name, channels
        self.size = size

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        assert _native is not None
        half = _half(box, at_least)
        with decode_errors(self._name):
            return _native.decode_region(self._data, *(half or box), self._channels, scale=2 if half else 1)


class _PillowImage:
    """See :class:`dmjd.data.dataset.OpenImage`."""

    def __init__(self, data: bytes, name: str, channels: int, image: Image.Image) -> None:
        self._data, self._name, self._mode, self._image = data, name, "L" if channels == 1 else "RGB", image
        self.size = image.height, image.width

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        image, half = self._image, _half(box, at_least)
        with decode_errors(self._name):
            if half is not None and image.format in _JPEGS:
                # Another, since what has been drafted stays small.
                image = Image.open(BytesIO(self._data), formats=FORMATS)
                image.draft(None, (image.width // 2, image.height // 2))
                box = half
            else:
                _load(self._data, image)
            top, left, height, width = box
            pixels = np.array(self._converted(image.crop((left, top, left + width, top + height))))
        return pixels.reshape(height, width, -1)

    def _converted(self, image: Image.Image) -> Image.Image:
        if image.mode.startswith("I;16"):  # convert() would clip everything above 255 to white
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif "transparency" in image.info:  # Pillow warns unless a palette's alpha is dropped in a second step
            image = image.convert("RGBA")
        return image.convert(self._mode)


class _TorchcodecJpeg(_PillowImage):
    """An RGB image, of which Pillow decodes what torchcodec cannot: at half the size."""

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        import torch  # here, since the rest of this module serves processes that do without it

        assert _torchcodec is not None
        if _half(box, at_least) is not None:
            return super().region(box, at_least)
        top, left, height, width = box
        with decode_errors(self._name):
            whole = _torchcodec(torch.frombuffer(bytearray(self._data), dtype=torch.uint8))  # [C, H, W], channels last
        pixels: Pixels = whole.permute(1, 2, 0)[top : top + height, left : left + width].numpy()
        return pixels


def _half(box: Box, at_least: Size | None) -> Box | None:
    """``box`` in an image of half the size, if there it still has ``at_least`` pixels."""
    if at_least is None or box[2] < 2 * at_least[0] or box[3] < 2 * at_least[1]:
        return None
    top, left, height, width = box
    return top // 2, left // 2, height // 2, width // 2


def read_whole(data: bytes, image: Image.Image) -> None:
    """Decode the file ``data``, open as ``image``, to its last row. Raises what its decoder raises.

    libjpeg makes up the rows that a JPEG file lacks and Pillow does not say so; dmjd._jpeg does. Rows above the last
    one need no inverse transform there, so it is faster as well.
    """
    require_plausible(image.format, (image.height, image.width), len(data))
    if _native and image.format in _JPEGS:
        height, width, plain = _native.header(data)
        if plain:
            _native.decode_region(data, height - 1, 0, 1, width, 3)
            return
    _load(data, image)


def _load(data: bytes, image: Image.Image) -> None:
    """Have Pillow decode ``image``. It fills the rows that a PNG or TIFF file lacks with zeros and does not say so."""
    if isinstance(image, TiffImageFile):
        rows = max((extents[3] for _, extents, *_ in image.tile if extents), default=0)
        if rows < image.height:
            raise EOFError(f"truncated: its header says {image.height} rows, and it has {rows}")
    image.load()
    if image.format == "PNG":
        last_row = image.crop((0, image.height - 1, image.width, image.height))
        if image.info.get("interlace") or not last_row.tobytes().strip(b"\0"):
            _require_rows(data)


def require_plausible(kind: str | None, size: Size, count: int) -> None:
    """Raise EOFError if an image file of ``count`` bytes cannot have ``size``, as (height, width), in its format."""
    pixels = size[0] * size[1]
    if pixels > _DENSEST.get(kind or "", pixels) * count:
        raise EOFError(f"truncated: its header says {size[0]}x{size[1]} pixels, more than {count} bytes can hold")


def _require_rows(data: bytes) -> None:
    """Raise EOFError if the PNG file ``data`` has fewer rows than its header says."""
    width, height, depth, colour, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    bits = depth * _PNG_CHANNELS.get(colour, 1)
    passes = _PNG_PASSES if interlaced else ((0, 0, 1, 1),)
    sizes = [(-((x - width) // dx), -((y - height) // dy)) for x, y, dx, dy in passes]
    missing = sum(rows * (1 + (columns * bits + 7) // 8) for columns, rows in sizes if columns > 0 and rows > 0)
    inflate, position = zlib.decompressobj(), 8
    while missing > 0 and not inflate.eof and position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        pending = data[position + 8 : position + 8 + length] if kind == b"IDAT" else b""
        while pending and missing > 0 and not inflate.eof:
            missing -= len(inflate.decompress(pending, _PNG_PIECE))
            pending = inflate.unconsumed_tail
        position += 12 + length
    if missing > 0:
        raise EOFError(f"truncated: its header says {height}x{width} pixels, and it has fewer")


def _require_usable(image: Image.Image, count: int, name: str, min_size: Size) -> None:
    require_plausible(image.format, (image.height, image.width), count)
    if image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits; convert it to 8 bits")
    _require(name, (image.height, image.width), min_size)


def _require(name: str, size: Size, least: Size) -> None:
    if size[0] < least[0] or size[1] < least[1]:
        sizes = f"({size[0]}x{size[1]}) cannot fill the {least[0]}x{least[1]} crop"
        raise BadImage(name, TOO_SMALL, f"{sizes} (height x width)")


def _kind(error: Exception) -> str:
    """As :class:`dmjd.errors.BadImage` tells them apart."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing"
    if isinstance(error, OSError) and error.errno:  # Pillow's own OSErrors have no number
        return "unreadable"
    truncated = isinstance(error, EOFError) or "truncated" in str(error).lower()
    return "truncated" if truncated else "undecodable"


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not a format that Pillow knows"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
