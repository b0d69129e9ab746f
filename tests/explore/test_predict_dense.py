"""Predictions of segmentation and detection runs: maps of classes, and detections in COCO's format."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmjd.config import EvaluationConfig
from dmjd.data.dataset import InMemory
from dmjd.data.dense import detection
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.ops.images import normalise

pytest.importorskip("transformers", reason="the extra dmjd[dense] is not installed")
pytest.importorskip("torchvision", reason="the extra dmjd[dense] is not installed")
mask = pytest.importorskip("faster_coco_eval.core.mask", reason="the extra dmjd[dense] is not installed")

Command = Callable[..., tuple[int, str, str]]
CPU = ("device=cpu", "workers=0")


@pytest.fixture
def odd_images(tmp_path: Path, scenes: Path) -> Path:
    """A folder with a damaged file, a tiny image, a grey one, and names that differ in the suffix alone."""
    root, (first, *_) = tmp_path / "odd images", sorted((scenes / "val2017").iterdir())
    (root / "sub").mkdir(parents=True)
    shutil.copy(first, root / "a.jpg")
    with Image.open(first) as image:
        image.resize((41, 150)).save(root / "sub" / "a.png")
        image.convert("L").save(root / "a.png")
    Image.new("RGB", (1, 1), (9, 99, 199)).save(root / "line\nbreak.png")
    (root / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    return root


NAMES = ["a.jpg", "a.png", "broken.jpg", "line\\nbreak.png", "sub/a.png"]


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def model_of(run: Path) -> FrozenEncoder:
    return load_encoder(EvaluationConfig(checkpoint=str(run), device="cpu"))


def padded(image: np.ndarray[Any, Any], size: tuple[int, int], frozen: FrozenEncoder) -> torch.Tensor:
    """``image`` at the top left of the mean colour, normalised, ``[1, C, H, W]``."""
    fill = (255 * torch.tensor(frozen.data.mean)).round().to(torch.uint8)
    canvas = fill.expand(*size, -1).clone()
    canvas[: image.shape[0], : image.shape[1]] = torch.from_numpy(image.copy())
    return normalise(canvas[None], tuple(frozen.data.mean), tuple(frozen.data.std))


def test_maps_are_what_the_model_predicts(segmented_once: Path, scenes: Path, dmjd: Command) -> None:
    """Whole images of 64 pixels are not resized: the map is the class of the greatest logit at each pixel."""
    folder = segmented_once.parent / "squares"
    folder.mkdir(exist_ok=True)
    for number, path in enumerate(sorted((scenes / "val2017").iterdir())[:2]):
        with Image.open(path) as image:
            image.crop((0, 0, 64 + 16 * number, 64)).save(folder / f"{number}.png")
    code, out, error = dmjd("predict", str(segmented_once), str(folder), *CPU, "test.mode=whole", "weights=trained")
    assert code == 0, error
    written = Path(out.splitlines()[-1])
    assert written.parent == segmented_once / "predictions"
    frozen = model_of(segmented_once)
    model = frozen.objective
    assert model is not None
    names = (scenes / "objectInfo150.txt").read_text().splitlines()[1:]
    classes = [*(line.split("\t")[-1].split(",")[0] for line in names), "11", "12"]  # the head has two more
    rows = rows_of(written)
    assert list(rows[0])[:5] == ["name", "map", "height", "width", "error"]
    assert list(rows[0])[5:] == classes
    for number, row in enumerate(rows):
        with Image.open(folder / f"{number}.png") as image:
            pixels = np.asarray(image.convert("RGB"))
        with torch.no_grad():
            logits = model(padded(pixels, pixels.shape[:2], frozen))
        expected = logits[0].argmax(0).numpy()
        with Image.open(written / row["map"]) as found:
            assert found.mode == "P"
            values = np.asarray(found)
            palette = found.getpalette()
        assert np.array_equal(values, expected + 1), "numbers of the annotations, where 0 is no class"
        shares = [float(row[name]) for name in classes]
        assert shares == pytest.approx([(expected == each).mean() for each in range(13)], abs=1e-6)
        assert (row["height"], row["width"]) == tuple(map(str, expected.shape))
    with (written / "classes.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [(each["number"], each["name"]) for each in table] == [(str(n), name) for n, name in enumerate(classes, 1)]
    assert palette is not None
    assert all(palette[3 * n : 3 * n + 3] == list(bytes.fromhex(each["colour"][1:])) for n, each in enumerate(table, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_maps_of_any_folder(
    workers: int, segmented_once: Path, odd_images: Path, dmjd: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(odd_images.parent)
    code, out, error = dmjd(
        "predict", str(segmented_once), odd_images.name, "device=cpu", f"workers={workers}", "overlays=true",
        "test.scales=[0.5,1]", "test.flip=true", "output=found",
    )  # fmt: skip
    assert code == 0, error
    rows = rows_of(Path("found"))
    assert [row["name"] for row in rows] == NAMES
    assert [row["map"] for row in rows] == ["maps/a.png", "maps/a-2.png", "", "maps/line\\nbreak.png", "maps/sub/a.png"]
    assert [row["name"] for row in rows if row["error"]] == ["broken.jpg"]
    assert f"5 images; 1 of them cannot be read, the first: broken.jpg {rows[2]['error']}" in out
    for row in (row for row in rows if not row["error"]):
        place = row["map"].replace("\\n", "\n")
        with Image.open(Path("found", place)) as found:
            assert found.size == (int(row["width"]), int(row["height"]))
        with Image.open(Path("found", place.replace("maps", "overlays")).with_suffix(".jpg")) as shown:
            assert shown.size == found.size
        assert sum(float(value) for value in list(row.values())[5:]) == pytest.approx(1, abs=1e-4)
    with Image.open(odd_images / "sub" / "a.png") as image:
        assert (int(rows[4]["width"]), int(rows[4]["height"])) == image.size == (41, 150)


def test_a_folder_as_a_data_set_gives_the_maps_of_its_images(
    segmented_once: Path, scenes: Path, dmjd: Command, tmp_path: Path
) -> None:
    """data=folder has no maps of classes: the test's sizes are those of the run."""
    val = tmp_path / "photos" / "val" / "a"
    shutil.copytree(scenes / "train2017", tmp_path / "photos" / "train" / "a")
    shutil.copytree(scenes / "val2017", val)
    code, out, error = dmjd("predict", str(segmented_once), "data=folder", f"data.root={val.parents[1]}", *CPU)
    assert code == 0, error
    as_set = rows_of(Path(out.splitlines()[-1]))
    code, out, error = dmjd("predict", str(segmented_once), str(val), *CPU)
    assert code == 0, error
    by_name = rows_of(Path(out.splitlines()[-1]))
    classes = list(by_name[0])[5:]
    assert [[row[name] for name in classes] for row in as_set] == [[row[name] for name in classes] for row in by_name]


def test_detections_are_what_the_model_detects(detected_once: Path, scenes: Path, dmjd: Command) -> None:
    """Of the validation images, with the image and category ids of their annotation file."""
    code, out, error = dmjd("predict", str(detected_once), *CPU, "batch_size=2")
    assert code == 0, error
    written = Path(out.splitlines()[-1])
    assert written == detected_once / "predictions" / f"trained-step{2:08d}"
    truth = json.loads((scenes / "annotations" / "instances_val2017.json").read_text())
    described = json.loads((written / "images.json").read_text())
    assert [(each["id"], each["name"]) for each in described["categories"]] == [
        (each["id"], each["name"]) for each in truth["categories"]
    ]
    assert [each | {"file_name": f"val2017/{each['file_name']}"} for each in truth["images"]] == described["images"]
    entries = json.loads((written / "detections.json").read_text())
    frozen, ids = model_of(detected_once), [each["id"] for each in truth["categories"]]
    model: Any = frozen.objective
    for image in truth["images"]:
        height, width = image["height"], image["width"]
        with Image.open(scenes / "val2017" / image["file_name"]) as opened:
            square, size = detection.test_image(InMemory(np.array(opened)), (64, 64))
        assert max(size) == 64
        with torch.no_grad():
            pixels = normalise(square[None], tuple(frozen.data.mean), tuple(frozen.data.std))
            (expected,) = model.detect(pixels, torch.tensor([size]))
        found = [entry for entry in entries if entry["image_id"] == image["id"]]
        assert [entry["category_id"] for entry in found] == [ids[label] for label in expected["labels"].tolist()]
        assert [entry["score"] for entry in found] == pytest.approx(expected["scores"].tolist(), abs=1e-5)
        boxes = torch.tensor([entry["bbox"] for entry in found])
        boxes[:, 2:] += boxes[:, :2]
        wanted = expected["boxes"] * torch.tensor([width / size[1], height / size[0]] * 2)
        torch.testing.assert_close(boxes, wanted, atol=0.02, rtol=0)
        for entry, (left, top, right, bottom) in zip(found, boxes.tolist(), strict=True):
            assert entry["segmentation"]["size"] == [height, width]
            rows, columns = np.nonzero(mask.decode(entry["segmentation"]))
            inside = (rows >= int(top) - 1) & (rows <= bottom + 1) & (columns >= int(left) - 1) & (columns <= right + 1)
            assert inside.all(), "a mask lies in its box"
    (row, *_) = rows_of(written)
    assert (row["name"], row["detections"]) == (
        described["images"][0]["file_name"],
        str(sum(entry["image_id"] == int(row["image_id"]) for entry in entries)),
    )


def test_detections_of_any_folder(detected_once: Path, odd_images: Path, dmjd: Command) -> None:
    out = odd_images.parent / "found"
    words = ("predict", str(detected_once), str(odd_images), *CPU, f"output={out}", "overlays=true")
    assert dmjd(*words)[0] == 0
    rows = rows_of(out)
    assert [row["name"] for row in rows] == NAMES
    assert [row["image_id"] for row in rows] == ["1", "2", "", "3", "4"]
    described, entries = (json.loads((out / name).read_text()) for name in ("images.json", "detections.json"))
    assert [each["file_name"] for each in described["images"]] == [NAMES[0], NAMES[1], *NAMES[3:]]
    assert [sum(each["image_id"] == number for each in entries) for number in range(1, 5)] == [
        int(row["detections"]) for row in rows if row["detections"]
    ]
    assert sorted(path.name for path in (out / "overlays").rglob("*.jpg")) == [
        "a-2.jpg", "a.jpg", "a.jpg", "line\nbreak.jpg",
    ]  # fmt: skip
    # Again, with a least score above all: no detections, and nothing of before is left.
    code, said, _ = dmjd(*words[:-1], "min_score=0.999")
    assert (code, "replaced the earlier found" in said) == (0, True)
    assert json.loads((out / "detections.json").read_text()) == []
    assert not (out / "overlays").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["labelled=x.npz"], "labelled has no meaning for a segmentation run such as checkpoint="),
        (["min_score=0.5"], "min_score has no meaning for a segmentation run"),
        (["output={tmp}/other"], "other holds other files than predictions; set another folder with output=FOLDER"),
        (["{tmp}/none.jpg"], "none.jpg does not exist; name image files or folders of images"),
        (["test.stride=[65,65]", "{tmp}/other/a.png"], "test.stride=[65, 65] exceeds data.image_size=[64, 64]"),
        (["{tmp}/own/a.png", "output={tmp}/own"], "a.png is in {tmp}/own, which is replaced"),
    ],
)
def test_errors_are_one_line(
    words: list[str], message: str, segmented_once: Path, tmp_path: Path, dmjd: Command
) -> None:
    for name in ("other", "own"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    (tmp_path / "own" / "predictions.csv").write_text("")
    given = [word.replace("{tmp}", str(tmp_path)) for word in words]
    code, _, error = dmjd("predict", str(segmented_once), *sorted(given, key=lambda word: "=" in word), *CPU)
    assert code != 0
    assert message.replace("{tmp}", str(tmp_path)) in error
    assert error.count("\n") == 1
    assert (tmp_path / "other" / "a.png").exists()


def test_an_interrupted_prediction_leaves_nothing(
    segmented_once: Path, odd_images: Path, dmjd: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = odd_images.parent / "found"
    monkeypatch.setattr(
        Image.Image, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device", "x"))
    )
    code, _, error = dmjd("predict", str(segmented_once), str(odd_images), *CPU, f"output={out}")
    assert code != 0
    assert "cannot write x: No space left on device" in error
    assert sorted(path.name for path in odd_images.parent.iterdir()) == [odd_images.name]
