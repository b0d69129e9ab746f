"""Pictures of maps and objects."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmjd.evaluate.overlays import Objects, overlay, palette, predictions_picture, write_validation
from dmjd.runs.paths import RunPaths

NAMES = ["wall", "sky", "tree"]


def test_colours_are_distinct_and_do_not_depend_on_their_number() -> None:
    colours = palette(150).astype(int)
    assert (palette(20) == colours[:20]).all()
    for count, least in ((20, 40), (150, 25)):
        apart = np.abs(colours[:count, None] - colours[None, :count]).sum(2) + 999 * np.eye(count, dtype=int)
        assert apart.min() >= least


@pytest.mark.parametrize("channels", [1, 3])
def test_classes_tint_their_pixels_alone(channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (20, 31, channels), dtype=np.uint8)
    classes = np.full((20, 31), 255, np.uint8)
    classes[3:9, 5:20], classes[12:, 25:] = 1, 2
    before, found = image.copy(), overlay(image, classes, NAMES)
    assert found.shape == (20, 31, 3)
    assert found.dtype == np.uint8
    assert (image == before).all(), "the image stays as it is"
    assert (found[classes == 255] == image[classes == 255]).all()
    for label in (1, 2):
        part = classes == label
        expected = 0.45 * image[part] + 0.55 * palette(3)[label]
        assert abs(found[part] - expected).max() <= 1


def test_objects_have_boxes_masks_and_the_highest_score_on_top() -> None:
    image = np.zeros((60, 80, 3), np.uint8)
    masks = [np.zeros((60, 80), bool) for _ in range(2)]
    masks[0][30:50, 20:40] = masks[1][30:50, 30:60] = True
    boxes, labels = np.array([[20.0, 30, 40, 50], [30, 30, 60, 50]]), np.array([0, 2])
    found = overlay(image, Objects(boxes, labels, np.array([0.9, 0.6]), masks), NAMES)
    colours = palette(3)
    for box, label in ((boxes[0], 0), (boxes[1], 2)):
        x1, _, x2, y2 = box.astype(int)
        assert (found[y2 - 1, [x1 + 15, x2 - 1]] == colours[label]).all()
        assert (found[y2 - 5, x1] == colours[label]).all()
    assert abs(found[42, 25].astype(int) - 0.55 * colours[0]).max() <= 1
    assert abs(found[42, 50].astype(int) - 0.55 * colours[2]).max() <= 1
    both = 0.45 * (0.55 * colours[2]) + 0.55 * colours[0]
    assert abs(found[42, 35].astype(int) - both).max() <= 2, "0.9 is drawn over 0.6"
    assert (found[:15] == 0).all()
    assert (found[52:] == 0).all()
    nothing = Objects(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0), [])
    assert (overlay(image, nothing, NAMES) == image).all()
    flat = Objects(np.array([[5.0, 5, 5.2, 5.1], [-9, -9, 200, 200]]), np.array([1, 1]))
    assert overlay(image, flat, NAMES).shape == image.shape


def test_the_picture_of_a_validation_has_a_row_for_each_image_and_a_bounded_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = [(480, 640), (300, 100), (64, 65), (1000, 1500)]
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    maps = [rng.integers(0, 3, size).astype(np.uint8) for size in sizes]
    blank = [np.full(size, 255, np.uint8) for size in sizes]
    content = predictions_picture(images, maps, blank, NAMES)
    assert len(content) <= 300_000
    picture = np.asarray(Image.open(io.BytesIO(content)).convert("RGB")).astype(int)
    cell = (picture.shape[1] - 2 * 8 - 2 * 6) // 3
    rows = [round(cell * height / max(height, width)) for height, width in sizes]
    assert picture.shape[0] == 20 + sum(rows) + 6 * len(rows) + 16 * -(-3 // (picture.shape[1] // 150)) + 8
    first = picture[20 : 20 + rows[0]]
    image, truth, prediction = (first[:, 8 + column * (cell + 6) :][:, :cell] for column in range(3))
    assert abs(image - prediction).mean() < 3, "a map without classes shows the image"
    assert abs(image - truth).mean() > 20
    objects = Objects(np.array([[10.0, 10, 60, 60]]), np.array([1]), None, [maps[2] == 1])
    of_objects = predictions_picture(images[2:3], [objects], [objects._replace(masks=None)], NAMES)
    assert Image.open(io.BytesIO(of_objects)).size[1] < 320, "no legend"


def test_the_legend_has_the_colours_of_the_classes() -> None:
    rng = np.random.default_rng(0)
    names = [f"class {number}" for number in range(150)]
    images = [rng.integers(0, 256, (90, 120, 3), dtype=np.uint8) for _ in range(2)]
    maps = [rng.choice(np.arange(0, 150, 8), (90, 120)).astype(np.uint8) for _ in range(2)]
    picture = Image.open(io.BytesIO(predictions_picture(images, maps, maps, names)))
    assert picture.mode == "P"
    colours = np.asarray(picture.convert("RGB"))
    columns = colours.shape[1] // 150
    top = colours.shape[0] - 8 - 16 * -(-19 // columns)
    for number, label in enumerate(range(0, 150, 8)):
        x, y = 8 + number % columns * 150, top + number // columns * 16
        assert (colours[y + 3 : y + 13, x + 1 : x + 11] == palette(150)[label]).all(), label


@pytest.mark.parametrize(("name", "shown"), [("café", "cafe"), ("Straße", "1 Stra?e"), ("数据", "1 ??")])
def test_names_are_drawn_in_letters_of_the_font(name: str, shown: str) -> None:
    image = np.zeros((40, 90, 3), np.uint8)
    one = Objects(np.array([[5.0, 20, 60, 39]]), np.array([1]))
    drawn = overlay(image, one, ["wall", name])
    assert (drawn == overlay(image, one, ["wall", shown])).all()


def test_files_of_a_validation_are_replaced_and_are_no_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunPaths(tmp_path)
    for step in (3, 6):
        write_validation(run, step, b"png", NAMES, {"iou": [1.0, None, 50.0]})
    assert json.loads((tmp_path / "per_class.json").read_text()) == {
        "step": 6,
        "classes": NAMES,
        "iou": [1.0, None, 50.0],
    }
    assert (run.pictures / "predictions.png").read_bytes() == b"png"
    assert not caplog.records
    write_validation(RunPaths(tmp_path / "absent"), 1, b"png", NAMES, {})
    assert "predictions of the validation are not shown" in caplog.text
