"""Detections in the original image, their masks and AP, against pycocotools and detectron2's formulas written out."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from pycocotools.mask import decode, encode
from torch import Tensor

from dmjd.config import DetectDataConfig
from dmjd.data.dense.coco import Coco
from dmjd.data.dense.detection import test_image as image_of_test
from dmjd.data.waiting import interrupted_by
from dmjd.errors import BadImage, DataError, StopRequested, UserError
from dmjd.evaluate.detection import (
    annotated_objects,
    detections,
    encoded,
    entries_of,
    in_original,
    score_detections,
    write_results,
)
from dmjd.parallel.world import World, alone
from tests.evaluate.worlds import CPU, in_worlds

CATEGORIES = (3, 4, 9, 70)
STATS = ("ap", "ap50", "ap75", "aps", "apm", "apl")
SIDE = 160


class Truth:
    """An annotation file in the interface of Coco: squares, triangles and crowds, images without objects."""

    category_ids: Sequence[int] = CATEGORIES

    def __init__(self, file: Path, images: int = 12, *, area: bool = True) -> None:
        rng = np.random.default_rng(0)
        self.annotation_file = file
        self.ids = [7 * number + 2 for number in range(images)]
        self.objects = list[dict[str, Any]]()
        for image in self.ids[:-2]:
            for _ in range(rng.integers(1, 7)):
                x, y = rng.uniform(0, 80, 2).round(2).tolist()
                w, h = rng.uniform(3, [15, 79][rng.integers(2)], 2).round(2).tolist()
                crowd = rng.random() < 0.2
                polygon = (
                    [x, y, x + w, y, x + w, y + h] if rng.random() < 0.5 else [x, y, x + w, y, x + w, y + h, x, y + h]
                )
                mask: Any = [polygon]
                if crowd:
                    pixels = np.zeros((SIDE, SIDE), np.uint8, order="F")
                    pixels[int(y) : int(y + h), int(x) : int(x + w)] = 1
                    mask = {"size": [SIDE, SIDE], "counts": _runs(pixels)}
                found = {"id": 10 + len(self.objects), "image_id": image, "bbox": [x, y, w, h], "segmentation": mask}
                found |= {"category_id": int(rng.choice(CATEGORIES[:3])), "iscrowd": int(crowd)}
                self.objects.append(found | ({"area": w * h * (0.5 if len(polygon) == 6 else 1)} if area else {}))
        content = {
            "images": [{"id": name, "height": SIDE, "width": SIDE, "file_name": f"{name}.jpg"} for name in self.ids],
            "categories": [{"id": each, "name": str(each)} for each in CATEGORIES],
            "annotations": self.objects,
        }
        file.write_text(json.dumps(content))

    def __len__(self) -> int:
        return len(self.ids)

    def image_id(self, index: int) -> int:
        return self.ids[index]

    def size(self, index: int) -> tuple[int, int]:
        return SIDE, SIDE

    def guesses(self, seed: int, extra: int = 3) -> list[dict[str, Any]]:
        """Detections near the objects and elsewhere, of coarse scores (many are equal), in the order of the images."""
        rng, found = np.random.default_rng(seed), list[dict[str, Any]]()
        for image in self.ids:
            boxes = [each["bbox"] for each in self.objects if each["image_id"] == image for _ in range(2)]
            boxes += [[*rng.uniform(0, 80, 2), *rng.uniform(4, 60, 2)] for _ in range(extra)]
            for box in boxes:
                x, y, w, h = (float(value) for value in np.array(box) + rng.normal(0, 1.5, 4).clip(-2.5, 2.5))
                w, h = max(w, 1.0), max(h, 1.0)
                pixels = np.zeros((SIDE, SIDE), np.uint8, order="F")
                pixels[max(int(y), 0) : max(int(y + h), 1), max(int(x), 0) : max(int(x + w), 1)] = 1
                mask = encode(pixels)
                entry = {"image_id": image, "bbox": [x, y, w, h], "score": float(rng.integers(1, 9)) / 8}
                entry |= {"segmentation": {"size": mask["size"], "counts": mask["counts"].decode()}}
                found.append(entry | {"category_id": int(rng.choice(CATEGORIES))})
        return found


def _runs(pixels: Any) -> list[int]:
    """Run lengths of zeros and ones in turn, down the columns."""
    flat, found, value = pixels.ravel("F").tolist(), [0], 0
    for each in flat:
        if each != value:
            found.append(0)
            value = each
        found[-1] += 1
    return found


def of_pycocotools(file: Path, entries: list[dict[str, Any]]) -> dict[str, float | None]:
    """The first six of the twelve numbers of COCO's own code, in per cent, of boxes and masks."""
    found = dict[str, float | None]()
    with redirect_stdout(StringIO()):
        truth = COCO(str(file))
        for name, kind in (("box", "bbox"), ("mask", "segm")):
            own = [{key: value for key, value in each.items() if kind == "bbox" or key != "bbox"} for each in entries]
            evaluation = COCOeval(truth, truth.loadRes(json.loads(json.dumps(own))), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            for part, value in zip(STATS, evaluation.stats[:6], strict=True):
                found[f"{name}_{part}"] = None if value == -1 else 100 * float(value)
    return found


def assert_equal(found: dict[str, float | None], expected: dict[str, float | None]) -> None:
    """Up to the 2e-16 that COCO's code adds to each count."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (None if value is None else pytest.approx(value, rel=1e-12, abs=0)), name


@pytest.mark.parametrize(("seed", "extra"), [(0, 3), (1, 0), (2, 130)])
def test_ap_equals_pycocotools(tmp_path: Path, seed: int, extra: int, capfd: pytest.CaptureFixture[str]) -> None:
    """With crowds, images without objects, categories without detections, equal scores, more than 100 detections."""
    truth = Truth(tmp_path / "instances.json")
    entries = truth.guesses(seed, extra)
    write_results(tmp_path / "results.json", entries)
    assert json.loads((tmp_path / "results.json").read_text()) == entries
    capfd.readouterr()
    found = score_detections(entries, truth)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")
    expected = of_pycocotools(truth.annotation_file, entries)
    assert 0 < (expected["box_ap"] or 0) < 100
    assert 0 < (expected["mask_aps"] or 0) < 100
    assert_equal(found.scores, expected)
    assert found.of_classes["box_ap"][3] is None, "a category without objects"
    of_three = [value for value in found.of_classes["mask_ap"] if value is not None]
    assert np.mean(of_three) == pytest.approx(found.scores["mask_ap"])


def test_no_detections_score_zero_and_no_objects_are_an_error(tmp_path: Path) -> None:
    truth = Truth(tmp_path / "instances.json")
    found = score_detections([], truth).scores  # type: ignore[arg-type]
    assert found["box_ap"] == found["mask_ap50"] == 0
    empty = Truth(tmp_path / "empty.json", images=2)
    for entries in ([], empty.guesses(0)):
        with pytest.raises(DataError, match=r"empty.json has no objects in the validation images"):
            score_detections(entries, empty)  # type: ignore[arg-type]


def test_degenerate_annotations_are_scored(tmp_path: Path) -> None:
    """Lines for polygons, no mask, no area, id 0, corners at 1e9 pixels."""
    truth = Truth(tmp_path / "instances.json", area=False)
    content = json.loads(truth.annotation_file.read_text())
    for number, each in enumerate(content["annotations"]):
        each["id"] = number
    content["annotations"][0]["segmentation"] = [[1.0, 1.0, 5.0, 5.0]]
    content["annotations"][1]["segmentation"] = []
    content["annotations"][2]["segmentation"] = [[0.0, 0.0, 1e9, 0.0, 1e9, 1e9, 0.0, 1e9]]
    del content["annotations"][3]["segmentation"], content["annotations"][4]["iscrowd"]
    truth.annotation_file.write_text(json.dumps(content))
    found = score_detections(truth.guesses(0), truth).scores  # type: ignore[arg-type]
    assert 0 < (found["mask_ap"] or 0) < (found["mask_ap50"] or 0) < 100


def pasted(mask: Any, box: Sequence[float], size: tuple[int, int]) -> Any:
    """detectron2's paste_masks_in_image, pixel by pixel: the probability at the centre of each pixel."""
    side, found = len(mask), np.zeros(size)
    for row in range(size[0]):
        for column in range(size[1]):
            y = (row + 0.5 - box[1]) / (box[3] - box[1]) * side - 0.5
            x = (column + 0.5 - box[0]) / (box[2] - box[0]) * side - 0.5
            for j in (int(np.floor(y)), int(np.floor(y)) + 1):
                for i in (int(np.floor(x)), int(np.floor(x)) + 1):
                    if 0 <= j < side and 0 <= i < side:
                        found[row, column] += mask[j, i] * (1 - abs(y - j)) * (1 - abs(x - i))
    return found


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools
def test_masks_are_pasted_as_in_detectron2() -> None:
    size, masks = (23, 31), torch.rand(8, 28, 28, generator=torch.Generator().manual_seed(0))
    masks[0] = masks[-1] = 1
    masks[-2] = 0
    corners: list[list[float]] = [
        [0, 0, 31, 23],
        [3.3, 4.7, 20.1, 9.9],
        [10, 10, 10.4, 22.5],
        [29.5, 21, 31, 23],
        [0, 5, 2, 6],
        [7, 0, 9, 23],
        [3, 3, 9, 9],
        [-1, 0, 31, 24],
    ]
    boxes = torch.tensor(corners, dtype=torch.float32)
    found = list(encoded(masks, boxes, size))
    for each, mask, box in zip(found, masks.numpy(), corners, strict=True):
        pixels, expected = decode(each), pasted(mask, box, size)
        clear = abs(expected - 0.5) > 1e-4
        assert (pixels[clear] == (expected >= 0.5)[clear]).all()
        assert clear.mean() > 0.99
        again = encode(np.asfortranarray(pixels))
        assert each == {"size": [23, 31], "counts": again["counts"].decode()}, "in the form of COCO's code"
    assert decode(found[0]).all()
    assert found[0]["counts"] == found[-1]["counts"]
    assert not decode(found[-2]).any()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools
def test_boxes_are_mapped_to_the_original_image() -> None:
    found = {
        "boxes": torch.tensor([[0.0, 0, 32, 24], [8, 6, 16, 12], [-4, 3, 40, 6], [32, 2, 32, 4], [33, 1, 36, 9]]),
        "scores": torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5]),
        "labels": torch.tensor([0, 1, 2, 0, 1]),
        "masks": torch.ones(5, 28, 28),
    }
    placed = in_original(found, (24, 32), (48, 128))
    assert placed["boxes"].tolist() == [[0, 0, 128, 48], [32, 12, 64, 24], [0, 6, 128, 12]]
    first, second, _ = entries_of(placed, (48, 128), 5, CATEGORIES)
    assert {key: first[key] for key in ("image_id", "category_id", "bbox")} == {
        "image_id": 5,
        "category_id": 3,
        "bbox": [0, 0, 128, 48],
    }
    assert second["category_id"] == 4
    assert second["score"] == pytest.approx(0.8)
    assert decode(second["segmentation"]).sum() == 32 * 12
    wider = placed | {"labels": torch.tensor([4, 1, 2])}
    assert [each["category_id"] for each in entries_of(wider, (48, 128), 5, CATEGORIES)] == [4, 9]
    nothing = {name: value[:0] for name, value in found.items()}
    assert entries_of(in_original(nothing, (24, 32), (48, 128)), (48, 128), 5, CATEGORIES) == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools
def test_masks_of_a_gpu_are_those_of_the_cpu() -> None:
    masks = torch.rand(50, 28, 28, generator=torch.Generator().manual_seed(0))
    corners = 100 * torch.rand(50, 4, generator=torch.Generator().manual_seed(1))
    boxes = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:] + 1], 1)
    found = encoded(masks.cuda(), boxes.cuda(), (200, 300))
    for one, other in zip(found, encoded(masks, boxes, (200, 300)), strict=True):
        assert (decode(one) == decode(other)).mean() > 0.999


class Perfect:
    """Finds the annotated objects of each image, which it knows by its pixels."""

    def __init__(self, dataset: Coco, size: tuple[int, int]) -> None:
        self._known, self.shapes = dict[bytes, dict[str, Tensor]](), list[tuple[int, ...]]()
        for number in range(len(dataset)):
            pixels, valid = image_of_test(dataset.open(number), size)
            objects, original = annotated_objects(dataset, number), dataset.size(number)
            scale = np.array([valid[1] / original[1], valid[0] / original[0]] * 2)
            masks = [
                _sampled(mask, box) for mask, box in zip(objects.masks or (), np.asarray(objects.boxes), strict=True)
            ]
            self._known[pixels.numpy().tobytes()] = {
                "boxes": torch.from_numpy(objects.boxes * scale).float(),
                "scores": torch.linspace(1, 0.6, len(objects.labels)),
                "labels": torch.from_numpy(np.asarray(objects.labels)),
                "masks": torch.stack(masks) if masks else torch.zeros(0, 28, 28),
            }

    def __call__(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        self.shapes.append(tuple(images.shape))
        assert sizes.shape == (len(images), 2)
        return [self._known[image.numpy().tobytes()] for image in images]


def _sampled(mask: Any, box: Any) -> Tensor:
    """The nearest pixels of a mask at the 28 x 28 places of a box."""
    places = (np.arange(28) + 0.5) / 28
    rows = (box[1] + places * (box[3] - box[1])).astype(int).clip(0, mask.shape[0] - 1)
    columns = (box[0] + places * (box[2] - box[0])).astype(int).clip(0, mask.shape[1] - 1)
    return torch.from_numpy(mask[rows[:, None], columns]).float()


@pytest.fixture(scope="module")
def coco(scenes: Path) -> Coco:
    return Coco(DetectDataConfig(root=str(scenes), check="none"), "test")


@pytest.mark.parametrize("size", [1, 3])
def test_a_perfect_detector_scores_a_hundred_on_any_number_of_processes(coco: Coco, size: int, tmp_path: Path) -> None:
    square = (96, 80)
    first = detections(Perfect(coco, square), coco, square, 4, 2, 1.0, alone(CPU))
    models = [Perfect(coco, square) for _ in range(size)]

    def act(world: World) -> list[dict[str, Any]]:
        return detections(models[world.rank], coco, square, 2, 0, 1.0, world)

    main, *others = in_worlds(size, act)
    assert main == first, "no image twice, and in the order of the images"
    assert all(each == [] for each in others)
    assert len({tuple(model.shapes) for model in models}) == 1, "equally many calls of equal shapes on every rank"
    assert set(models[0].shapes) == {(2, 96, 80, 3)}
    found = score_detections(main, coco).scores
    assert_equal(found, of_pycocotools(coco.annotation_file, main))
    assert found["box_ap"] == 100
    assert (found["mask_ap50"] or 0) > 95


def test_a_bad_image_or_a_request_to_stop_at_one_rank_ends_all(coco: Coco, tmp_path: Path) -> None:
    square, stopping = (96, 80), threading.Event()

    class Stopped(Perfect):
        def __call__(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
            stopping.set()
            return super().__call__(images, sizes)

    models = [Perfect(coco, square), Stopped(coco, square)]
    with interrupted_by(stopping.is_set):
        ends = in_worlds(2, lambda world: detections(models[world.rank], coco, square, 1, 0, 1.0, world))
    assert [type(end) for end in ends] == [StopRequested, StopRequested]

    class Failing(Coco):
        def open(self, index: int) -> Any:
            if index == len(self) - 1:
                raise BadImage("bad.jpg", "undecodable", "cannot be decoded")
            return super().open(index)

    failing = Failing(replace(coco._config, check="none"), "test")  # type: ignore[arg-type]
    ends = in_worlds(2, lambda world: detections(models[0], failing, square, 1, 0, 1.0, world))
    assert [type(end) for end in ends] == [UserError, BadImage]
