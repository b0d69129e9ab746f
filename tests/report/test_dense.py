"""Pages, comparisons and the paper's table of segmentation and detection runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmjd.errors import DataError
from dmjd.report import paper_text, write_comparison, write_report
from dmjd.report.run import read_runs
from dmjd.report.scores import metrics, points
from tests.report.conftest import GROUPS, VIT_B, write_lines
from tests.report.html_page import Page

MakeRun = Callable[..., Path]
MAE: dict[str, Any] = {"backbone": VIT_B, "target": {"name": "pixels", "norm": "patch"}}
SHARED: dict[str, Any] = {
    "seed": 0,
    "ema_decay": None,
    "weights": "trained",
    "freeze": 0,
    "backbone": VIT_B | {"drop_path": 0.1},
}
SEGMENT = SHARED | {
    "command": "segment",
    "typed": ["preset=ade20k_mae_vit_base", "init"],
    "epochs": 4,
    "batch_size": 16,
    "data": {"name": "ade20k", "root": "ade", "image_size": [512, 512], "resize": [512, 2048], "distortion": True}
    | {"resize_ratio": [0.5, 2.0]},
    "optim": {"base_lr": 1.6e-3, "layer_decay": 0.65, "weight_decay": 0.05},
    "head": {"channels": 768, "auxiliary_weight": 0.4, "dropout": 0.1, "num_classes": 3},
    "attention": {"window": None, "global_blocks": None, "relative_positions": "decomposed"},
    "test": {"mode": "slide", "stride": [341, 341], "scales": [1.0], "flip": False},
}
DETECT = SHARED | {
    "command": "detect",
    "typed": ["init"],
    "epochs": 4,
    "batch_size": 64,
    "data": {"name": "coco", "root": "coco", "image_size": [1024, 1024], "scale": [0.1, 2.0]},
    "optim": {"base_lr": 4e-4, "layer_decay": 0.7, "weight_decay": 0.1},
    "head": {"channels": 256, "pyramid": "simple", "box_convs": 4, "mask_convs": 4, "proposals": 1000}
    | {"num_classes": 80},
    "attention": {"window": 14, "global_blocks": [2, 5, 8, 11], "relative_positions": "decomposed"},
}
PARTS = {
    "segment": {"decode": 2.0, "auxiliary": 1.0},
    "detect": {"rpn_class": 0.1, "rpn_box": 0.2, "class": 0.3, "box": 0.4, "mask": 0.5},
}
VALIDATED = {
    "segment": {"miou": 40.0, "aacc": 80.0, "macc": 50.0},
    "detect": {"box_ap": 50.0, "box_ap50": 70.0, "box_aps": 30.0, "mask_ap": 45.0, "mask_ap50": 66.0, "mask_aps": 25.0},
}
CLASSES = {
    "segment": {"classes": ["<wall>", "sky", "lake"], "iou": [30.0, 90.5, None], "accuracy": [31.0, 95.25, None]},
    "detect": {"classes": ["cat", "dog"], "box_ap": [20.0, 60.0], "mask_ap": [None, 50.0]},
}


@pytest.fixture
def make_dense(tmp_path: Path) -> Callable[..., Path]:
    """``make_dense(name, command, **config)``: the folder of a run of 4 epochs of 10 steps; the second is the best."""

    def make(name: str, command: str, scores: dict[str, float] | None = None, **config: Any) -> Path:
        folder = tmp_path / name
        (folder / "evaluations").mkdir(parents=True)
        (folder / "checkpoints" / "step-00000020").mkdir(parents=True)
        every = (SEGMENT if command == "segment" else DETECT) | config
        (folder / "config.yaml").write_text(yaml.safe_dump(every))
        (folder / "provenance.json").write_text(json.dumps({"device": "NVIDIA H200", "world_size": 8}))
        (folder / "groups.json").write_text(json.dumps(GROUPS))
        values = scores or VALIDATED[command]
        rows: list[dict[str, Any]] = []
        for epoch in range(1, 5):
            parts = {key: value / epoch for key, value in PARTS[command].items()}
            rows.append({"step": 10 * epoch, "epoch": epoch, "loss": 4.0 / epoch, "lr": 1e-3, **parts})
            found = {f"val_{key}": value + 2 * (epoch == 2) for key, value in values.items()}
            rows.append({"step": 10 * epoch, "epoch": epoch, **found})
        write_lines(folder / "log.jsonl", rows)
        write_lines(folder / "timing.jsonl", [{"step": 40, "seconds": 360.0}])
        main = next(iter(values))
        record = {"verb": command, "weights": "trained", "step": 40, **values, f"best_{main}": values[main] + 2}
        data = "ade20k in ade, 512x512" if command == "segment" else "coco in coco, 1024x1024"
        settings = {"data": data, "epochs": 4, "seed": every["seed"], "run": name}
        (folder / "evaluations" / f"{command}-0.json").write_text(json.dumps(record | {"settings": settings}))
        (folder / "per_class.json").write_text(json.dumps({"step": 40, **CLASSES[command]}))
        return folder

    return make


def test_the_page_of_a_segmentation(make_dense: MakeRun, make_run: MakeRun) -> None:
    origin = make_run("pretrained", epochs=1600, hours=227, config=MAE)
    page = Page(write_report(make_dense("seg", "segment", init=str(origin))).read_text())
    for sentence in (
        "Segmentation with UPerNet on ViT-B with the preset ade20k_mae_vit_base: 4 epochs, batch 16, peak learning "
        "rate 0.0016 x 16 / 256 = 0.0001.",
        "Attention: whole images, relative positions of rows and columns.",
        "Head: 768 channels, auxiliary FCN with weight 0.4, dropout 0.1, 3 classes.",
        "Augmentation: sides of 512 x 2048 pixels times 0.5 to 2, crops of 512 x 512, flips, photometric distortion.",
        "Testing: windows with steps of 341 x 341 pixels.",
        "Regularisation: layer decay 0.65, drop path 0.1, weight decay 0.05.",
        "Initial weights: pretrained, MAE.",
        "Last validation, step 40, by IoU. 1 of 3 classes do not occur and are left out of the mean.",
    ):
        assert sentence in page.text
    pairs = page.pairs()
    assert (pairs["Method"], pairs["Batch"], pairs["Data"]) == ("segmentation", "16", "ade20k")
    assert pairs["Best checkpoint"] == "validation mIoU 42.00 %, epoch 2 of 4, checkpoints/step-00000020"
    assert pairs["Last validation"] == "validation mIoU 40.00 %, epoch 4 of 4"
    assert [(row[0].partition(" of the")[0], row[1]) for row in page.scores()] == [
        ("mean IoU", "40.00"),
        ("pixel accuracy", "80.00"),
        ("mean class accuracy", "50.00"),
        ("mean IoU", "42.00"),
    ]
    head = page.rows.index(["Class", "IoU, %", "Accuracy, %"])
    assert page.rows[head + 1 : head + 4] == [
        ["sky", "90.50", "95.25"],
        ["<wall>", "30.00", "31.00"],
        ["lake", "-", "-"],
    ]
    labels = [each["aria-label"] for each in page.attributes("svg") if each.get("role") == "img"]
    assert labels == [f"{name} by step" for name in ("Loss", "Validation", "Learning rate")]
    for line in ("total  1", "UPerNet  0.", "auxiliary head  0.", "mIoU  40.00 %", "aAcc  80.00 %"):
        assert any(item.startswith(line) for item in page.items), line


def test_the_page_of_a_detection(make_dense: MakeRun) -> None:
    page = Page(write_report(make_dense("det", "detect", init="mae.pth")).read_text())
    for sentence in (
        "Detection with Mask R-CNN on ViT-B: 4 epochs, batch 64, peak learning rate 0.0004 x 64 / 256 = 0.0001.",
        "Attention: windows of 14 tokens, global blocks 2 5 8 11, relative positions of rows and columns.",
        "Augmentation: large-scale jitter of 0.1 to 2 at 1024 x 1024 pixels, flips.",
    ):
        assert sentence in page.text
    assert "Testing:" not in page.text
    assert "Head: 256 channels, simple pyramid, convolutions: 4 for boxes, 4 for masks, 1000 proposals, 80" in page.text
    assert page.pairs()["Best checkpoint"].startswith("validation box AP 52.00 %, epoch 2 of 4")
    head = page.rows.index(["Class", "AP box, %", "AP mask, %"])
    assert page.rows[head + 1 : head + 3] == [["dog", "60.00", "50.00"], ["cat", "20.00", "-"]]
    labels = [each["aria-label"] for each in page.attributes("svg") if each.get("role") == "img"]
    names = ("Loss", "Validation", "Validation by size of objects", "Learning rate")
    assert labels == [f"{name} by step" for name in names]
    for line in (
        "masks  0.",
        "boxes of proposals  0.",
        "box AP  50.00 %",
        "mask AP50  66.00 %",
        "box AP, small objects  30.00 %",
    ):
        assert any(item.startswith(line) for item in page.items), line


@pytest.mark.usefixtures("undrawn")
def test_scores_stand_beside_the_published_ones(make_dense: MakeRun, make_run: MakeRun) -> None:
    origin = make_run("pretrained", epochs=1600, hours=227, config=MAE)
    folders = [make_dense("seg", "segment", init=str(origin)), make_dense("det", "detect", init=str(origin))]
    text = paper_text(folders)
    head, segmented, detected = text.splitlines()[:3]
    published = next(line for line in text.splitlines() if "paper, Tables II, III, VI and VII" in line)
    end = head.index("mIoU") + len("mIoU"), head.index("AP box/mask") + len("AP box/mask")
    cells = [[line[: end[0]].split()[-1], line[: end[1]].split()[-1]] for line in (segmented, detected)]
    assert cells == [["40.00", "-"], ["-", "50.00/45.00"]]
    assert "48.1 †" in published
    assert "50.3/44.9 †" in published
    # The record of a run that began from another stands in that run's row as well.
    record = (folders[0] / "evaluations" / "segment-0.json").read_text()
    (origin / "evaluations" / "segment-0.json").write_text(record)
    rows = [line.split()[0] for line in paper_text([origin, *folders]).splitlines()[1:3]]
    assert rows == ["pretrained", "det"]
    # Seeds are one row, with the spread of boxes and masks.
    seeds = [make_dense(f"d{seed}", "detect", scores={"box_ap": 50.0 + seed, "mask_ap": 45.0}, seed=seed, init=None)
             for seed in range(2)]  # fmt: skip
    assert "50.50 ± 0.71 (2)/45.00 ± 0.00 (2)" in paper_text(seeds)


@pytest.mark.usefixtures("undrawn")
def test_defaults_are_shown_as_resolved(make_dense: MakeRun) -> None:
    test = {"mode": "slide", "stride": None, "scales": [1.0], "flip": False}
    page = Page(write_report(make_dense("seg", "segment", init=None, test=test)).read_text())
    assert "Testing: windows with steps of 341 x 341 pixels." in page.text
    assert "published rows" not in page.text.replace("All published rows", "")
    swin = {"backbone": SHARED["backbone"] | {"name": "swin"}, "head": DETECT["head"] | {"pyramid": "auto"}}
    folder = make_dense("det", "detect", init=None, **swin)
    assert "Head: 256 channels, FPN pyramid, " in Page(write_report(folder).read_text()).text
    values = {"box_ap": 31.0, "mask_ap": 30.0}
    record = {"verb": "ap", "weights": "ema", "step": 40, **values, "settings": {"data": "coco in coco, 1024x1024"}}
    (folder / "evaluations" / "ap-0.json").write_text(json.dumps(record))
    text = paper_text([folder])
    assert "AP, dmjd ap EMA" in text.splitlines()[0]
    assert "[1]" not in text


@pytest.mark.usefixtures("undrawn")
def test_runs_are_compared_by_their_validations(make_dense: MakeRun) -> None:
    folders = [make_dense("a", "segment", init=None), make_dense("b", "segment", init=None, epochs=8)]
    markdown = write_comparison(folders, baseline=folders[0])[0].read_text()
    assert "| Seg. mIoU online" in markdown
    assert "| segmentation" in markdown
    (run, _) = read_runs(folders)
    online = next(metric for metric in metrics([run]) if metric.online)
    assert (online.evaluation, online.score, online.title) == ("segment", "miou", "Seg. mIoU online")
    assert [(point.epoch, point.score) for point in points(run, online)] == [(1, 40), (2, 42), (3, 40), (4, 40)]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "per_class.json is damaged"),
        ('{"step": 1, "classes": ["a", "b"], "iou": [1.0]}', "must hold step, classes, and a score of each class"),
        ('{"step": 1, "classes": ["a"]}', "must hold step, classes, and a score of each class"),
        ('{"step": 1, "classes": ["a"], "iou": ["x"]}', "per_class.json is damaged: could not convert"),
        ("[]", "per_class.json is damaged"),
    ],
)
def test_a_damaged_table_of_classes_is_an_error(make_dense: MakeRun, text: str, message: str) -> None:
    folder = make_dense("seg", "segment", init=None)
    (folder / "per_class.json").write_text(text)
    with pytest.raises(DataError, match=message):
        write_report(folder)


@pytest.mark.usefixtures("undrawn")
def test_many_classes_are_folded_and_pictures_have_captions(make_dense: MakeRun) -> None:
    from PIL import Image

    folder = make_dense("seg", "segment", init=None)
    many = {"step": 40, "classes": [f"c{number}" for number in range(150)], "iou": [float(n % 7) for n in range(150)]}
    (folder / "per_class.json").write_text(json.dumps(many))
    (folder / "pictures").mkdir()
    Image.new("RGB", (4, 4)).save(folder / "pictures" / "predictions.png")
    page = Page(write_report(folder).read_text())
    assert "All 150 classes" in page.text
    head = page.rows.index(["Class", "IoU, %"])
    scores = [float(row[1]) for row in page.rows[head + 1 : head + 151]]
    assert scores == sorted(scores, reverse=True)
    assert "Validation images: annotations and predictions" in page.text
