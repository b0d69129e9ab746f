from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from skimage import data

import dmjd.data.decode as decode
from dmjd.data.folder import ImageFolder
from dmjd.data.shards.encode import Encoded, encode, measure
from dmjd.errors import BadImage

Photo = Callable[..., bytes]
PHOTO = data.astronaut()[:64, :80]
LARGE = data.astronaut()[:300, :280]


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_orientation(photo: Photo, number: int = 0) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return photo(number, exif=exif)


def pixels_of_folder(tmp_path: Path, content: bytes) -> np.ndarray[Any, Any]:
    """What ``data=folder`` makes of the file as it was found."""
    (tmp_path / "image.jpg").write_bytes(content)
    return ImageFolder(str(tmp_path), "train", channels=3, check="none").image(0)


def pixels(encoded: Encoded) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(encoded.data)) as image:
        assert (image.height, image.width) == (encoded.height, encoded.width)
        assert {"JPEG": "jpg", "PNG": "png"}[str(image.format)] == encoded.ending
        assert image.mode in ("L", "RGB")
        return np.asarray(image.convert("RGB"))


def error(encoded: Encoded, tmp_path: Path, content: bytes) -> float:
    """Mean difference from the pixels as they were found, of 255."""
    return float(np.abs(pixels(encoded).astype(int) - pixels_of_folder(tmp_path, content)).mean())


# JPEGs that pass


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 2, "quality": 40}, {"comment": b"x"}])
def test_a_plain_jpeg_keeps_its_bytes(photo: Photo, options: dict[str, Any]) -> None:
    content = photo(3, **options)
    assert encode("x", content, 3) == (content, "jpg", 40, 56)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grey_jpeg_keeps_its_bytes(channels: int) -> None:
    content = saved(Image.fromarray(PHOTO).convert("L"), "JPEG")
    assert encode("x", content, channels).data is content


def test_an_orientation_tag_goes_and_pixels_stay(photo: Photo) -> None:
    content, plain = with_orientation(photo), photo()
    assert Image.open(io.BytesIO(content)).getexif()[0x0112] == 6
    assert encode("x", content, 3) == (plain, "jpg", 40, 56)


def test_a_damaged_exif_block_goes_too(photo: Photo) -> None:
    content = with_orientation(photo)
    broken = content.replace(b"II*\0" if b"II*\0" in content else b"MM\0*", b"\xff\xfe\xfd\xfc", 1)
    assert broken != content
    assert encode("x", broken, 3).data == photo()


def test_other_blocks_stay(photo: Photo) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    content = photo(0, icc_profile=b"profile", comment=b"kept", dpi=(72, 72), exif=exif)
    assert encode("x", content, 3).data == photo(0, icc_profile=b"profile", comment=b"kept", dpi=(72, 72))


# Everything else becomes plain


def test_a_cmyk_jpeg_becomes_rgb(tmp_path: Path) -> None:
    content = saved(Image.fromarray(PHOTO).convert("CMYK"), "JPEG", quality=95)
    encoded = encode("x", content, 3)
    assert encoded.ending == "jpg"
    assert error(encoded, tmp_path, content) < 2
    assert encode("x", encoded.data, 3).data is encoded.data


def test_a_jpeg_in_rgb_becomes_ycbcr(tmp_path: Path) -> None:
    content = saved(Image.fromarray(PHOTO), "JPEG", quality=95, keep_rgb=True)
    encoded = encode("x", content, 3)
    assert encoded.data != content
    assert error(encoded, tmp_path, content) < 2
    assert encode("x", encoded.data, 3).data is encoded.data


def odd_files() -> dict[str, bytes]:
    rgb = Image.fromarray(PHOTO)
    grey, alpha = rgb.convert("L"), rgb.copy()
    alpha.putalpha(Image.fromarray(PHOTO[..., 0]))
    wide = np.arange(64 * 80, dtype=np.uint16).reshape(64, 80) * 12
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "16-bit grey PNG": saved(Image.fromarray(wide), "PNG"),
        "RGBA PNG": saved(alpha, "PNG"),
        "LA PNG": saved(alpha.convert("LA"), "PNG"),
        "palette PNG": saved(rgb.convert("P"), "PNG"),
        "palette PNG with transparency": saved(rgb.convert("P"), "PNG", transparency=bytes([0, 128, 255])),
        "RGB PNG with a transparent colour": saved(rgb, "PNG", transparency=(0, 0, 0)),
        "PNG with orientation": saved(rgb, "PNG", exif=exif),
        "1-bit PNG": saved(rgb.convert("1"), "PNG"),
        "GIF": saved(rgb, "GIF"),
        "moving GIF": saved(rgb, "GIF", save_all=True, append_images=[grey.convert("RGB")]),
        "BMP": saved(rgb, "BMP"),
        "TIFF": saved(rgb, "TIFF", compression="tiff_lzw"),
        "16-bit TIFF": saved(Image.fromarray(wide), "TIFF"),
    }


@pytest.mark.parametrize("name", odd_files())
def test_a_small_lossless_image_becomes_a_plain_png_of_the_same_pixels(name: str, tmp_path: Path) -> None:
    content = odd_files()[name]
    encoded = encode("x", content, 3)
    assert encoded.ending == "png"
    np.testing.assert_array_equal(pixels(encoded), pixels_of_folder(tmp_path, content))
    assert encode("x", encoded.data, 3).data is encoded.data, "what is plain once stays"


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_small_plain_png_keeps_its_bytes(mode: str) -> None:
    content = saved(Image.fromarray(PHOTO).convert(mode), "PNG", dpi=(72, 72))
    assert encode("x", content, 3) == (content, "png", 64, 80)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"quality": 95}), ("BMP", {}), ("TIFF", {})])
def test_a_large_image_becomes_a_fine_jpeg(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    content = saved(Image.fromarray(LARGE), kind, **options)
    encoded = encode("x", content, 3)
    assert encoded.ending == "jpg"
    assert error(encoded, tmp_path, content) < 2
    with Image.open(io.BytesIO(encoded.data)) as image:
        assert {sampling[1:3] for sampling in image.layer} == {(1, 1)}, "chroma has the resolution of luma"  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["WEBP", "AVIF"])
def test_a_lossy_format_becomes_a_jpeg_at_any_size(kind: str) -> None:
    assert encode("x", saved(Image.fromarray(PHOTO), kind), 3).ending == "jpg"


def test_one_channel_makes_what_is_encoded_anew_grey() -> None:
    encoded = encode("x", saved(Image.fromarray(PHOTO), "BMP"), 1)
    with Image.open(io.BytesIO(encoded.data)) as image:
        np.testing.assert_array_equal(np.asarray(image), np.asarray(Image.fromarray(PHOTO).convert("L")))


# What cannot be used


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty"),
        (bytes(5000), "magic"),
        (b"<!DOCTYPE html><html></html>", "magic"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "magic"),
        (b"\xff\xd8\xff\xe0", "undecodable"),
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "undecodable"),
    ],
)
def test_what_is_no_image_is_named_with_its_kind(content: bytes, kind: str) -> None:
    for act in (lambda: encode("the name", content, 3), lambda: measure("the name", content)):
        with pytest.raises(BadImage, match=r"^the name ") as caught:
            act()
        assert caught.value.kind == kind


def test_a_jpeg_cut_anywhere_is_not_let_in(photo: Photo) -> None:
    content = photo()
    assert content.endswith(b"\xff\xd9")
    for cut in range(len(content) - 2):
        with pytest.raises(BadImage) as caught:
            encode("x", content[:cut], 3)
        assert caught.value.kind in ("empty", "truncated", "undecodable", "magic")


def test_a_png_cut_within_its_pixels_is_not_let_in(photo: Photo) -> None:
    content = photo(0, "PNG")
    for cut in range(0, len(content) - 32, 37):
        with pytest.raises(BadImage):
            encode("x", content[:cut], 3)


def test_32_bit_pixels_are_refused() -> None:
    content = saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(BadImage, match="32 bits"):
        encode("x", content, 3)


def test_measure_gives_the_size_as_it_lies(photo: Photo) -> None:
    assert measure("x", with_orientation(photo)) == (40, 56)


# Images that lack what their headers say


def claiming(content: bytes, height: int, width: int) -> bytes:
    """The file with another size in its header, and its checksums right."""
    size, kind = bytearray(content), content[:4]
    if kind == b"\x89PNG":
        size[16:24] = struct.pack(">II", width, height)
        size[29:33] = struct.pack(">I", zlib.crc32(size[12:29]))
    elif kind == b"GIF8":
        size[6:10] = struct.pack("<HH", width, height)
    elif kind[:2] == b"BM":
        size[18:26] = struct.pack("<ii", width, height)
    else:
        frame = next(
            start for start in range(2, len(content)) if content[start] == 0xFF and 0xC0 <= content[start + 1] <= 0xC2
        )
        size[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(size)


def with_rows(content: bytes, count: int) -> bytes:
    """The PNG file with the first ``count`` bytes of its rows, in a stream that ends as a whole one does."""
    out, position = content[:8], 8
    while position < len(content):
        (length,) = struct.unpack_from(">I", content, position)
        kind, body = content[position + 4 : position + 8], content[position + 8 : position + 8 + length]
        if kind == b"IDAT":
            body = zlib.compress(zlib.decompress(body)[:count])
        out += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        position += 12 + length
    return out


SQUARE = Image.fromarray(PHOTO[:, :64])
BLACK = Image.new("RGB", (64, 64))
GREY = saved(SQUARE.convert("L"), "JPEG")
LACKING = {
    "jpeg": claiming(saved(SQUARE, "JPEG"), 12000, 12000),
    "progressive jpeg": claiming(saved(SQUARE, "JPEG", progressive=True), 12000, 12000),
    "grey jpeg": claiming(GREY, 12000, 12000),
    "large jpeg": claiming(saved(Image.fromarray(LARGE), "JPEG", quality=100), 9000, 9000),
    "png": claiming(saved(SQUARE, "PNG"), 12000, 12000),
    "png without its last byte": with_rows(saved(SQUARE, "PNG"), 64 * 193 - 1),
    "png of half its rows": with_rows(saved(SQUARE, "PNG"), 32 * 193),
    "png without rows": with_rows(saved(SQUARE, "PNG"), 0),
    "png a row short": with_rows(saved(SQUARE, "PNG"), 63 * 193),
    "black png a row short": with_rows(saved(BLACK, "PNG"), 63 * 193),
    "png of 8 more rows": claiming(saved(SQUARE, "PNG"), 72, 64),
    "palette png": with_rows(saved(SQUARE.convert("P"), "PNG"), 32 * 65),
    "png of one bit": with_rows(saved(SQUARE.convert("1"), "PNG"), 32 * 9),
    "png cut in its data": saved(SQUARE, "PNG")[:2000],
    "gif": claiming(saved(SQUARE, "GIF"), 12000, 12000),
    "bmp": claiming(saved(SQUARE, "BMP"), 12000, 12000),
    "bmp of 8 more rows": claiming(saved(SQUARE, "BMP"), 72, 64),
}


def tiff_of_rows(height: int) -> bytes:
    """A TIFF file with another number of rows in its header."""
    content = bytearray(saved(SQUARE, "TIFF"))
    (start,) = struct.unpack_from("<I", content, 4)
    (entries,) = struct.unpack_from("<H", content, start)
    for entry in range(start + 2, start + 2 + 12 * entries, 12):
        if struct.unpack_from("<H", content, entry)[0] == 257:  # ImageLength
            content[entry + 2 : entry + 12] = struct.pack("<HII", 4, 1, height)
    return bytes(content)


LACKING |= {f"tiff of {rows} rows": tiff_of_rows(rows) for rows in (65, 60000)}


@pytest.mark.parametrize("name", LACKING)
def test_an_image_that_lacks_what_its_header_says_is_bad_everywhere(name: str) -> None:
    tracemalloc.start()
    for read in (
        lambda data: encode("x", data, 3),
        lambda data: measure("x", data),
        lambda data: decode.open_image(data, "x", 3).region((0, 0, 64, 64)),
    ):
        with pytest.raises(BadImage):
            read(LACKING[name])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.skipif(decode.jpeg_decoder() != "dmjd._jpeg", reason="other decoders do not report it")
@pytest.mark.parametrize("size", [(72, 64), (64, 72), (64, 640), (640, 64)])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_a_jpeg_that_lacks_a_block_is_bad(size: tuple[int, int], options: dict[str, Any]) -> None:
    content = claiming(saved(SQUARE, "JPEG", **options), *size)
    with pytest.raises(BadImage):
        encode("x", content, 3)
    opened = decode.open_image(content, "x", 3)
    with pytest.raises(BadImage):
        opened.region((0, 0, *size))


@pytest.mark.parametrize("without", [True, False])
def test_a_jpeg_of_a_size_that_it_cannot_have_is_bad_without_our_decoder(
    monkeypatch: pytest.MonkeyPatch, without: bool
) -> None:
    if without:
        monkeypatch.setattr(decode, "_native", None)
    for name in ("jpeg", "progressive jpeg", "grey jpeg"):
        with pytest.raises(
            BadImage, match=r"its header has 12000x12000 pixels, more than .* bytes can contain"
        ) as caught:
            measure("x", LACKING[name])
        assert caught.value.kind == "truncated"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF"])
@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (3000, 3000)])
def test_an_image_of_one_colour_is_not_too_small_a_file(kind: str, size: tuple[int, int]) -> None:
    """The densest files that there are."""
    for mode in ("1", "L", "RGB"):
        for options in ({"quality": 1, "optimize": True, "progressive": True}, {"optimize": True, "compress_level": 9}):
            image = Image.new(mode, size[::-1])
            assert measure("x", saved(image, kind, **options)) == size


def test_a_png_of_any_kind_is_whole() -> None:
    """Also black ones, whose rows are counted."""
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        for size in ((1, 1), (7, 3), (8, 8), (9, 65)):
            for image in (Image.new(mode, size), Image.new(mode, size, 1 if mode in ("1", "L", "P", "I;16") else None)):
                assert measure("x", saved(image, "PNG")) == size[::-1]


def interlaced(pixels: np.ndarray[Any, Any], cut: int = 0) -> bytes:
    """A grey PNG file of seven passes, without the last ``cut`` bytes of its rows."""
    rows = b""
    for x, y, dx, dy in (
        (0, 0, 8, 8),
        (4, 0, 8, 8),
        (0, 4, 4, 8),
        (2, 0, 4, 4),
        (0, 2, 2, 4),
        (1, 0, 2, 2),
        (0, 1, 1, 2),
    ):
        part = pixels[y::dy, x::dx]
        rows += b"".join(b"\0" + row.tobytes() for row in part) if part.size else b""
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 0, 0, 0, 1)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows[: len(rows) - cut])), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (5, 2), (8, 8), (9, 17), (33, 64)])
def test_the_passes_of_an_interlaced_png_are_counted(size: tuple[int, int]) -> None:
    pixels = np.arange(1, 1 + size[0] * size[1], dtype=np.uint8).reshape(size)
    assert measure("x", interlaced(pixels)) == size
    opened = decode.open_image(interlaced(pixels), "x", 1)
    np.testing.assert_array_equal(opened.region((0, 0, *size))[..., 0], pixels)
    with pytest.raises(BadImage):
        measure("x", interlaced(pixels, cut=1))


def test_a_file_of_a_format_that_starts_a_program_is_no_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pillow gives PostScript to Ghostscript, whatever the file is called."""
    started: list[object] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *arguments, **options: started.append(arguments))
    content = saved(SQUARE, "EPS")
    (tmp_path / "x.jpg").write_bytes(content)
    for read in (
        lambda: decode.open_image(content, "x", 3).region((0, 0, 64, 64)),
        lambda: decode.check_header(str(tmp_path / "x.jpg"), (1, 1)),
        lambda: measure("x", content),
    ):
        with pytest.raises(BadImage):
            read()
    assert started == []
