"""Large-scale jitter: image, boxes and masks stay aligned, and a sample does not depend on its batch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from dmjd.config import DetectDataConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, training_batches, training_transform
from dmjd.data.dataset import InMemory, Pixels
from dmjd.data.dense import detection
from dmjd.data.dense.coco import CocoImage, Objects
from dmjd.data.dense.detection import GREY, LargeScaleJitter
from dmjd.data.dense.masks import Masks, MaskStore
from dmjd.data.loader import make_loader
from dmjd.errors import ConfigError
from dmjd.ops.philox import Domain, keyed_uniform, make_key

KEY = make_key(5, 2)
IDS = torch.arange(40)

Floats = npt.NDArray[np.float64]


def rectangles(size: tuple[int, int], boxes: list[list[float]], as_runs: bool = False) -> CocoImage:
    """An image with x in red, y in green and 255 in blue inside the boxes, which are polygons or run lengths."""
    height, width = size
    y, x = np.mgrid[:height, :width] + 0.5
    inside = np.zeros(size, dtype=bool)
    points, runs, run_ends = [], [], [0]
    for x1, y1, x2, y2 in boxes:
        mask = (x > x1) & (x < x2) & (y > y1) & (y < y2)
        inside |= mask
        if as_runs:
            flat = mask.T.ravel().astype(int)
            changes = np.flatnonzero(np.diff(flat, prepend=0))
            runs += np.diff([0, *changes, flat.size]).tolist()
        run_ends.append(len(runs))
        points += [x1, y1, x2, y1, x2, y2, x1, y2]
    pixels = np.stack([x * 255 / width, y * 255 / height, inside * 255], -1).astype(np.uint8)
    polygons = np.arange(len(boxes) + 1) * (not as_runs)
    store = MaskStore(
        np.array(points, dtype=np.float32),
        8 * np.arange(len(boxes) + 1),
        np.stack([polygons[:-1], polygons[1:]], 1),
        np.array(runs, dtype=np.uint32),
        np.stack([run_ends[:-1], run_ends[1:]], 1),
    )
    corners = np.array(boxes, dtype=np.float32).reshape(-1, 4)
    objects = Objects(corners, np.arange(len(boxes)), Masks(store, range(len(boxes)), size))
    return CocoImage(InMemory(pixels), objects)


def cut(jitter: LargeScaleJitter, row: int, image: CocoImage) -> tuple[Pixels, Floats, list[int], Pixels]:
    """Image, boxes, labels and unpacked masks of sample ``IDS[row]``."""
    view, boxes, labels, masks = jitter.draw(IDS, KEY).cut(row, image)
    return (
        view.numpy(),
        boxes.double().numpy(),
        labels.tolist(),
        np.unpackbits(masks.numpy(), axis=2, count=jitter.size[1]),
    )


def geometry(jitter: LargeScaleJitter, row: int, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """detectron2's ResizeScale and FixedSizeCrop, from the draws: size of the resized image, offset of the crop."""
    random_scale, random_place = keyed_uniform(IDS, 2, key=KEY, domain=Domain.CROP)[row].tolist()
    scale = jitter.scale[0] + (jitter.scale[1] - jitter.scale[0]) * random_scale
    target = np.multiply(jitter.size, scale)
    output_scale = np.minimum(target[0] / size[0], target[1] / size[1])
    output = np.round(np.multiply(size, output_scale)).astype(int)
    offset = np.round(np.maximum(output - jitter.size, 0) * random_place).astype(int)
    return tuple(output.tolist()), tuple(offset.tolist())


@pytest.mark.parametrize("as_runs", [False, True])
@pytest.mark.parametrize("size", [(97, 131), (160, 75)])
def test_image_boxes_and_masks_are_aligned(size: tuple[int, int], as_runs: bool) -> None:
    """The blue of the image is the mask, and red and green say where a pixel came from."""
    jitter = LargeScaleJitter((101, 126))
    boxes = [[10.0, 20.0, 40.0, 60.0], [50.0, 5.0, 70.0, 90.0]]
    flips = keyed_uniform(IDS, 1, key=KEY, domain=Domain.FLIP)[:, 0] < 0.5
    assert 8 < int(flips.sum()) < 32
    for row in range(len(IDS)):
        image = rectangles(size, boxes, as_runs)
        pixels, found, labels, masks = cut(jitter, row, image)
        (height, width), (top, left) = geometry(jitter, row, size)
        h, w = min(height, jitter.size[0]), min(width, jitter.size[1])
        assert (pixels[h:] == GREY).all(), "padding at the bottom"
        assert (pixels[:, w:] == GREY).all(), "and the right"
        view = pixels[:h, :w].astype(float)
        if flips[row]:
            view = view[:, ::-1]
        # Where the pixels came from, in the image; Pillow's rule of centres.
        step = max(1.0, size[0] / height)
        x = (np.arange(w) + left + 0.5) * size[1] / width
        y = (np.arange(h) + top + 0.5) * size[0] / height
        away_from_border = (x > step) & (x < size[1] - step)
        error = np.abs(view[..., 0] - x * 255 / size[1])[:, away_from_border]
        assert error.size == 0 or error.max() < 3
        away_from_border = (y > step) & (y < size[0] - step)
        error = np.abs(view[..., 1] - (y * 255 / size[0])[:, None])[away_from_border]
        assert error.size == 0 or error.max() < 3
        # Masks are where the image is blue, apart from pixels at their edges.
        blue, mask = pixels[..., 2] > 127, masks.any(0) if len(masks) else np.zeros(jitter.size, dtype=bool)
        blue[h:], blue[:, w:] = False, False
        wrong = (blue != mask).sum()
        edges = sum(2 * sum(box[2:] - box[:2]) for box in found)
        assert wrong <= edges / 2 + 8
        # Boxes: of the image, moved, mirrored and clipped.
        for box, label, own in zip(found, labels, masks, strict=True):
            truth = np.array(boxes[label]) * ([width / size[1], height / size[0]] * 2) - [left, top] * 2
            truth = truth.clip(0, [w, h] * 2)
            if flips[row]:
                truth[[0, 2]] = w - truth[[2, 0]]
            np.testing.assert_allclose(box, truth, atol=1.01)
            rows, columns = np.flatnonzero(own.any(1)), np.flatnonzero(own.any(0))
            tight = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            np.testing.assert_allclose(box, tight, atol=max(1.01, width / size[1]))
            assert not own[h:].any()
            assert not own[:, w:].any()
        for label in set(range(2)) - set(labels):  # left out: outside, or too small
            truth = np.array(boxes[label]) * ([width / size[1], height / size[0]] * 2) - [left, top] * 2
            truth = truth.clip(0, [w, h] * 2)
            assert min(truth[2:] - truth[:2]) < 2


def test_uncut_boxes_keep_fractions_of_pixels_and_cut_ones_are_tight() -> None:
    jitter = LargeScaleJitter((64, 64), scale=(2.0, 2.0), flip=False)
    triangle = np.array([0.0, 0.0, 40.0, 0.0, 0.0, 40.0], dtype=np.float32)
    store = MaskStore(triangle, np.array([0, 6]), np.array([[0, 1]]), np.zeros(0, np.uint32), np.array([[0, 0]]))
    box = np.array([[0.0, 0.0, 40.0, 40.0]], dtype=np.float32)
    seen = set()
    for row in range(len(IDS)):
        objects = Objects(box, np.array([0]), Masks(store, range(1), (64, 64)))
        image = CocoImage(InMemory(np.zeros((64, 64, 3), dtype=np.uint8)), objects)
        _, (top, left) = geometry(jitter, row, (64, 64))
        _, found, _, masks = cut(jitter, row, image)
        # The triangle below the line x + y = 80.0 of the image of 128 pixels.
        right, bottom = min(64.0, 80.0 - top - left), min(64.0, 80.0 - top - left)
        seen.add(len(found))
        if right < 0.5:
            assert not len(found)
        elif len(found):
            np.testing.assert_allclose(found[0], [0, 0, right, bottom], atol=1.01)
            assert masks[0].sum() == pytest.approx(
                sum(max(0.0, min(64.0, 79.5 - top - left - y)) for y in range(64)), rel=0.1, abs=8
            )
    assert seen == {0, 1}
    smaller = LargeScaleJitter((64, 64), scale=(0.75, 0.75), flip=False)
    np.testing.assert_allclose(cut(smaller, 0, image)[1], box * 0.75)


def test_objects_below_one_pixel_and_outside_are_left_out() -> None:
    boxes = [[0.0, 0.0, 80.0, 80.0], [10.0, 10.0, 11.5, 40.0], [20.0, 20.0, 23.0, 23.0]]
    _, found, labels, _ = cut(LargeScaleJitter((40, 40), (1.0, 1.0), flip=False), 0, rectangles((80, 80), boxes))
    assert labels == [0, 2], "the second is 0.75 pixels wide"
    np.testing.assert_allclose(found, np.array([[0, 0, 40, 40], [10, 10, 11.5, 11.5]]))
    jitter = LargeScaleJitter((40, 40), (2.0, 2.0), flip=False)
    corner, kept = rectangles((40, 40), [[0.0, 0.0, 4.0, 4.0]]), set()
    for row in range(len(IDS)):
        top = geometry(jitter, row, (40, 40))[1][0]
        kept.add(bool(cut(jitter, row, corner)[2]) == (top <= 7))
    assert kept == {True}


def test_pixels_are_those_of_pillows_bilinear_filter() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    nothing = rectangles((90, 120), []).objects()
    for scale in (0.3, 0.9, 1.7):
        jitter = LargeScaleJitter((100, 100), (scale, scale), flip=False)
        view = cut(jitter, 3, CocoImage(InMemory(pixels), nothing))[0]
        (height, width), (top, left) = geometry(jitter, 3, (90, 120))
        truth = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))
        truth = truth[top : top + 100, left : left + 100]
        assert np.abs(view[: len(truth), : truth.shape[1]].astype(int) - truth).max() <= 1


def test_factors_fill_their_range() -> None:
    """The median of 2,000 factors, and no two samples or epochs with equal draws."""
    jitter, ids = LargeScaleJitter((50, 50)), torch.arange(2000)
    draws = [jitter.draw(ids, make_key(0, epoch))._geometry for epoch in range(2)]
    factors = np.array(draws)[..., 0]
    assert abs(np.median(factors) - 0.5) < 0.03
    assert factors.min() < 0.01
    assert factors.max() > 0.99
    assert len(np.unique(factors)) == 4000


def rows(batch: Batch) -> list[tuple[torch.Tensor, ...]]:
    """Each sample of a batch without the padding of its objects."""
    found: list[tuple[torch.Tensor, ...]] = []
    for row in range(len(batch.images)):
        count = int((batch.labels[row] >= 0).sum())
        assert (batch.labels[row, count:] == -1).all()
        assert not batch.boxes[row, count:].any()
        assert not batch.masks[row, count:].any()
        tensors = batch.labels[row, :count], batch.boxes[row, :count], batch.masks[row, :count]
        found.append((batch.images[row], batch.sample_ids[row], *tensors))
    return found


def equal(first: list[tuple[torch.Tensor, ...]], second: list[tuple[torch.Tensor, ...]]) -> bool:
    return all(a.equal(b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def test_batches_do_not_depend_on_ranks_workers_and_batch_size(scenes: Path) -> None:
    config = DetectDataConfig(root=str(scenes), image_size=[64, 72])
    dataset = build_dataset(config, "train")
    whole = training_batches(config, dataset, 4, seed=1)
    assert whole.steps_per_epoch == 2
    for step in (0, 3):
        halves = [training_batches(config, dataset, 4, 1, rank, 2)[step] for rank in range(2)]
        assert equal(rows(whole[step]), rows(halves[0]) + rows(halves[1]))
    transform = training_transform(config)
    batch = whole[3]
    alone = transform.draw(batch.sample_ids[2:3], make_key(1, 1))
    view = alone.cut(0, dataset.open(int(batch.sample_ids[2])))
    assert equal(rows(batch)[2:3], rows(transform.batch([view], batch.sample_ids[2:3], [-1])))
    loaded = list(make_loader(whole, 2, 4, workers=2, pin_memory=False))
    assert equal(rows(loaded[1]), rows(batch))
    assert equal(rows(loaded[0]), rows(whole[2]))
    assert sum(len(row[2]) for row in rows(batch)) > 3


def test_a_substitute_brings_its_own_objects(scenes: Path, tmp_path: Path) -> None:
    shutil.copytree(scenes, tmp_path / "scenes")
    config = DetectDataConfig(root=str(tmp_path / "scenes"), image_size=[64, 72], check="none")
    dataset = build_dataset(config, "train")
    batches = training_batches(config, dataset, 4, seed=1)
    bad = int(batches[0].sample_ids[1])
    Path(dataset.name(bad)).write_bytes(Path(dataset.name(bad)).read_bytes()[:900])
    batch, substitutions = batches.load(0)
    assert [each.sample_id for each in substitutions] == [bad]
    names = [dataset.name(index) for index in range(len(dataset))]
    draws = batches.crop.draw(batch.sample_ids, make_key(1, 0))
    view = draws.cut(1, dataset.open(names.index(substitutions[0].substitute)))
    assert equal(rows(batch)[1:2], rows(batches.crop.batch([view], batch.sample_ids[1:2], [-1])))


def test_batches_have_places_for_objects(scenes: Path) -> None:
    jitter = LargeScaleJitter((32, 41))
    images = [rectangles((40, 50), []), rectangles((40, 50), [[0.0, 0.0, 50.0, 40.0]])]
    views = [jitter.draw(IDS, KEY).cut(row, image) for row, image in enumerate(images)]
    batch = jitter.batch(views, IDS[:2], [-1, -1])
    assert batch.labels.tolist() == [[-1], [0]]
    nothing = jitter.batch(views[:1], IDS[:1], [-1])
    assert nothing.labels.tolist() == [[-1]]
    assert nothing.boxes.tolist() == [[[0.0] * 4]]
    assert not nothing.masks.any()
    empty = jitter.empty(2, 3)
    for name in Batch._fields:
        one, other = getattr(batch, name), getattr(empty, name)
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
    assert (empty.labels == -1).all()
    assert not empty.images.any()
    assert not empty.sample_ids.any()
    # The bound holds up to 100 objects.
    many = rectangles((40, 50), [[0.0, 0.0, 50.0, 40.0]] * 100)
    full = jitter.batch([jitter.draw(IDS, KEY).cut(0, many)] * 3, IDS[:3], [-1] * 3)
    assert full.labels.shape == (3, 100)
    assert sum(field.nbytes for field in full) == jitter.nbytes(3, 3)


def test_testing_resizes_and_pads(scenes: Path) -> None:
    dataset = build_dataset(DetectDataConfig(root=str(scenes)), "test")
    for index in range(len(dataset)):
        opened = dataset.open(index)
        view, (height, width) = detection.test_image(opened, (120, 100))
        assert view.shape == (120, 100, 3)
        assert view.dtype == torch.uint8
        scale = min(120 / opened.size[0], 100 / opened.size[1])
        assert (height, width) == tuple(round(side * scale) for side in opened.size)
        assert (view[height:] == GREY).all()
        assert (view[:, width:] == GREY).all()
        truth = np.asarray(Image.fromarray(dataset.image(index)).resize((width, height), Image.Resampling.BILINEAR))
        assert np.abs(view[:height, :width].numpy().astype(int) - truth).max() <= 1
    smaller, (height, width) = detection.test_image(dataset.open(0), (20, 24))  # decoded at half size
    truth = np.asarray(Image.fromarray(dataset.image(0)).resize((width, height), Image.Resampling.BILINEAR))
    assert np.abs(smaller[:height, :width].numpy().astype(int) - truth).mean() < 3
    exact, size = detection.test_image(InMemory(np.full((7, 9, 1), 5, np.uint8)), (7, 9))
    assert size == (7, 9)
    assert (exact == 5).all()
    assert detection.test_image(InMemory(np.zeros((1, 4000, 1), np.uint8)), (8, 8))[1] == (1, 8)


def test_reversed_range_of_factors_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"data.scale must be least <= greatest, got \[2.0, 0.5\]"):
        training_transform(DetectDataConfig(scale=[2.0, 0.5]))
    assert LargeScaleJitter.of(DetectDataConfig()) == LargeScaleJitter((1024, 1024))


def test_without_flip_no_image_is_mirrored() -> None:
    jitter = LargeScaleJitter.of(DetectDataConfig(flip=False, image_size=[64, 64], scale=[1.0, 1.0]))
    image = rectangles((64, 64), [])
    for row in range(8):
        red = cut(jitter, row, image)[0][0, :, 0]
        assert red[0] < red[-1]
