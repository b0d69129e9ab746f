"""The generated scenes: both layouts describe the same pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools with numpy 2
mask_api: Any = import_module("pycocotools.mask")


def labels_of(root: Path, split: str, name: str) -> npt.NDArray[np.uint8]:
    with Image.open((root / "annotations" / split / name).with_suffix(".png")) as image:
        assert image.mode == "P"
        return np.array(image)


@pytest.mark.parametrize(("split", "name"), [("training", "train2017"), ("validation", "val2017")])
def test_masks_of_coco_cover_pixels_of_their_class(scenes: Path, split: str, name: str) -> None:
    content = json.loads((scenes / "annotations" / f"instances_{name}.json").read_text())
    labels = {each["id"]: number for number, each in enumerate(content["categories"], 1)}
    assert max(labels) > len(labels), "category ids have gaps"
    images = {each["id"]: each for each in content["images"]}
    maps = {number: labels_of(scenes, split, each["file_name"]) for number, each in images.items()}
    for number, each in images.items():
        assert maps[number].shape == (each["height"], each["width"])
    for annotation in content["annotations"]:
        classes = maps[annotation["image_id"]]
        segmentation = annotation["segmentation"]
        if isinstance(segmentation, list) or isinstance(segmentation["counts"], list):
            segmentation = mask_api.merge(np.atleast_1d(mask_api.frPyObjects(segmentation, *classes.shape)).tolist())
        mask = mask_api.decode(segmentation).astype(bool)
        assert (classes[mask] == labels[annotation["category_id"]]).mean() > 0.9
        assert int(mask.sum()) == pytest.approx(annotation["area"], rel=0.1)
        left, top, width, height = mask_api.toBbox(mask_api.encode(np.asfortranarray(mask.astype(np.uint8))))
        np.testing.assert_allclose(annotation["bbox"], [left, top, width, height], atol=1)
    kinds = {type(each["segmentation"]) for each in content["annotations"]}
    assert kinds == {list, dict}
    assert len({each["image_id"] for each in content["annotations"]}) == len(images) - 1, "one has no object"


def test_a_scene_depends_on_seed_split_and_number_alone(
    tmp_path: Path, scenes: Path, write_scenes: Callable[..., Path]
) -> None:
    fewer = write_scenes(tmp_path / "fewer", 3, 1, size=(80, 96))
    other = write_scenes(tmp_path / "other", 3, 1, size=(80, 96), seed=1)
    for below in ("images/training/scene_000003.jpg", "annotations/validation/scene_000001.png"):
        assert (fewer / below).read_bytes() == (scenes / below).read_bytes()
        assert (fewer / below).read_bytes() != (other / below).read_bytes()
    assert (fewer / "train2017/scene_000003.jpg").read_bytes() == (
        fewer / "images/training/scene_000003.jpg"
    ).read_bytes()
