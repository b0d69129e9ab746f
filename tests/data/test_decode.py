from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from skimage import data

from dmjd.data import decode
from dmjd.data.crops import RandomResizedCrop
from dmjd.data.dataset import Box, InMemory, OpenImage, Pixels
from dmjd.data.decode import open_image
from dmjd.data.folder import ImageFolder
from dmjd.data.loader import StepBatches
from dmjd.errors import BadImage
from dmjd.ops.philox import make_key

PHOTO: Pixels = data.astronaut()
TORCHCODEC = decode._find_torchcodec()
NATIVE = decode._find_native()

needs_native = pytest.mark.skipif(NATIVE is None, reason="dmjd._jpeg is not built or DMJD_DISABLE_EXT is set")


@pytest.fixture(params=["dmjd._jpeg", "torchcodec", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(decode, "_native", NATIVE if request.param == "dmjd._jpeg" else None)
    monkeypatch.setattr(decode, "_torchcodec", TORCHCODEC if request.param == "torchcodec" else None)
    if decode.jpeg_decoder() != request.param:
        pytest.skip(f"the decoder {request.param} is optional, and not installed or not built here")
    return str(request.param)


def encode(image: Image.Image | Pixels, **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def noisy(height: int, width: int, seed: int = 0) -> Pixels:
    """A photo with noise in its colours, so that no chroma sample equals its neighbour."""
    rng = np.random.default_rng(seed)
    top, left = rng.integers(0, 512 - height), rng.integers(0, 512 - width)
    photo = PHOTO[top : top + height, left : left + width] + rng.normal(0, 30, (height, width, 3))
    return np.clip(photo, 0, 255).astype(np.uint8)


def pillow(file: bytes, channels: int = 3, half: bool = False) -> Pixels:
    """The whole image as Pillow alone decodes it."""
    image = Image.open(io.BytesIO(file))
    if half:
        image.draft(None, (image.width // 2, image.height // 2))
    return np.array(image.convert("L" if channels == 1 else "RGB")).reshape(image.height, image.width, channels)


def whole(image: OpenImage) -> Pixels:
    return image.region((0, 0, *image.size))


def random_boxes(height: int, width: int, count: int) -> Iterator[Box]:
    """Boxes of any size; every fourth touches a border, and the first is everything."""
    rng = np.random.default_rng(height * width)
    yield 0, 0, height, width
    for _ in range(count):
        h, w = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
        top, left = int(rng.integers(0, height - h + 1)), int(rng.integers(0, width - w + 1))
        yield (top if rng.random() > 0.25 else 0), (left if rng.random() > 0.25 else width - w), h, w


FLAVOURS: dict[str, dict[str, Any]] = {
    "4:2:0": {"subsampling": "4:2:0"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:4:4": {"subsampling": "4:4:4", "quality": 97},
    "progressive": {"progressive": True, "quality": 60},
    "restarts": {"restart_marker_blocks": 3},
    "rgb": {"keep_rgb": True, "subsampling": "4:4:4"},
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("flavour", [*FLAVOURS, "grey"])
def test_a_region_is_bit_for_bit_that_part_of_pillows_image(decoder: str, flavour: str, channels: int) -> None:
    for seed, (height, width) in enumerate([(97, 131), (16, 64), (61, 8), (1, 1), (200, 35)]):
        pixels: Image.Image = Image.fromarray(noisy(height, width, seed))
        if flavour == "grey":
            pixels = pixels.convert("L")
        file = encode(pixels, **FLAVOURS.get(flavour, {}))
        expected = pillow(file, channels)
        image = open_image(file, "photo", channels)
        assert image.size == (height, width)
        for top, left, h, w in random_boxes(height, width, 25):
            region = image.region((top, left, h, w))
            assert region.dtype == np.uint8
            np.testing.assert_array_equal(region, expected[top : top + h, left : left + w])


def test_a_region_of_twice_the_size_wanted_comes_as_half_and_bit_for_bit_the_same(decoder: str) -> None:
    for seed, (height, width) in enumerate([(97, 131), (64, 48), (33, 200)]):
        file = encode(noisy(height, width, seed), **FLAVOURS["4:2:0" if seed else "progressive"])
        expected = pillow(file, half=True)
        assert expected.shape == (-(-height // 2), -(-width // 2), 3)
        image = open_image(file, "photo", 3)
        for top, left, h, w in random_boxes(height, width, 25):
            half = image.region((top, left, h, w), at_least=(h // 2, w // 2))
            part = expected[top // 2 : top // 2 + h // 2, left // 2 : left // 2 + w // 2]
            np.testing.assert_array_equal(half, part)
            for at_least in ((h // 2 + 1, 1), (1, w // 2 + 1)):
                assert image.region((top, left, h, w), at_least).shape == (h, w, 3)


def test_a_phones_two_pictures_in_one_file_are_the_first_at_either_size(decoder: str) -> None:
    """A file of two JPEGs (MPO) begins like any other, and is halved like any other."""
    buffer, first = io.BytesIO(), Image.fromarray(noisy(97, 131))
    first.save(buffer, "MPO", save_all=True, append_images=[Image.fromarray(noisy(97, 131, 1))])
    file, box = buffer.getvalue(), (10, 20, 60, 80)
    image = open_image(file, "phone", 3)
    np.testing.assert_array_equal(whole(image), pillow(file))
    np.testing.assert_array_equal(image.region(box, (30, 40)), pillow(file, half=True)[5:35, 10:50])
    np.testing.assert_array_equal(image.region(box, (31, 40)), pillow(file)[10:70, 20:100])


def test_a_halved_crop_looks_like_the_crop(decoder: str) -> None:
    def cut(image: OpenImage, box: Box) -> torch.Tensor:
        (pixels,) = RandomResizedCrop((224, 224)).cut(image, box)
        return pixels.float()

    def view(box: Box) -> torch.Tensor:
        return cut(InMemory(pillow(file)), box)

    file, box = encode(PHOTO, quality=92), (20, 32, 450, 460)
    halved = cut(open_image(file, "photo", 3), box)
    assert (halved - view(box)).abs().mean() < 2
    assert (halved - view((20, 33, 450, 460))).abs().mean() > 4  # of the crop one pixel beside it
    assert torch.equal(cut(open_image(file, "photo", 3), (21, 33, *box[2:])), halved)


def test_what_the_native_decoder_leaves_to_pillow_is_as_pillow_has_it(decoder: str) -> None:
    cmyk = Image.fromarray(noisy(40, 50)).convert("CMYK")
    for file in (encode(cmyk), encode(cmyk, progressive=True)):
        np.testing.assert_array_equal(open_image(file, "cmyk", 3).region((3, 5, 30, 40)), pillow(file)[3:33, 5:45])


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # as decode.py does, and pytest undoes
def test_the_exif_orientation_is_ignored_and_a_broken_exif_block_is_harmless(decoder: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees to show"
    plain = encode(noisy(48, 80))
    turned = encode(noisy(48, 80), exif=exif)
    broken = plain[:2] + b"\xff\xe1\x00\x10Exif\x00\x00MM\x00\x2a\xff\xff" + plain[2:]
    for file in (turned, broken):
        np.testing.assert_array_equal(whole(open_image(file, "photo", 3)), pillow(plain))


@pytest.mark.parametrize("progressive", [False, True])
def test_a_file_cut_anywhere_is_refused_whatever_the_region(decoder: str, progressive: bool) -> None:
    file = encode(noisy(60, 70), progressive=progressive)
    for length in [0, *range(1, len(file), 97), len(file) - 2, len(file) - 1]:
        with pytest.raises(BadImage) as caught:
            open_image(file[:length], "photo.jpg", 3).region((0, 0, 2, 2))
        assert caught.value.name == "photo.jpg"
        assert caught.value.kind in ("truncated", "undecodable")
        if length > 700:  # the header is whole
            assert caught.value.kind == "truncated"


@needs_native
def test_damage_within_reach_of_the_region_is_refused_and_below_it_never_seen() -> None:
    file = bytearray(encode(noisy(256, 64), quality=95))
    at = len(file) * 3 // 4
    file[at : at + 2] = b"\xff\xc4"  # a marker amid the data; other bytes are decoded into other pixels, silently
    image = open_image(bytes(file), "photo", 3)
    assert image.region((0, 0, 64, 64)).shape == (64, 64, 3)
    with pytest.raises(BadImage, match=r"photo cannot be read as an image \(Corrupt JPEG data: ") as caught:
        whole(image)
    assert caught.value.kind == "undecodable"


def test_bytes_between_the_data_and_its_end_are_harmless(decoder: str) -> None:
    file = encode(noisy(40, 50))
    for odd in (file[:-2] + b"\x12\x34" + file[-2:], file + b"trailing text"):
        np.testing.assert_array_equal(whole(open_image(odd, "photo", 3)), pillow(file))


def test_a_size_that_must_be_an_attack_is_left_to_pillows_rule(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = encode(noisy(40, 50))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 50 // 2 - 1)
    with pytest.raises(BadImage, match="decompression bomb"):
        open_image(file, "photo", 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert open_image(file, "photo", 3).size == (40, 50)


@needs_native
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, 0, 41, 50, 3), "the region must lie inside the image of 40x50"),
        ((1, 0, 40, 50, 3), "the region must lie inside"),
        ((0, -1, 10, 10, 3), "the region must lie inside"),
        ((2**31 - 1, 0, 2, 2, 3), "the region must lie inside"),
        ((0, 0, 0, 10, 3), "the region must have pixels"),
        ((0, 0, 40, 50, 2), "channels must be 1 or 3"),
        ((0, 0, 20, 25, 3, 4), "scale must be 1 or 2"),
        ((0, 0, 21, 25, 3, 2), "the region must lie inside the image of 20x25"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments: tuple[int, ...], error: str) -> None:
    assert NATIVE is not None
    with pytest.raises(ValueError, match=error):
        NATIVE.decode_region(encode(noisy(40, 50)), *arguments)


@needs_native
def test_the_native_decoder_takes_any_bytes_and_nothing_else() -> None:
    assert NATIVE is not None
    file = encode(noisy(40, 50))
    for same in (bytearray(file), memoryview(file), np.frombuffer(file, np.uint8)):
        assert NATIVE.header(same) == (40, 50, True)
    for wrong in (np.zeros(9, np.int16), np.zeros((3, 3), np.uint8), memoryview(file)[::2], "text"):
        with pytest.raises(TypeError):
            NATIVE.header(wrong)
    with pytest.raises(ValueError, match="Not a JPEG file"):
        NATIVE.header(b"GIF89a")
    with pytest.raises(EOFError):
        NATIVE.header(file[:100])


@needs_native
def test_threads_decode_at_the_same_time() -> None:
    assert NATIVE is not None
    file = encode(np.tile(PHOTO, (6, 6, 1)), quality=95)
    finished = threading.Event()

    def work() -> None:
        NATIVE.decode_region(file, 0, 0, 3072, 3072, 3)
        finished.set()

    worker = threading.Thread(target=work)
    worker.start()
    turns = 0
    while not finished.wait(0.0005):
        turns += 1
    worker.join()
    assert turns >= 10  # with the GIL held this thread would wait for the other's end


def test_a_batch_of_jpegs_is_that_of_whole_images_cut_and_resized(decoder: str, tmp_path: Path) -> None:
    for index in range(12):
        height, width = 70 + 9 * index, 150 - 5 * index
        (tmp_path / f"{index:02d}.jpg").write_bytes(encode(noisy(height, width, index), quality=90))
    folder = ImageFolder(str(tmp_path), "train", channels=3)
    crop = RandomResizedCrop((64, 64), scale=(0.3, 1.0))
    batches = StepBatches(folder, 6, crop, seed=5)
    for step in range(4):
        batch = batches[step]
        draws = crop.draw(batch.sample_ids, make_key(5, step // 2))
        for row, index in enumerate(batch.sample_ids.tolist()):
            pixels = pillow(Path(folder.name(index)).read_bytes())
            top, left, height, width = draws.box(row, *pixels.shape[:2])
            if height >= 128 and width >= 128:
                continue  # halved
            part = torch.from_numpy(pixels[top : top + height, left : left + width].copy())[None].permute(0, 3, 1, 2)
            resized = F.interpolate(part, (64, 64), mode="bicubic", antialias=True)
            assert torch.equal(batch.images[row], resized[0].permute(1, 2, 0))


def test_a_file_that_fails_after_its_header_is_replaced_with_the_crop_of_its_place(tmp_path: Path) -> None:
    for index in range(8):
        (tmp_path / f"{index}.jpg").write_bytes(encode(noisy(50 + index, 60, index)))
    crop = RandomResizedCrop((32, 32))
    sound = StepBatches(ImageFolder(str(tmp_path), "train", channels=3), 8, crop, seed=1)[0]
    cut = tmp_path / "3.jpg"
    cut.write_bytes(cut.read_bytes()[:-400])
    folder = ImageFolder(str(tmp_path), "train", channels=3, check="header")
    assert folder.bad == {}
    batch, (item,) = StepBatches(folder, 8, crop, seed=1).load(0)
    assert (item.sample_id, item.bad.kind) == (3, "truncated")
    row = batch.sample_ids.tolist().index(3)
    image = open_image(Path(item.substitute).read_bytes(), "substitute", 3)
    (pixels,) = crop.draw(batch.sample_ids, make_key(1, 0)).cut(row, image)
    assert torch.equal(batch.images[row], pixels)
    others = batch.sample_ids != 3
    assert torch.equal(batch.images[others], sound.images[others])
