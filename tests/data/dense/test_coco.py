"""COCO's annotation files against pycocotools and plain loops."""

from __future__ import annotations

import json
import os
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dmjd.config import DetectDataConfig
from dmjd.data.build import build_dataset, training_transform
from dmjd.data.dataset import Pixels
from dmjd.data.dense.coco import Coco, CocoImage
from dmjd.data.dense.instances import read_instances
from dmjd.data.dense.masks import Masks, MaskStore, decode_counts
from dmjd.errors import BadImage, DataError, NoSplit

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # pycocotools with numpy 2
mask_api: Any = import_module("pycocotools.mask")

Json = dict[str, Any]


def drawn(segmentation: Any, height: int, width: int) -> Pixels:
    """pycocotools' mask, of polygons with float32 corners."""
    if isinstance(segmentation, list):
        polygons = [np.float32(each).astype(float).tolist() for each in segmentation]
        segmentation = mask_api.merge(mask_api.frPyObjects(polygons, height, width))
    elif isinstance(segmentation["counts"], list):
        segmentation = mask_api.frPyObjects(segmentation, height, width)
    mask: Pixels = mask_api.decode(segmentation)
    return mask


POLYGON = [2.5, 1.0, 9.25, 2.0, 6.0, 10.5]


def content(segmentation: Any = (POLYGON,), **changes: Any) -> Json:
    """An annotation file of one 12x16 image with one object of category 3; ``changes`` of the annotation."""
    annotation = {"id": 9, "image_id": 5, "category_id": 3, "bbox": [2.5, 1.0, 6.75, 9.5], "iscrowd": 0, "area": 33.0}
    annotation |= {"segmentation": segmentation} | changes
    image = {"id": 5, "file_name": "a.png", "height": 12, "width": 16}
    return {"images": [image], "annotations": [annotation], "categories": [{"id": 3, "name": "cup"}]}


def write(root: Path, values: Json | str | bytes, name: str = "train2017") -> Path:
    path = root / "annotations" / f"instances_{name}.json"
    path.parent.mkdir(exist_ok=True)
    if isinstance(values, dict):
        values = json.dumps(values)
    path.write_bytes(values if isinstance(values, bytes) else values.encode())
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with the image of :func:`content`."""
    (tmp_path / "train2017").mkdir()
    Image.new("RGB", (16, 12)).save(tmp_path / "train2017/a.png")
    return tmp_path


def coco(root: Path, split: Any = "train", **options: Any) -> Coco:
    dataset = build_dataset(DetectDataConfig(root=str(root), **options), split)
    assert isinstance(dataset, Coco)
    return dataset


def only_mask(image: CocoImage) -> Pixels:
    height, width = image.size
    return image.objects().masks.render(0, (0, 0, width, height), image.size)


def store_of(polygons: list[npt.NDArray[np.float32]], runs: list[int] = []) -> MaskStore:  # noqa: B006 -- not changed
    """A store of one object."""
    ends = np.cumsum([0, *map(len, polygons)])
    points = np.concatenate([*polygons, np.zeros(0, np.float32)]).astype(np.float32)
    lengths = np.array(runs, dtype=np.uint32)
    return MaskStore(points, ends, np.array([[0, len(polygons)]]), lengths, np.array([[0, len(runs)]]))


def test_objects_are_those_of_pycocotools(scenes: Path) -> None:
    for split, name in (("train", "train2017"), ("test", "val2017")):
        values = json.loads((scenes / "annotations" / f"instances_{name}.json").read_text())
        dataset = coco(scenes, split)
        numbers = sorted(each["id"] for each in values["categories"])
        assert dataset.category_ids == numbers
        assert max(numbers) > len(numbers)
        names = {each["id"]: each["name"] for each in values["categories"]}
        assert dataset.classes == [names[number] for number in numbers]
        known = {each["id"]: each for each in values["images"]}
        crowds = 0
        for index in range(len(dataset)):
            image = known[dataset.image_id(index)]
            size = image["height"], image["width"]
            opened = dataset.open(index)
            assert opened.size == dataset.size(index) == size
            assert dataset.label(index) == -1
            assert dataset.name(index).endswith(f"{name}/{image['file_name']}")
            truths = [each for each in values["annotations"] if each["image_id"] == image["id"]]
            crowds += sum(each["iscrowd"] for each in truths)
            truths = [each for each in truths if not each["iscrowd"]]
            objects = opened.objects()
            assert [numbers[label] for label in objects.labels] == [each["category_id"] for each in truths]
            for number, truth in enumerate(truths):
                x, y, w, h = truth["bbox"]
                np.testing.assert_allclose(objects.boxes[number], [x, y, x + w, y + h], rtol=1e-6)
                mask = objects.masks.render(number, (0, 0, size[1], size[0]), size)
                np.testing.assert_array_equal(mask, drawn(truth["segmentation"], *size))
        with_objects = {each["image_id"] for each in values["annotations"] if not each["iscrowd"]}
        assert len(known) == len(with_objects) + 1
        skipped = {"crowd regions": crowds} | ({"images without objects": 1} if split == "train" else {})
        assert dataset.skipped == skipped
        assert crowds
        kept = with_objects if split == "train" else known
        assert [dataset.image_id(index) for index in range(len(dataset))] == sorted(kept)


def test_polygons_are_drawn_by_cocos_rule_in_any_box_at_any_scale() -> None:
    rng = np.random.default_rng(0)
    height, width = 60, 80
    for _ in range(40):
        count = int(rng.integers(1, 4))
        polygons = [
            rng.uniform((-10, -10), (width + 10, height + 10), (int(rng.integers(3, 9)), 2)).astype(np.float32).ravel()
            for _ in range(count)
        ]
        masks = Masks(store_of(polygons), range(1), (height, width))
        truth = drawn([each.tolist() for each in polygons], height, width)
        np.testing.assert_array_equal(masks.render(0, (0, 0, width, height), (height, width)), truth)
        # A box at a scale: the same part of the mask of scaled polygons.
        scale, (x, y), (w, h) = rng.uniform(0.3, 3), rng.integers(0, 20, 2), rng.integers(10, 24, 2)
        box = x / scale, y / scale, (x + w) / scale, (y + h) / scale
        whole = drawn([(each.astype(float) * scale).tolist() for each in polygons], 300, 300)
        part = masks.render(0, box, (int(h), int(w)))
        outside = (whole[y : y + h, x : x + w] != part).sum()
        assert outside <= 0.02 * part.size, "apart from rounding of corners above and left of the box"


def test_run_lengths_are_decoded_and_resized_to_the_nearest_pixel() -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        height, width = rng.integers(1, 40, 2).tolist()
        truth = np.asfortranarray((rng.random((height, width)) < rng.choice([0.03, 0.5, 1.0])).astype(np.uint8))
        runs, value = [0], 0
        for pixel in truth.T.ravel().tolist():
            if pixel != value:
                runs.append(0)
                value = pixel
            runs[-1] += 1
        text = mask_api.encode(truth)["counts"].decode()
        assert decode_counts(text).tolist() == runs
        masks = Masks(store_of([], runs), range(1), (height, width))
        np.testing.assert_array_equal(masks.render(0, (0, 0, width, height), (height, width)), truth)
        (y1, y2), (x1, x2) = (sorted(rng.choice(side + 1, 2, replace=False).tolist()) for side in (height, width))
        h, w = rng.integers(1, 50, 2).tolist()
        part = masks.render(0, (x1, y1, x2, y2), (h, w))
        for i, j in zip(rng.integers(0, h, 20), rng.integers(0, w, 20), strict=True):
            row, column = int(y1 + (i + 0.5) * (y2 - y1) / h), int(x1 + (j + 0.5) * (x2 - x1) / w)
            assert part[i, j] == truth[row, column]


def test_large_runs_are_decoded() -> None:
    """Numbers of several groups of bits, negative differences among them."""
    runs = [0, 5_000_000, 31, 1, 1_048_576, 16, 15, 17, 33_554_431, 3]
    size = [sum(runs), 1]
    assert (
        decode_counts(mask_api.frPyObjects({"counts": runs, "size": size}, *size)["counts"].decode()).tolist() == runs
    )


def test_order_of_the_file_does_not_matter(root: Path, scenes: Path) -> None:
    values = json.loads((scenes / "annotations/instances_train2017.json").read_text())
    for key in ("images", "categories"):
        random.Random(0).shuffle(values[key])
    values = {key: values[key] for key in ("annotations", "categories", "info", "images")}
    (root / "a").mkdir()
    os.symlink(scenes / "train2017", root / "a/train2017")  # of the folder itself: a choice of the user
    write(root / "a", values)
    shuffled, original = coco(root / "a"), coco(scenes)
    assert shuffled.fingerprint == original.fingerprint
    assert shuffled.open(2).objects().boxes.tolist() == original.open(2).objects().boxes.tolist()


def test_what_grows_with_the_images_is_in_arrays(scenes: Path) -> None:
    """Forked workers share arrays; reading a Python object copies its page."""
    dataset = coco(scenes)
    assert len(dataset) > len(dataset.classes)
    held = [*vars(dataset).values(), *vars(dataset._masks).values()]
    assert sum(isinstance(each, np.ndarray) for each in held) >= 11
    assert not [each for each in held if isinstance(each, list | tuple | dict) and len(each) >= len(dataset)]


def test_another_annotation_is_another_data_set(root: Path) -> None:
    write(root, content())
    first = coco(root).fingerprint
    for changed in (
        content([[2.5, 1.0, 9.25, 2.0, 6.0, 10.25]]),
        content(bbox=[2.5, 1.0, 6.75, 9.0]),
        content() | {"categories": [{"id": 3, "name": "mug"}]},
    ):
        write(root, changed)
        assert coco(root).fingerprint != first


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"bbox": [2, 1, 0, 9]}, "boxes without area"),
        ({"bbox": [2, 1, 6, -1]}, "boxes without area"),
        ({"bbox": [16, 1, 6, 9]}, "boxes outside of their image"),
        ({"bbox": [-9, -9, 9, 20]}, "boxes outside of their image"),
        ({"segmentation": []}, "objects without a mask"),
        ({"segmentation": None}, "objects without a mask"),
        ({"segmentation": [[1, 1, 5, 5]]}, "objects without a mask"),
        ({"segmentation": {"counts": [], "size": [12, 16]}}, "objects without a mask"),
        ({"iscrowd": 1, "segmentation": {"counts": [12 * 16], "size": [12, 16]}}, "crowd regions"),
    ],
)
def test_annotations_that_are_no_objects_are_counted(root: Path, changes: Json, kind: str) -> None:
    values = content(**changes)
    second = dict(values["images"][0], id=6)
    values["images"].append(second)
    values["annotations"].append(content(id=10, image_id=6)["annotations"][0])
    write(root, values)
    dataset = coco(root)
    assert dataset.skipped == {kind: 1, "images without objects": 1}
    assert [dataset.image_id(index) for index in range(len(dataset))] == [6]
    write(root, values, "val2017")
    (root / "val2017").symlink_to("train2017")
    dataset = coco(root, "test")
    assert dataset.skipped == {kind: 1}
    assert dataset.image_id(0) == 5
    assert len(dataset.open(0).objects().labels) == 0


def test_boxes_and_masks_beyond_the_image_are_clipped(root: Path) -> None:
    polygon = [-500.0, 3.0, 9.0, 3.0, 9.0, 900.0, -500.0, 900.0]
    write(root, content([polygon], bbox=[-2, 3, 100, 5]))
    image = coco(root).open(0)
    assert image.objects().boxes.tolist() == [[0, 3, 16, 8]]
    np.testing.assert_array_equal(only_mask(image), drawn([polygon], 12, 16))


def test_a_missing_validation_split_is_no_split(root: Path) -> None:
    write(root, content())
    with pytest.raises(NoSplit, match=r"instances_val2017\.json does not exist"):
        coco(root, "test")
    write(root, content(), "val2017")
    with pytest.raises(DataError, match="val2017 is not a folder"):
        coco(root, "test")


def test_a_set_without_objects_has_nothing_to_train_on(root: Path) -> None:
    write(root, content() | {"annotations": []})
    with pytest.raises(DataError, match=r"no usable object \(no annotations\)"):
        coco(root)
    write(root, content(), "val2017")
    (root / "val2017").symlink_to("train2017")
    coco(root, "test").require_annotations()
    values = content()
    del values["annotations"][0]["segmentation"]
    for name in ("train2017", "val2017"):
        write(root, values, name)
    with pytest.raises(DataError, match=r"\(objects without a mask: 1\); an object needs .* a segmentation \(polygons"):
        coco(root)
    with pytest.raises(DataError, match=r"val2017.json has no usable object .objects without a mask: 1"):
        coco(root, "test").require_annotations()


def test_too_many_objects_in_an_image(root: Path) -> None:
    values = content()
    values["annotations"] = [values["annotations"][0] | {"id": number} for number in range(1001)]
    write(root, values)
    with pytest.raises(DataError, match=r"1001 objects in image a\.png; training takes at most 1000 in an image: cut"):
        coco(root)
    del values["annotations"][300:]
    write(root, values)
    assert coco(root).most_objects == 300
    config = DetectDataConfig(root=str(root), image_size=[8, 16])
    assert training_transform(config, dataset=coco(root)).nbytes(2, 3) == 2 * (8 * 16 * 3 + 8 + 300 * (16 + 16 + 8))


def test_json_of_another_kind(root: Path) -> None:
    write(root, {"annotations": [], "categories": []})
    with pytest.raises(DataError, match="it has no images; it has to be a JSON object with the arrays images, annot"):
        coco(root)


def test_images_that_differ_from_the_file_are_found_before_training(root: Path) -> None:
    values = content()
    values["images"][0]["height"] = 13
    write(root, values)
    with pytest.raises(DataError, match=r"a.png has 12x16 pixels .*instances_train2017.json gives 13x16") as error:
        coco(root)
    assert "\n" not in str(error.value)
    with pytest.raises(BadImage, match="13x16"):
        coco(root, check="none").open(0)
    values["images"][0] |= {"height": 12, "file_name": "b.png"}
    write(root, values)
    with pytest.raises(DataError, match=r"b\.png cannot be read"):
        coco(root)


def test_a_link_out_of_the_folder_is_not_read(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "a.png"
    (root / "train2017/a.png").rename(outside)
    (root / "train2017/a.png").symlink_to(outside)
    write(root, content())
    with pytest.raises(DataError, match="is a link out of"):
        coco(root)
    with pytest.raises(BadImage, match="is a link out of"):
        coco(root, check="none").open(0)
    (root / "train2017/b.png").write_bytes(outside.read_bytes())
    (root / "train2017/a.png").unlink()
    (root / "train2017/a.png").symlink_to("b.png")
    assert coco(root).open(0).size == (12, 16)


def _image(**changes: Any) -> Json:
    values = content()
    values["images"][0] |= changes
    return values


def _without(key: str, part: str | None = None) -> Json:
    values = content()
    if part is None:
        del values[key]
    else:
        del values[key][0][part]
    return values


def _twice(key: str) -> Json:
    values = content()
    values[key].append(dict(values[key][0]))
    return values


def _runs(counts: Any, size: Any = (12, 16)) -> Json:
    return content({"counts": counts, "size": list(size) if isinstance(size, tuple) else size})


_TEXT = json.dumps(content())
BROKEN: dict[str, Json | str | bytes] = {
    **{f"cut at {share} of 7": _TEXT[: len(_TEXT) * share // 7] for share in range(7)},
    "no json": "images: []",
    "an array": "[]",
    "more text": _TEXT + "{}",
    "binary": b"\xff\xd8\xff\xe0" + bytes(99),
    "utf-16": _TEXT.encode("utf-16"),
    "nested": '{"images": ' + "[" * 100_000,
    "nested info": '{"info": ' + "[{" * 100_000,
    "a key twice": _TEXT[:-1] + ', "images": []}',
    "images are an object": content() | {"images": {}},
    "annotations are null": content() | {"annotations": None},
    "no images": _without("images"),
    "no annotations": _without("annotations"),
    "no categories": _without("categories"),
    "images are empty": content() | {"images": [], "annotations": []},
    "categories are empty": content() | {"categories": [], "annotations": []},
    "an image is a number": content() | {"images": [7]},
    "an annotation is a list": content() | {"annotations": [[]]},
    "a category is text": content() | {"categories": ["cup"]},
    **{f"image without {key}": _without("images", key) for key in ("id", "file_name", "height", "width")},
    **{f"annotation without {key}": _without("annotations", key) for key in ("id", "image_id", "category_id", "bbox")},
    **{f"category without {key}": _without("categories", key) for key in ("id", "name")},
    **{f"{key} twice": _twice(key) for key in ("images", "annotations", "categories")},
    "category of two lines": content() | {"categories": [{"id": 3, "name": "a\nb"}]},
    "category of half a character": content() | {"categories": [{"id": 3, "name": "\udfff"}]},
    "unknown image": content(image_id=6),
    "unknown category": content(category_id=2),
    "id is text": content(id="9"),
    "id is true": content(id=True),
    "id is a fraction": content(id=9.5),
    "id is huge": content(id=10**30),
    "absolute path": _image(file_name="/etc/passwd"),
    "path above": _image(file_name="x/../../a.png"),
    "path of a folder": _image(file_name="x/"),
    "path with a zero": _image(file_name="a\0.png"),
    "path with half a character": _image(file_name="\ud800.png"),
    "empty path": _image(file_name=""),
    "path is a list": _image(file_name=["a.png"]),
    "width 0": _image(width=0),
    "height below 0": _image(height=-12),
    "width is a fraction": _image(width=16.0),
    "width is huge": _image(width=2**40),
    "too many pixels": _image(width=60_000, height=60_000),
    "box of three": content(bbox=[1, 2, 3]),
    "box of text": content(bbox=[1, 2, "3", 4]),
    "box is nan": _TEXT.replace("6.75", "NaN"),
    "box is infinite": _TEXT.replace("6.75", "1e999"),
    "box is minus infinity": _TEXT.replace("6.75", "-Infinity"),
    "crowd is 2": content(iscrowd=2),
    "crowd is text": content(iscrowd="no"),
    "segmentation is text": content("polygon"),
    "polygon is flat": content([1, 2, 3, 4, 5, 6]),
    "odd polygon": content([[1, 2, 3, 4, 5, 6, 7]]),
    "polygon of text": content([[1, 2, 3, 4, 5, "6"]]),
    "polygon of lists": content([[1, 2, 3, 4, 5, [6]]]),
    "polygon is nan": _TEXT.replace("9.25", "NaN"),
    "polygon is infinite": _TEXT.replace("9.25", "1e999"),
    "polygon is beyond float32": _TEXT.replace("9.25", "1e60"),
    "polygon of huge integers": content([[1, 2, 3, 4, 5, 10**400]]),
    "endless outline": content([[x for _ in range(20_000) for x in (0, 0, 16, 12, 0, 12)]]),
    "runs of another image": _runs([12 * 17], (12, 17)),
    "runs turned": _runs([12 * 16], (16, 12)),
    "runs too short": _runs([3, 4]),
    "runs too long": _runs([12 * 16, 12 * 16]),
    "runs below 0": _runs([-8, 12 * 16 + 8]),
    "runs wrap around": _runs([2**63 - 1, 2**63 - 1, 12 * 16 + 2]),
    "runs of fractions": _runs([100.0, 92.0]),
    "runs of nothing": _runs(None),
    "runs without size": content({"counts": [192]}),
    "runs of a huge size": _runs([2**40], (2**20, 2**20)),
    "runs of one size": _runs([192], [192]),
    "compressed runs too short": _runs("05"),
    "compressed runs of other characters": _runs("\x7f\x01"),
    "compressed runs of other alphabets": _runs("été"),
    "compressed runs without end": _runs("o"),
    "compressed runs of a huge number": _runs("o" * 50 + "0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_line_that_names_it(root: Path, name: str) -> None:
    path = write(root, BROKEN[name])
    with pytest.raises(DataError) as error:
        coco(root)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_a_damaged_file_is_an_error_or_loads(root: Path) -> None:
    """Random changes of bytes never raise anything else."""
    rng, text = random.Random(0), json.dumps(content()).encode() + b" "
    messages = []
    for _ in range(400):
        damaged = bytearray(text)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.choice(b'0123456789.-e[]{}",: nulltrue\\\xff')
        path = write(root, bytes(damaged))
        try:
            read_instances(path)
        except DataError as error:
            messages.append(str(error))
    assert 20 < len(messages) < 380
    assert all(str(path) in message and "\n" not in message for message in messages)


def test_pieces_of_a_file_are_joined(root: Path, monkeypatch: pytest.MonkeyPatch, scenes: Path) -> None:
    path = scenes / "annotations/instances_train2017.json"
    whole = read_instances(path)
    monkeypatch.setattr("dmjd.safe_load._JSON_PIECE", 7)
    pieces = read_instances(path)
    for each in ("image_ids", "boxes", "labels", "first", "sizes"):
        np.testing.assert_array_equal(getattr(pieces, each), getattr(whole, each))
    np.testing.assert_array_equal(pieces.masks.points, whole.masks.points)
    assert pieces.names == whole.names
    assert pieces.classes == whole.classes
