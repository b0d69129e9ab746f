"""dmjd miou and dmjd ap of runs: the scores of their validations again, other testing, other images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dmjd.compose import compose
from dmjd.errors import ConfigError, DataError
from dmjd.evaluate import describe, evaluate
from dmjd.evaluate import detection as detecting
from dmjd.runs.paths import RunPaths
from dmjd.train import loop
from tests.compare import rows

pytest.importorskip("faster_coco_eval", reason="the extra dmjd[dense] is not installed")

Write = Callable[..., Path]

TINY = (
    *("init=null", "backbone.embed_dim=32", "backbone.depth=4", "backbone.num_heads=2", "data.image_size=64"),
    *("epochs=1", "batch_size=4", "workers=0", "engine.device=cpu", "optim.base_lr=.3", "ema_decay=0.5"),
    *("data.check=none", "head.channels=16"),
)
SEGMENT = ("epochs=4", "val_every=4", "head.auxiliary_channels=8", "data.resize=[64,128]", "test.stride=[40,50]")
DETECT = (
    *("head.box_convs=1", "head.box_width=16", "head.mask_convs=1", "head.samples=16", "head.proposals=16"),
    *("head.proposals_before=16", "head.min_score=0.001", "head.detections=30"),
)
COMMON = ("device=cpu", "workers=0")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, write_scenes: Write) -> Path:
    return write_scenes(tmp_path_factory.mktemp("few"), 5, 3, size=(80, 96))


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory, few: Path) -> Path:
    """Four steps of segmentation. Only to be read, but for its evaluations."""
    run = tmp_path_factory.mktemp("segment") / "run"
    return loop.segment(compose("segment", [*TINY, *SEGMENT, f"data.root={few}", f"run={run}"])).path


@pytest.fixture(scope="module")
def detected(tmp_path_factory: pytest.TempPathFactory, few: Path) -> tuple[Path, list[list[Any]]]:
    """A step of detection, and the detections of its validation: of the weights, and of their average."""
    run, seen = tmp_path_factory.mktemp("detect") / "run", list[list[Any]]()

    def score(entries: list[Any], dataset: Any) -> Any:
        seen.append(list(entries))
        return scored(entries, dataset)

    scored = detecting.score_detections
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detecting, "score_detections", score)
        words = [*TINY, *DETECT, f"data.root={few}", f"run={run}"]
        return loop.detect(compose("detect", words)).path, seen


def miou(run: Path, *words: str) -> dict[str, Any]:
    return evaluate("miou", compose("miou", [f"checkpoint={run}", *COMMON, *words]))


def ap(run: Path, *words: str) -> dict[str, Any]:
    return evaluate("ap", compose("ap", [f"checkpoint={run}", *COMMON, *words]))


def test_miou_of_a_run_is_that_of_its_validation(segmented: Path) -> None:
    row = rows(segmented)[-1]
    for weights, prefix in (("trained", "val_"), ("ema", "val_ema_"), ("auto", "val_ema_")):
        record = miou(segmented, f"weights={weights}", "batch_size=3")
        for name in ("miou", "aacc", "macc"):
            assert record[name] == pytest.approx(row[f"{prefix}{name}"], abs=1e-9), "also with other batches of windows"
        assert record["weights"] == ("trained" if weights == "trained" else "ema")
    assert 0 < row["val_miou"] != row["val_ema_miou"] > 0
    settings = record["settings"]
    assert (settings["mode"], settings["scales"], settings["flip"]) == ("slide", [1.0], False)
    assert (settings["window"], settings["stride"]) == ([64, 64], [40, 50])
    assert record["test_images"] == 3
    known = [each["iou"] for each in record["table"].values() if each["iou"] is not None]
    assert len(known) == record["occurring_classes"] < record["classes"] == 11
    assert np.mean(known) == pytest.approx(record["miou"])
    assert describe(record)[0].startswith("miou: mean IoU ")
    (stored,) = RunPaths(segmented).evaluations.glob("miou-ema-*.json")
    assert json.loads(stored.read_text())["miou"] == record["miou"]
    table = json.loads((segmented / "per_class.json").read_text())
    assert table["iou"] == [pytest.approx(each["iou"]) for each in record["table"].values()]
    with Image.open(segmented / "pictures" / "predictions.png") as picture:
        assert picture.size[1] > 3 * 100


def test_other_testing_and_other_images(segmented: Path, few: Path, tmp_path: Path) -> None:
    shutil.copytree(few / "images" / "validation", tmp_path / "images" / "validation")
    shutil.copytree(few / "annotations" / "validation", tmp_path / "annotations" / "validation")
    shutil.copy(few / "objectInfo150.txt", tmp_path)
    first, *_ = sorted((tmp_path / "images" / "validation").iterdir())
    first.unlink()
    record = miou(segmented, f"data.root={tmp_path}", "test.mode=whole", "test.flip=true", "test.scales=[0.5,1]")
    assert record["test_images"] == 2
    assert record["settings"]["mode"] == "whole"
    assert record["settings"]["scales"] == [0.5, 1]
    assert "window" not in record["settings"]
    (tmp_path / "classes.txt").write_text("".join(f"class {number}\n" for number in range(11)))
    with pytest.raises(
        DataError, match=r"class 0 of the test images is 'class 0', and of checkpoint=.*; use images of"
    ):
        miou(segmented, f"data.root={tmp_path}")
    with pytest.raises(ConfigError, match=r"test.stride=\[65, 40\] exceeds data.image_size=\[64, 64\]"):
        miou(segmented, "test.stride=[65,40]")
    with pytest.raises(ConfigError, match=r"test\.scales must hold at least one number"):
        miou(segmented, "test.scales=[]")


def test_ap_of_a_run_has_the_detections_of_its_validation(
    detected: tuple[Path, list[list[Any]]], tmp_path: Path
) -> None:
    run, (trained, average) = detected
    row, file = rows(run)[-1], tmp_path / "below" / "results.json"
    for weights, expected, prefix in (("trained", trained, "val_"), ("ema", average, "val_ema_")):
        record = ap(run, f"weights={weights}", f"results={file}", "batch_size=2")
        found = json.loads(file.read_text())
        assert len(found) == len(expected) == record["detections"] > 0
        for one, other in zip(found, expected, strict=True):
            assert (one["image_id"], one["category_id"]) == (other["image_id"], other["category_id"])
            assert one["bbox"] == pytest.approx(other["bbox"], abs=1e-3)
            assert one["score"] == pytest.approx(other["score"], abs=1e-5)
        for name in ("box_ap", "mask_ap", "box_ap50", "mask_aps"):
            assert record[name] == pytest.approx(row[f"{prefix}{name}"])
    assert {each["category_id"] for each in found} <= {1, 2, 4, 5, 7, 8, 10, 11}, "ids of the annotation file"
    assert len(record["table"]) == 8
    for one in found:
        others = [each for each in found if each is not one and _key(each) == _key(one)]
        assert all(_overlap(one["bbox"], each["bbox"]) <= 0.5 + 1e-4 for each in others), "non-maxima are suppressed"
    assert json.loads((run / "per_class.json").read_text())["box_ap"] == [
        each["box_ap"] for each in record["table"].values()
    ]


def test_each_command_is_for_its_kind_of_run(segmented: Path, detected: tuple[Path, list[list[Any]]]) -> None:
    with pytest.raises(ConfigError, match=r"is not a segmentation model; train one with dmjd segment"):
        miou(detected[0])
    with pytest.raises(ConfigError, match=r"is not a detection model; train one with dmjd detect"):
        ap(segmented)
    with pytest.raises(ConfigError, match=r"results=.* is a folder; name a file"):
        ap(detected[0], f"results={segmented}")
    with pytest.raises(ConfigError, match=r"is not a detection model"):
        ap(segmented, "data.val=train2017")
    with pytest.raises(DataError, match=r"no label of a whole image; name labelled ones with data=folder"):
        evaluate("knn", compose("knn", [f"checkpoint={segmented}", *COMMON]))


def test_keys_of_annotated_images(
    segmented: Path, detected: tuple[Path, list[list[Any]]], few: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = ap(detected[0]), ap(detected[0], "data.val=train2017")
    assert (own["test_images"], other["test_images"]) == (3, 5)
    assert "val" not in own["settings"], "of the run"
    assert other["settings"]["val"] == "train2017"
    assert "val train2017" in describe(other)[0]
    with caplog.at_level("WARNING", logger="dmjd"):
        resized = miou(segmented, "data.resize=[48,64]", "test.mode=whole", "test.stride=[9,9]")
    assert resized["settings"]["resize"] == [48, 64]
    assert "test.stride is ignored with test.mode=whole" in caplog.text
    with pytest.raises(DataError, match=r"has value 11, .*true numbers them from 1"):
        miou(segmented, "data.reduce_zero_label=false")
    with pytest.raises(ConfigError, match=r"data.vall is not a key; did you mean data\.val\?"):
        compose("ap", ["checkpoint=x", "data.vall=x"])


def _key(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["image_id"], entry["category_id"]


def _overlap(one: list[float], other: list[float]) -> float:
    sides = [
        max(0.0, min(one[axis] + one[axis + 2], other[axis] + other[axis + 2]) - max(one[axis], other[axis]))
        for axis in (0, 1)
    ]
    shared = sides[0] * sides[1]
    return shared / (one[2] * one[3] + other[2] * other[3] - shared)
