"""Segmentation and detection learn eight generated scenes by heart, with the encoders and heads of the commands."""

from __future__ import annotations

import contextlib
import io
import math
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmjd.builders.tasks import builders_of
from dmjd.compose import compose
from dmjd.data.batch import Batch
from dmjd.data.dense.ade20k import IGNORED
from dmjd.evaluate.detection import entries_of
from dmjd.parallel.build import select_device
from dmjd.parallel.world import alone

SCENES = runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/generated_scenes/scenes.py"))
OBJECTS = ("plain disc", "checked square")
CLASSES = len(OBJECTS) + len(SCENES["BACKGROUNDS"])
IMAGES = 8

ENCODERS = {
    "vit": ("backbone=vit_tiny", "backbone.depth=4"),
    "convvit": (
        *("backbone=convvit_small", "backbone.depth=1", "backbone.conv_stages.embed_dims=[32,48]"),
        *("backbone.conv_stages.depths=[1,1]", "backbone.conv_stages.mlp_ratios=[2,2]"),
    ),
}
NARROW = ("backbone.embed_dim=64", "backbone.num_heads=2", "backbone.mlp_ratio=2", "engine.device=cpu")
SMALL = ("backbone.drop_path=0", "optim.layer_decay=1", "optim.weight_decay=0", "optim.betas=[0.9,0.98]")
UPERNET = ("test.mode=whole", "head.channels=24", "head.auxiliary_weight=0", "head.dropout=0")
MASK_RCNN = (
    *("head.channels=24", "head.rpn_convs=1", "head.box_convs=1", "head.box_width=64", "head.mask_convs=1"),
    *("head.proposals_before=64", "head.proposals=48", "head.samples=16"),
)


def large_scenes(side: int, least: float) -> list[Any]:
    """Scenes of one or two objects that cover the share ``least`` of the image each; half of the first are discs."""
    found: list[Any] = []
    seed = 0
    while len(found) < IMAGES:
        scene = SCENES["make_scene"]((side, side), OBJECTS, seed, 0, 0)
        seed += 1
        fits = len(scene.things) in (1, 2) and not any(thing.crowd for thing in scene.things)
        large = fits and all(thing.mask.sum() >= least * side**2 for thing in scene.things)
        if large and scene.things[0].label == len(found) % 2:
            found.append(scene)
    return found


def batch_of(scenes: Sequence[Any]) -> Batch:
    """Images, maps and objects of ``scenes`` of one size, without augmentation."""
    side = scenes[0].classes.shape[0]
    most = max(len(scene.things) for scene in scenes)
    boxes, labels = torch.zeros(len(scenes), most, 4), torch.full((len(scenes), most), -1)
    masks = np.zeros((len(scenes), most, side, side), dtype=bool)
    for row, scene in enumerate(scenes):
        for column, thing in enumerate(scene.things):
            boxes[row, column] = torch.tensor(box_of(thing.mask))
            labels[row, column] = thing.label
            masks[row, column] = thing.mask
    maps = np.stack([np.where(scene.classes == 0, IGNORED, scene.classes - 1) for scene in scenes])
    return Batch(
        torch.from_numpy(np.stack([scene.pixels for scene in scenes])),
        torch.arange(len(scenes)),
        labels,
        maps=torch.from_numpy(maps.astype(np.uint8)),
        boxes=boxes,
        masks=torch.from_numpy(np.packbits(masks, axis=-1)),
    )


def box_of(mask: Any) -> list[float]:
    rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
    return [float(edge) for edge in (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)]


def overfit(command: str, keys: Sequence[str], batch: Batch, *, steps: int, lr: float) -> Any:
    """The step of ``command`` after ``steps`` of warm-up and cosine on one batch."""
    side = batch.images.shape[1]
    size = f"data.image_size=[{side},{side}]"
    config = compose(command, ["init=null", f"batch_size={IMAGES}", size, *SMALL, *keys])
    device = select_device(config.engine.device)
    classes = CLASSES if command == "segment" else len(OBJECTS)
    step: Any = builders_of(config).step(config, classes, alone(device))
    step.engine.module.train()
    batch = batch.to(device)
    for number in range(steps):
        step.forward_backward(batch, number)
        step.update(lr * min(1, (number + 1) / 10) * (1 + math.cos(math.pi * number / steps)) / 2)
    return step


def miou(step: Any, batch: Batch) -> float:
    """Mean IoU of the maps of ``batch``, from 0 to 1."""
    predicted = step.logits(batch.images.to(step.engine.device)).argmax(dim=1).cpu()
    truth = batch.maps
    both = [(predicted == label) & (truth == label) for label in range(CLASSES)]
    either = [((predicted == label) & (truth != IGNORED)) | (truth == label) for label in range(CLASSES)]
    found = [float(a.sum() / b.sum()) for a, b in zip(both, either, strict=True) if b.any()]
    return sum(found) / len(found)


def aps(step: Any, scenes: Sequence[Any], batch: Batch) -> dict[str, float]:
    """AP and AP50 of boxes and masks by pycocotools, from 0 to 1."""
    from pycocotools import mask as rle
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    side, device = batch.images.shape[1], step.engine.device
    detected = step.detect(batch.images.to(device), torch.full((len(scenes), 2), side, device=device))
    categories = list(range(1, len(OBJECTS) + 1))
    annotations: list[dict[str, Any]] = []
    results: list[Any] = []
    for number, (scene, found) in enumerate(zip(scenes, detected, strict=True)):
        results += entries_of({name: value.cpu() for name, value in found.items()}, (side, side), number, categories)
        for thing in scene.things:
            left, top, right, bottom = box_of(thing.mask)
            own = {"id": len(annotations) + 1, "image_id": number, "category_id": thing.label + 1, "iscrowd": 0}
            own |= {"bbox": [left, top, right - left, bottom - top], "area": int(thing.mask.sum())}
            annotations.append(own | {"segmentation": rle.encode(np.asfortranarray(thing.mask.astype(np.uint8)))})
    truth = COCO()
    truth.dataset = {
        "images": [{"id": number, "height": side, "width": side} for number in range(len(scenes))],
        "annotations": annotations,
        "categories": [{"id": each, "name": str(each)} for each in categories],
    }
    scores: dict[str, float] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        for name, kind in (("box", "bbox"), ("mask", "segm")):
            evaluation = COCOeval(truth, truth.loadRes(results), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            scores |= {f"{name}_ap": float(evaluation.stats[0]), f"{name}_ap50": float(evaluation.stats[1])}
    return scores


@pytest.fixture(scope="module")
def scenes() -> list[Any]:
    return large_scenes(64, least=0.11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "keys", "lr"),
    [pytest.param("vit", ["backbone.patch_size=8"], 1e-2, marks=pytest.mark.long), ("convvit", [], 2e-2)],
)
def test_upernet_learns_eight_scenes(encoder: str, keys: list[str], lr: float, scenes: list[Any]) -> None:
    batch = batch_of(scenes)
    step = overfit("segment", [*ENCODERS[encoder], *NARROW, *UPERNET, *keys], batch, steps=90, lr=lr)
    assert miou(step, batch) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "keys", "lr"),
    [("vit", ["backbone.patch_size=16"], 5e-3), pytest.param("convvit", [], 1e-2, marks=pytest.mark.long)],
)
def test_mask_rcnn_learns_eight_scenes(encoder: str, keys: list[str], lr: float, scenes: list[Any]) -> None:
    batch = batch_of(scenes)
    step = overfit("detect", [*ENCODERS[encoder], *NARROW, *MASK_RCNN, *keys], batch, steps=80, lr=lr)
    scores = aps(step, scenes, batch)
    assert scores["box_ap50"] > 0.9
    assert scores["mask_ap50"] > 0.9


# Heads of published size


@pytest.mark.gpu
@pytest.mark.parametrize("encoder", ["vit", "convvit"])
def test_published_heads_learn_eight_scenes(encoder: str) -> None:
    """UPerNet of 512 channels, Mask R-CNN of 256 with 4 convolutions in each head and 512 proposals; 256 pixels."""
    scenes = large_scenes(256, least=0.02)
    batch = batch_of(scenes)
    backbone = {
        "vit": ["backbone=vit_small", "attention.window=8", "attention.relative_positions=decomposed"],
        "convvit": ["backbone=convvit_small"],
    }[encoder]
    assert miou(overfit("segment", [backbone[0], "test.mode=whole"], batch, steps=300, lr=5e-4), batch) > 0.9
    scores = aps(overfit("detect", backbone, batch, steps=500, lr=5e-4), scenes, batch)
    assert scores["box_ap"] > 0.8
    assert scores["mask_ap"] > 0.8
