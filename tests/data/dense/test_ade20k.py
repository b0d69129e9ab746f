"""ADE20K's folders: class numbers, sizes, and one line for each kind of bad input."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from dmjd.config import SegmentDataConfig
from dmjd.data.build import report, training_batches
from dmjd.data.dense.ade20k import Ade20k
from dmjd.data.identity import DataIdentity
from dmjd.errors import BadImage, DataError, NoSplit

SIZE = 10, 14
Classes = npt.NDArray[np.uint8]


def values(number: int = 0) -> Classes:
    """0, 1, 2, 3 and 255 in a map of its own for each number."""
    chosen = np.array([0, 1, 2, 3, 255], dtype=np.uint8)
    return chosen[np.random.default_rng(number).integers(0, 5, SIZE)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six training and two validation images of 10 x 14 with the classes sky, road and tree as 1 to 3."""
    for split, count in (("training", 6), ("validation", 2)):
        for kind in ("images", "annotations"):
            (tmp_path / kind / split).mkdir(parents=True)
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / split / f"{number}.jpg")
            Image.fromarray(values(number)).save(tmp_path / "annotations" / split / f"{number}.png")
    (tmp_path / "classes.txt").write_text("sky\nroad\ntree\n")
    return tmp_path


def build(root: Path, split: str = "train", **changes: Any) -> Ade20k:
    settings = {"check": "none"} | changes
    return Ade20k(SegmentDataConfig(root=str(root), **settings), split)  # type: ignore[arg-type]


def save(root: Path, image: Image.Image, **options: Any) -> None:
    """Replace the mask of the first training image."""
    image.save(root / "annotations/training/0.png", **options)


def zero_less(classes: Classes) -> Classes:
    """mmsegmentation's reduce_zero_label."""
    reduced = classes.copy()
    reduced[reduced == 0] = 255
    reduced -= 1
    reduced[reduced == 254] = 255
    return reduced


def test_class_numbers_without_and_with_zero(root: Path) -> None:
    np.testing.assert_array_equal(build(root).open(0).classes(), zero_less(values()))
    (root / "classes.txt").write_text("other\nsky\nroad\ntree\n")
    np.testing.assert_array_equal(build(root, reduce_zero_label=False).open(0).classes(), values())


def palette(classes: Classes) -> Image.Image:
    image = Image.fromarray(classes)
    image.putpalette(np.random.default_rng(1).integers(0, 256, 768, dtype=np.uint8).tolist())
    return image


@pytest.mark.parametrize(
    ("most", "mode", "options"),
    [
        (255, "P", {}),
        (255, "P", {"transparency": 0}),
        (255, "L", {"transparency": 0}),
        (3, "P", {"bits": 2}),
        (3, "P", {"bits": 4}),
        (1, "P", {"bits": 1}),
        (1, "1", {}),
    ],
)
def test_palette_and_shallow_pngs_hold_numbers(root: Path, most: int, mode: str, options: dict[str, Any]) -> None:
    classes = values()
    classes[classes > most] = 1
    image = {"P": palette(classes), "L": Image.fromarray(classes), "1": Image.fromarray(classes.astype(bool))}[mode]
    save(root, image, **options)
    for check in ("header", "decode"):
        np.testing.assert_array_equal(build(root, check=check).open(0).classes(), zero_less(classes))


@pytest.mark.parametrize("bits", [2, 4])
def test_grey_pngs_of_few_bits_hold_numbers(root: Path, bits: int) -> None:
    import struct
    import zlib

    classes = values()
    classes[classes == 255] = 3
    digits = np.stack([classes >> bit & 1 for bit in reversed(range(bits))], -1).reshape(SIZE[0], -1)
    rows = b"".join(b"\0" + np.packbits(row).tobytes() for row in digits)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", SIZE[1], SIZE[0], bits, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (root / "annotations/training/0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    np.testing.assert_array_equal(build(root).open(0).classes(), zero_less(classes))


def mask_of_size(root: Path) -> None:
    save(root, Image.fromarray(np.zeros((14, 10), dtype=np.uint8)))


def mask_of_value(root: Path) -> None:
    save(root, Image.fromarray(np.full(SIZE, 4, dtype=np.uint8)))


def mask_of_colours(root: Path) -> None:
    save(root, palette(values()).convert("RGB"))


def mask_of_16_bits(root: Path) -> None:
    save(root, Image.fromarray(values().astype(np.uint16)))


def mask_of_alpha(root: Path) -> None:
    save(root, Image.fromarray(values()).convert("LA"))


def mask_of_jpeg(root: Path) -> None:
    Image.fromarray(values()).save(root / "annotations/training/0.png", format="JPEG")


def mask_of_text(root: Path) -> None:
    (root / "annotations/training/0.png").write_text("no image")


def mask_of_nothing(root: Path) -> None:
    (root / "annotations/training/0.png").unlink()


def mask_of_a_pipe(root: Path) -> None:
    (root / "annotations/training/0.png").unlink()
    os.mkfifo(root / "annotations/training/0.png")


def mask_cut_short(root: Path) -> None:
    noise = np.random.default_rng(0).integers(1, 4, SIZE, dtype=np.uint8)
    whole = BytesIO()
    Image.fromarray(noise).save(whole, format="PNG")
    (root / "annotations/training/0.png").write_bytes(whole.getvalue()[:-30])


def image_cut_short(root: Path) -> None:
    file = root / "images/training/0.jpg"
    file.write_bytes(file.read_bytes()[:-60])


def read(dataset: Ade20k) -> None:
    opened = dataset.open(0)
    opened.classes()
    opened.region((0, 0, *opened.size))


BAD = [
    (mask_of_size, "header", "annotations/training/0.png has 14x10 pixels, and .*images/training/0.jpg 10x14"),
    (mask_of_value, "decode", r"annotations/training/0.png has value 4, and the classes of .*classes.txt are 1 to 3,"),
    (mask_of_colours, "header", "annotations/training/0.png has pixels of mode RGB"),
    (mask_of_16_bits, "header", "annotations/training/0.png has pixels of mode I;16"),
    (mask_of_alpha, "header", "annotations/training/0.png has pixels of mode LA"),
    (mask_of_jpeg, "header", "annotations/training/0.png is a JPEG file"),
    (mask_of_text, "header", "annotations/training/0.png cannot be read as an image .not a supported format"),
    (mask_of_nothing, "header", "annotations/training/0.png does not exist .each image needs a mask"),
    (mask_of_a_pipe, "header", "annotations/training/0.png cannot be read as an image .a named pipe"),
    (mask_cut_short, "decode", "annotations/training/0.png cannot be read as an image"),
    (image_cut_short, "decode", "images/training/0.jpg cannot be read as an image"),
]


@pytest.mark.parametrize(("spoil", "check", "line"), BAD, ids=[case[0].__name__ for case in BAD])
def test_a_bad_mask_is_one_line_that_names_the_file(
    root: Path, spoil: Callable[[Path], None], check: str, line: str
) -> None:
    spoil(root)
    for sooner in {check, "decode"}:
        with pytest.raises(DataError, match=line) as caught:
            build(root, check=sooner)
        assert "\n" not in str(caught.value)
    if check == "decode":
        assert not build(root, check="header").bad
    with pytest.raises(BadImage, match=line):
        read(build(root))
    tolerant = build(root, check=check, max_bad_percent=20)
    assert list(tolerant.bad) == [0]
    batches = training_batches(SegmentDataConfig(root=str(root), image_size=[8, 8]), tolerant, 6, seed=0)
    batch, substitutions = batches.load(0)
    assert [each.sample_id for each in substitutions] == [0]
    assert batch.maps.shape == (6, 8, 8)


def test_masks_of_validations_are_decoded_at_the_start(root: Path) -> None:
    assert not build(root, "test", check="header").bad
    Image.fromarray(np.full(SIZE, 4, dtype=np.uint8)).save(root / "annotations/validation/1.png")
    with pytest.raises(DataError, match=r"annotations/validation/1.png has value 4, .*; correct the masks"):
        build(root, "test", check="header")
    assert len(build(root, "test", check="none")) == 2


def test_zero_label_hint(root: Path) -> None:
    save(root, Image.fromarray(np.full(SIZE, 3, dtype=np.uint8)))
    with pytest.raises(DataError, match=r"are 0 to 2 .*true numbers them from 1"):
        build(root, check="decode", reduce_zero_label=False)


@pytest.mark.parametrize("zero", [True, False])
def test_masks_without_a_class_are_an_error_before_training(root: Path, zero: bool) -> None:
    if zero:
        build(root).require_annotations()
    for number in range(6):
        chosen = np.array([0 if zero else 255, 255], dtype=np.uint8)
        mask = chosen[np.random.default_rng(number).integers(0, 2, SIZE)]
        Image.fromarray(mask).save(root / f"annotations/training/{number}.png")
    with pytest.raises(DataError, match=r"no pixel of the masks in .*annotations/training has a class: all are"):
        build(root, reduce_zero_label=zero).require_annotations()
    save(root, Image.fromarray(np.full(SIZE, 9, dtype=np.uint8)))
    with pytest.raises(DataError, match=r"0.png has value 9, .*; correct the masks"):
        build(root, reduce_zero_label=zero).require_annotations()
    Image.fromarray(values()).save(root / "annotations/training/5.png")
    build(root, max_bad_percent=20).require_annotations()


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda root: empty(root / "images/training"), "images/training holds no images"),
        (lambda root: shutil.rmtree(root / "images"), "images/training is not a folder"),
        (lambda root: shutil.rmtree(root / "annotations/training"), "annotations/training is not a folder"),
        (lambda root: (root / "classes.txt").unlink(), "has no objectInfo150.txt and no classes.txt"),
        (lambda root: (root / "classes.txt").write_text("sky\n"), "number of classes in .*classes.txt is 1;"),
        (lambda root: (root / "classes.txt").write_text("sky\nroad\nsky\n"), "has the class 'sky' twice"),
        (
            lambda root: (root / "classes.txt").write_text("\n".join(map(str, range(255)))),
            "classes.txt is 255; .* 2 to 254",
        ),
        (lambda root: (root / "classes.txt").write_bytes(b"\xff\xfe\xff"), "classes.txt cannot be read"),
    ],
)
def test_a_bad_layout_is_one_line(root: Path, spoil: Callable[[Path], None], line: str) -> None:
    spoil(root)
    with pytest.raises(DataError, match=line) as caught:
        build(root)
    assert "\n" not in str(caught.value)


def test_no_root_and_no_validation_images(root: Path) -> None:
    with pytest.raises(DataError, match=r"needs data\.root"):
        Ade20k(SegmentDataConfig(), "train")
    shutil.rmtree(root / "images/validation")
    with pytest.raises(NoSplit, match="images/validation is not a folder"):
        build(root, "test")


ADE_TABLE = "Idx\tRatio\tTrain\tVal\tName\n1\t0.15\t9\t1\twall\n2 \t0.1\t6\t2\tbed \n3\t0.1\t8\t7\tfloor, flooring\n"
STUFF_TABLE = ADE_TABLE.replace("\tName", "\tStuff\tName").replace("\t1\t", "\t1\t1\t", 1)


@pytest.mark.parametrize("table", [ADE_TABLE, STUFF_TABLE])
def test_names_of_ade20ks_own_table(root: Path, table: str) -> None:
    (root / "objectInfo150.txt").write_text(table)
    assert build(root).classes == ["sky", "road", "tree"]
    (root / "classes.txt").unlink()
    assert build(root).classes == ["wall", "bed", "floor"]
    (root / "objectInfo150.txt").write_text(table + "5\t0.1\t1\t1\tsky\n")
    with pytest.raises(DataError, match=r"objectInfo150\.txt needs a line of titles"):
        build(root)


@pytest.mark.parametrize("row", ["1", "1\t", "1 sky", "x\tsky", "\u00b2\tsky", "2\tsky", "-1\tsky"])
def test_a_damaged_table_is_one_line(root: Path, row: str) -> None:
    (root / "classes.txt").unlink()
    (root / "objectInfo150.txt").write_text(f"Idx\tName\n{row}\n")
    with pytest.raises(DataError, match=r"objectInfo150\.txt needs a line of titles"):
        build(root)


def test_changed_bytes_of_a_mask_are_a_bad_image_or_a_map(root: Path) -> None:
    file = root / "annotations/training/0.png"
    save(root, palette(values()))
    whole, rng = bytearray(file.read_bytes()), np.random.default_rng(0)
    dataset, lines = build(root), list[str]()
    for _ in range(200):
        changed = whole.copy()
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            changed[at] = rng.integers(0, 256)
        file.write_bytes(changed[: rng.integers(1, len(whole))] if rng.random() < 0.3 else changed)
        try:
            assert dataset.open(0).classes().shape == SIZE
        except BadImage as error:
            lines.append(str(error))
    assert len(lines) > 50
    assert all("annotations/training/0.png" in line and "\n" not in line for line in lines)


def test_names_that_share_their_first_synonym_are_whole(root: Path) -> None:
    (root / "classes.txt").unlink()
    (root / "objectInfo150.txt").write_text("Idx\tName\n1\tscreen, crt\n2\tscreen, door\n3\tsky\n")
    assert build(root).classes == ["screen, crt", "screen, door", "sky"]


def test_images_beside_masks(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nested folders, other channels, what belongs to no image, and the order of names."""
    for kind, ending in (("images", "jpg"), ("annotations", "png")):
        (root / kind / "training/a").mkdir()
        shutil.copy(root / kind / f"training/5.{ending}", root / kind / f"training/a/9.{ending}")
    Image.fromarray(values(9)).save(root / "annotations/training/lost.png")
    (root / "images/training/notes.txt").write_text("")
    Image.fromarray(values(1)).save(root / "images/training/1.jpg")
    dataset = build(root, check="decode")
    assert [dataset.path(index) for index in range(7)] == [*(f"{n}.jpg" for n in range(6)), "a/9.jpg"]
    assert dataset.skipped == {".txt files": 1, "masks without an image": 1}
    np.testing.assert_array_equal(dataset.open(6).classes(), dataset.open(5).classes())
    assert dataset.image(1).shape == (*SIZE, 3)
    assert build(root, channels=1).image(0).shape == (*SIZE, 1)
    assert (dataset.num_classes, dataset.label(0), len(dataset), len(build(root, "test"))) == (3, -1, 7, 2)
    with caplog.at_level(logging.INFO):
        report(dataset)
    assert "skipped 2 entries" in caplog.text


@pytest.mark.parametrize("check", ["none", "header"])
def test_sizes_are_known_without_decoding(root: Path, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.zeros((21, 9, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees for viewers; the orientation is ignored, and so is the mask's
    Image.fromarray(pixels).save(root / "images/training/0.jpg", exif=exif)
    save(root, Image.fromarray(np.ones((21, 9), dtype=np.uint8)))
    dataset = build(root, check=check)
    monkeypatch.setattr("dmjd.data.dense.annotated.open_image", None)
    assert [dataset.size(index) for index in range(2)] == [(21, 9), SIZE]
    monkeypatch.undo()
    assert dataset.open(0).classes().shape == (21, 9) == dataset.image(0).shape[:2]


def test_identity_is_that_of_paths_and_classes(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def identity(folder: Path, **changes: Any) -> str:
        return str(DataIdentity.of(build(folder, **changes)))

    first = identity(root)
    moved = tmp_path_factory.mktemp("moved") / "root"
    shutil.copytree(root, moved)
    assert identity(moved) == first
    others = {first, identity(root, split="test")}
    (root / "classes.txt").write_text("sky\nroad\nbush\n")
    others.add(identity(root))
    (moved / "images/training/0.jpg").rename(moved / "images/training/00.jpg")
    others.add(identity(moved))
    assert len(others) == 4


def test_nothing_but_arrays_grows_with_the_number_of_images(scenes: Path) -> None:
    dataset = build(scenes)
    grown = [value for value in vars(dataset).values() if hasattr(value, "__len__") and len(value) == len(dataset)]
    assert grown
    assert all(isinstance(value, np.ndarray) for value in grown)


def test_generated_scenes_are_read(scenes: Path) -> None:
    dataset = build(scenes, check="decode")
    assert dataset.classes[:2] == ["plain disc", "striped disc"]
    assert dataset.classes[-3:] == ["waves", "bricks", "grain"]
    seen = torch.cat([torch.from_numpy(dataset.open(n).classes()).flatten() for n in range(len(dataset))]).unique()
    assert seen.tolist() == [*range(11), 255]
