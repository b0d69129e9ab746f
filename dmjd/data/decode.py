"""Decode image files, as much of their pixels as a crop needs.

JPEG files are decoded by the first available of these decoders, whose pixels are bitwise equal:

    dmjd._jpeg    only the requested region, with libjpeg-turbo; also detects damage that the others ignore
    torchcodec    whole colour images without EXIF data, since it applies the orientation
    Pillow        everything else: other formats, and JPEG files that are neither grey nor RGB nor common YCbCr

The format is detected from the first bytes of a file; only TGA, which has no signature, from its name. The EXIF
orientation is ignored (as in MAE and torchvision), alpha is dropped, an animation is its first frame, and 16-bit grey
keeps its high byte.
"""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from io import BytesIO
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError, features
from PIL.TiffImagePlugin import TiffImageFile

from dmjd.data.dataset import Box, OpenImage, Pixels, Size
from dmjd.errors import BadImage
from dmjd.files import open_regular

TOO_SMALL = "too small"

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP", "AVIF", "JPEG2000")
"""Formats that Pillow reads. Its other plugins start programs (EPS) or are not formats of image data sets."""

_PLUGINS = {"HEIF": ("pillow_heif", "pillow-heif"), "JXL": ("pillow_jxl", "pillow-jxl-plugin")}
"""Formats that a plugin of Pillow reads: its module and its package."""

_FEATURES = {"AVIF": ("avif", "'pillow>=11.3'"), "WEBP": ("webp", "pillow"), "JPEG2000": ("jpg_2000", "pillow")}
"""Formats that some builds of Pillow lack: Pillow's name of the feature, and a package that has it."""

_NEEDING = {
    **dict.fromkeys((".heic", ".heif", ".hif"), "HEIF"),
    **dict.fromkeys((".jp2", ".j2k", ".jpx"), "JPEG2000"),
    **{".jxl": "JXL", ".avif": "AVIF", ".webp": "WEBP"},
}
"""Endings of files whose decoder may be missing."""

_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx")
_SHARED_BRANDS = (b"mif1", b"msf1")  # of HEIF and of AVIF
_JXL_MAGIC = (b"\xff\x0a", b"\0\0\0\x0cJXL ")

_JPEG_MAGIC = b"\xff\xd8\xff"
_DENSEST = {"JPEG": 1024, "MPO": 1024, "GIF": 2560, "PNG": 8256, "TGA": 64}
"""Greatest number of pixels per byte of a file: Huffman codes of one bit for an 8x8 block subsampled 4x4, LZW strings
of 3840 in 12 bits, deflate of 1032 bytes of 8 pixels, runs of 128 pixels in 2 bytes."""

_PNG_CHANNELS = {2: 3, 4: 2, 6: 4}  # by colour type; one for the others
_PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_PNG_PIECE = 1 << 18

_JPEGS = ("JPEG", "MPO")  # Pillow's names of JPEG files; MPO files have several pictures

# Raised for a dozen ImageNet files, once per file, epoch and worker; their pixels are correct.
warnings.filterwarnings("ignore", message="(Possibly c|C)orrupt EXIF data", category=UserWarning)
# Raised from 89 million pixels on; above 179 million Pillow raises an error. require_plausible checks the size.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def _find_native() -> ModuleType | None:
    """dmjd._jpeg; None if it is not built, cannot load libjpeg-turbo, or DMJD_DISABLE_EXT=1 is set."""
    if os.environ.get("DMJD_DISABLE_EXT", "0") in ("", "0"):
        with suppress(ImportError):
            return import_module("dmjd._jpeg")
    return None


def _find_torchcodec() -> Callable[..., Any] | None:
    """torchcodec's ``decode_jpeg``; None for older versions and builds for another torch."""
    with suppress(ImportError, OSError, RuntimeError, AttributeError):
        return import_module("torchcodec.decoders").decode_jpeg
    return None


_native = _find_native()
_torchcodec = None if _native else _find_torchcodec()


def jpeg_decoder() -> str:
    """The name of the JPEG decoder in use."""
    return "dmjd._jpeg" if _native else "torchcodec" if _torchcodec else "Pillow"


def package_for(ending: str) -> str | None:
    """The package to install where files with this ending (".heic") cannot be decoded; None if they can."""
    kind = _NEEDING.get(ending)
    return None if kind is None else _missing(kind)


def decodable(endings: Iterable[str]) -> list[str]:
    """The ``endings`` of files that can be decoded here."""
    return [ending for ending in endings if package_for(ending.lower()) is None]


@cache
def _missing(kind: str) -> str | None:
    """The package that a format needs, if it is not installed. Registers the plugin of the format."""
    if kind in _FEATURES:
        feature, package = _FEATURES[kind]
        with suppress(ValueError):  # older versions of Pillow do not know the feature
            if features.check_module(feature) if kind != "JPEG2000" else features.check_codec(feature):
                return None
        return package
    module, package = _PLUGINS[kind]
    with suppress(ImportError, OSError):
        plugin = import_module(module)  # JPEG XL registers itself
        if kind == "HEIF":
            plugin.register_heif_opener()
        return None
    return package


def identify(file: BinaryIO, name: str) -> Image.Image:
    """Open an image file with Pillow; ``name``: its name, which decides for formats without a signature.

    Raises:
        ValueError: with the package to install, if its decoder is missing.
        Exception: as Pillow's plugins do.
    """
    head = file.read(12)
    file.seek(0)
    brand = head[8:12] if head[4:8] == b"ftyp" else b""
    kind = "HEIF" if brand in _HEIF_BRANDS else "JXL" if head.startswith(_JXL_MAGIC) else None
    if kind is not None and (package := _missing(kind)):
        raise ValueError(f"{kind} has no decoder here: pip install {package}")
    if brand in _SHARED_BRANDS and not _missing("HEIF"):
        return Image.open(file, formats=("AVIF", "HEIF"))
    formats = FORMATS if kind is None else (kind,)
    return Image.open(file, formats=(*formats, "TGA") if name.lower().endswith(".tga") else formats)


def open_image(data: bytes, name: str, channels: int, min_size: Size = (1, 1)) -> OpenImage:
    """Read the header of an image file.

    Args:
        data: the whole file.
        name: name of the image in errors.
        channels: 1 (grey) or 3 (RGB), to which the pixels are converted.
        min_size: least (height, width).

    Raises:
        BadImage: if it is empty, too small, or not an image.
    """
    with decode_errors(name):
        if not data:
            raise EOFError("the file is empty")
        if _native and data.startswith(_JPEG_MAGIC):
            height, width, plain = _native.header(data)
            # Larger images are left to Pillow, which rejects them as decompression bombs.
            if plain and height * width <= 2 * (Image.MAX_IMAGE_PIXELS or height * width):
                require_plausible("JPEG", (height, width), len(data))
                _require(name, (height, width), min_size)
                return _NativeJpeg(data, name, channels, (height, width))
        image = identify(BytesIO(data), name)
        _require_usable(image, len(data), name, min_size)
        plain = image.format == "JPEG" and image.mode == "RGB" and "exif" not in image.info
        decoder = _TorchcodecJpeg if _torchcodec and plain and channels == 3 else _PillowImage
        return decoder(data, name, channels, image)


def check_header(path: str, min_size: Size) -> Size:
    """Check the header of the file ``path``, and return its (height, width).

    Raises:
        BadImage: as :func:`open_image`.
    """
    with decode_errors(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise EOFError("the file is empty")
        with identify(file, path) as image:
            _require_usable(image, size, path, min_size)
            return image.height, image.width


def read_bytes(path: str) -> bytes:
    """Read the file ``path``. Raises BadImage if it is missing or cannot be read."""
    with decode_errors(path), open_regular(path) as file:
        return file.read()


@contextmanager
def decode_errors(name: str) -> Iterator[None]:
    """Turn any exception of the block into BadImage of the image ``name``."""
    try:
        yield
    except BadImage:
        raise
    except Exception as error:  # damaged files make Pillow's decoders raise almost anything
        raise BadImage(name, kind_of(error), f"cannot be read as an image ({_reason(error)})") from error


class _NativeJpeg:
    """An :class:`~dmjd.data.dataset.OpenImage` decoded by dmjd._jpeg."""

    def __init__(self, data: bytes, name: str, channels: int, size: Size) -> None:
        self._data, self._name, self._channels = data, name, channels
        self.size = size

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        assert _native is not None
        half = _half(box, at_least)
        with decode_errors(self._name):
            return _native.decode_region(self._data, *(half or box), self._channels, scale=2 if half else 1)


class _PillowImage:
    """An :class:`~dmjd.data.dataset.OpenImage` decoded by Pillow."""

    def __init__(self, data: bytes, name: str, channels: int, image: Image.Image) -> None:
        self._data, self._name, self._mode, self._image = data, name, "L" if channels == 1 else "RGB", image
        self.size = image.height, image.width

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        image, half = self._image, _half(box, at_least)
        with decode_errors(self._name):
            if half is not None and image.format in _JPEGS:
                # Opened again, since draft() is permanent.
                image = Image.open(BytesIO(self._data), formats=FORMATS)
                image.draft(None, (image.width // 2, image.height // 2))
                box = half
            else:
                _load(self._data, image)
            top, left, height, width = box
            pixels = np.array(to_mode(image.crop((left, top, left + width, top + height)), self._mode))
        return pixels.reshape(height, width, -1)


class _TorchcodecJpeg(_PillowImage):
    """An RGB image decoded by torchcodec, or by Pillow at half size."""

    def region(self, box: Box, at_least: Size | None = None) -> Pixels:
        import torch  # not at the top, for processes that need no torch

        assert _torchcodec is not None
        if _half(box, at_least) is not None:
            return super().region(box, at_least)
        top, left, height, width = box
        with decode_errors(self._name):
            whole = _torchcodec(torch.frombuffer(bytearray(self._data), dtype=torch.uint8))  # [C, H, W], channels last
        pixels: Pixels = whole.permute(1, 2, 0)[top : top + height, left : left + width].numpy()
        return pixels


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """``image`` converted to ``mode``, "L" or "RGB": the high byte of 16-bit grey, alpha dropped."""
    if image.mode.startswith("I"):  # convert() would clip everything above 255 to white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif "transparency" in image.info:  # Pillow warns unless a palette's alpha is dropped in a second step
        image = image.convert("RGBA")
    return image.convert(mode)


def _half(box: Box, at_least: Size | None) -> Box | None:
    """``box`` in the image at half size; None if it would be smaller than ``at_least``."""
    if at_least is None or box[2] < 2 * at_least[0] or box[3] < 2 * at_least[1]:
        return None
    top, left, height, width = box
    return top // 2, left // 2, height // 2, width // 2


def read_whole(data: bytes, image: Image.Image) -> None:
    """Decode the file ``data``, opened as ``image``, to its last row. Raises the exceptions of its decoder.

    libjpeg invents missing rows of a truncated file, which Pillow does not report and dmjd._jpeg does. dmjd._jpeg also
    skips the inverse transform of all rows but the last.
    """
    require_plausible(image.format, (image.height, image.width), len(data))
    if _native and image.format in _JPEGS:
        height, width, plain = _native.header(data)
        if plain:
            _native.decode_region(data, height - 1, 0, 1, width, 3)
            return
    _load(data, image)


def _load(data: bytes, image: Image.Image) -> None:
    """Decode ``image`` with Pillow; EOFError if rows of a PNG or TIFF are missing, which Pillow fills with zeros."""
    if isinstance(image, TiffImageFile):
        rows = max((extents[3] for _, extents, *_ in image.tile if extents), default=0)
        if rows < image.height:
            raise EOFError(f"truncated: its header has {image.height} rows, the file {rows}")
    image.load()
    if image.format == "PNG":
        last_row = image.crop((0, image.height - 1, image.width, image.height))
        if image.info.get("interlace") or not last_row.tobytes().strip(b"\0"):
            _require_rows(data)


def require_plausible(kind: str | None, size: Size, count: int) -> None:
    """Raise EOFError if a file of ``count`` bytes cannot contain ``size``, (height, width), in format ``kind``."""
    pixels = size[0] * size[1]
    if pixels > _DENSEST.get(kind or "", pixels) * count:
        raise EOFError(f"truncated: its header has {size[0]}x{size[1]} pixels, more than {count} bytes can contain")


def _require_rows(data: bytes) -> None:
    """Raise EOFError if the PNG file ``data`` has fewer rows than its header."""
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
        raise EOFError(f"truncated: its header has {height}x{width} pixels, the file fewer")


def _require_usable(image: Image.Image, count: int, name: str, min_size: Size) -> None:
    require_plausible(image.format, (image.height, image.width), count)
    require_depth(image)
    _require(name, (image.height, image.width), min_size)


def require_depth(image: Image.Image) -> None:
    """Raise ValueError for pixels of 32 bits. Pillow's mode of a 16-bit PGM file is "I" as well."""
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        raise ValueError("its pixels have 32 bits; convert it to 8 bits")


def _require(name: str, size: Size, least: Size) -> None:
    if size[0] < least[0] or size[1] < least[1]:
        raise too_small(name, size, least)


def too_small(name: str, size: Size, least: Size) -> BadImage:
    """The error of an image of ``size`` below ``least``."""
    fault = f"({size[0]}x{size[1]}) cannot fill the {least[0]}x{least[1]} crop (height x width)"
    return BadImage(name, TOO_SMALL, fault)


def kind_of(error: Exception) -> str:
    """The ``kind`` of :class:`dmjd.errors.BadImage` for an exception."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return "missing"
    if isinstance(error, OSError) and error.errno:  # Pillow's own OSErrors have no number
        return "unreadable"
    truncated = isinstance(error, EOFError) or "truncated" in str(error).lower()
    return "truncated" if truncated else "undecodable"


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not a supported format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
