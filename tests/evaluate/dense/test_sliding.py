"""Prediction of maps by windows and whole images, against plain loops; evaluation over ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.config import SegmentDataConfig, SegmentTestConfig
from dmjd.data.dataset import InMemory
from dmjd.data.dense.segmentation import resized_size
from dmjd.data.dense.segmentation import test_image as image_of_test
from dmjd.data.waiting import interrupted_by
from dmjd.errors import BadImage, StopRequested, UserError
from dmjd.evaluate.confusion import ConfusionMatrix, SegmentationScores
from dmjd.evaluate.segmentation import (
    MapTesting,
    _resized_rows,
    evaluate_segmentation,
    predict_map,
)
from dmjd.parallel.world import alone
from tests.evaluate.worlds import CPU, in_worlds

CLASSES = 5
SIZES = ((40, 70), (33, 32), (90, 31), (7, 5), (32, 32), (64, 129))


class Opened(InMemory):
    def __init__(self, pixels: Any, classes: Any) -> None:
        super().__init__(pixels)
        self._classes = classes

    def classes(self) -> Any:
        return self._classes


class Maps:
    """Images of random textures with random maps, in the interface of Ade20k."""

    num_classes, channels = CLASSES, 3

    def __init__(self, sizes: tuple[tuple[int, int], ...] = SIZES, bad: int | None = None) -> None:
        rng = np.random.default_rng(0)
        self.pixels = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
        self.maps = [rng.choice([0, 1, 2, 3, 255], size).astype(np.uint8) for size in sizes]
        self.opened = list[int]()
        self._bad = bad

    def __len__(self) -> int:
        return len(self.pixels)

    def size(self, index: int) -> tuple[int, int]:
        height, width = self.maps[index].shape
        return height, width

    def open(self, index: int) -> Opened:
        if index == self._bad:
            raise BadImage("bad.png", "undecodable", "cannot be decoded")
        self.opened.append(index)
        return Opened(self.pixels[index], self.maps[index])

    def image(self, index: int) -> Any:
        return self.pixels[index]


def pipeline(mode: str = "slide", **keys: Any) -> MapTesting:
    data = SegmentDataConfig(image_size=[24, 32], resize=[32, 96])
    test = SegmentTestConfig(mode=mode, stride=[16, 20], **keys)
    return MapTesting.of(test, data, 16)


class PerPixel:
    """Logits that depend on the colour of the pixel alone, and are integers, so that means of windows are exact."""

    def __init__(self) -> None:
        self.shapes = list[tuple[int, ...]]()
        self.weight = torch.randint(-3, 4, (CLASSES, 3), generator=torch.Generator().manual_seed(0)).float()

    def __call__(self, images: Tensor) -> Tensor:
        self.shapes.append(tuple(images.shape))
        return torch.einsum("kc,bhwc->bkhw", self.weight, images.float())


def neighbourhood(images: Tensor) -> Tensor:
    """Logits that depend on the surroundings of a pixel, the border of the image and left and right."""
    weight = torch.randn(CLASSES, 3, 5, 5, generator=torch.Generator().manual_seed(1)).to(images.device)
    return F.conv2d(images.float().permute(0, 3, 1, 2) / 128 - 1, weight - weight.mean((1, 2, 3), True), padding=2)


def plain(logits: Any, pixels: Any, test: MapTesting, size: tuple[int, int]) -> Tensor:
    """mmsegmentation's slide_inference and aug_test, written out."""
    total = torch.zeros(())
    for resize in test.resizes:
        image = torch.from_numpy(image_of_test(InMemory(pixels), resize))
        for mirrored in (False, True) if test.flip else (False,):
            view = image.flip(1) if mirrored else image
            h_img, w_img = view.shape[:2]
            (h_crop, w_crop), (h_stride, w_stride) = test.window, test.stride
            padded = test.fill.repeat(max(h_img, h_crop), max(w_img, w_crop), 1)
            padded[:h_img, :w_img] = view
            h_img, w_img = padded.shape[:2]
            sums, counts = torch.zeros(CLASSES, h_img, w_img), torch.zeros(h_img, w_img)
            h_grids = max(h_img - h_crop + h_stride - 1, 0) // h_stride + 1
            w_grids = max(w_img - w_crop + w_stride - 1, 0) // w_stride + 1
            for h_idx in range(h_grids):
                for w_idx in range(w_grids):
                    y2, x2 = min(h_idx * h_stride + h_crop, h_img), min(w_idx * w_stride + w_crop, w_img)
                    y1, x1 = max(y2 - h_crop, 0), max(x2 - w_crop, 0)
                    sums[:, y1:y2, x1:x2] += logits(padded[None, y1:y2, x1:x2])[0]
                    counts[y1:y2, x1:x2] += 1
            mean = (sums / counts)[:, : view.shape[0], : view.shape[1]]
            found = F.interpolate(mean[None], size, mode="bilinear", align_corners=False).softmax(1)[0]
            total = total + (found.flip(-1) if mirrored else found)
    return total


def agrees(found: Tensor, probabilities: Tensor) -> bool:
    """Whether each class is the most probable one, up to rounding."""
    chosen = probabilities.gather(0, found.long()[None])[0]
    return bool((chosen >= probabilities.amax(0) - 1e-5).all())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("keys", [{}, {"flip": True, "scales": [0.5, 1.0, 1.75]}], ids=["plain", "flip and scales"])
def test_windows_equal_mmsegmentations_for_any_size(keys: dict[str, Any], batch: int) -> None:
    data, test = Maps(), pipeline(**keys)
    for number in range(len(data)):
        found = predict_map(neighbourhood, data.open(number), test, batch, CPU)
        assert found.dtype == torch.uint8
        assert found.shape == data.size(number)
        assert len(found.unique()) > 3, "the model distinguishes the classes"
        assert agrees(found, plain(neighbourhood, data.pixels[number], test, data.size(number))), number


def test_windows_of_a_model_of_single_pixels_equal_the_whole_image() -> None:
    data, whole = Maps(), PerPixel()
    for number in range(len(data)):
        parts = predict_map(PerPixel(), data.open(number), pipeline(), 4, CPU)
        assert parts.equal(predict_map(whole, data.open(number), pipeline("whole"), 4, CPU))
    assert all(shape[1] % 16 == 0 == shape[2] % 16 for shape in whole.shapes)
    assert {shape[0] for shape in whole.shapes} == {1}
    tall, wide = resized_size(data.size(1), (32, 96))
    assert whole.shapes[1][1:3] == (-(-tall // 16) * 16, -(-wide // 16) * 16), "padded to the next multiple only"


def test_padding_has_the_mean_colour_and_windows_end_at_the_border() -> None:
    test = pipeline()
    seen = list[Tensor]()

    def logits(images: Tensor) -> Tensor:
        seen.append(images)
        return torch.zeros(len(images), CLASSES, *images.shape[1:3])

    pixels = np.full((96, 20, 3), 7, np.uint8)
    predict_map(logits, Opened(pixels, None), test, 8, CPU)
    (windows,) = seen
    assert windows.shape == (8, 24, 32, 3), "batches have one size"
    assert test.places((96, 20)) == [(0, 0), (16, 0), (32, 0), (48, 0), (64, 0), (72, 0)]
    assert (windows[:6, :, :20] == 7).all()
    assert (windows[:6, :, 20:] == torch.tensor([124, 116, 104], dtype=torch.uint8)).all()
    assert (windows[6:] == torch.tensor([124, 116, 104], dtype=torch.uint8)).all()


def test_resize_in_parts_equals_that_at_once() -> None:
    values = torch.randn(3, 13, 17)
    for size in ((40, 50), (5, 6), (13, 17), (13, 60)):
        parts = [_resized_rows(values, start, min(start + 7, size[0]), size) for start in range(0, size[0], 7)]
        expected = F.interpolate(values[None], size, mode="bilinear", align_corners=False)[0]
        torch.testing.assert_close(torch.cat(parts, 1), expected)
    assert _resized_rows(values, 0, 13, (13, 17)).equal(values)


@pytest.mark.parametrize("mode", ["slide", "whole"])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_scores_of_any_number_of_processes_with_equally_many_calls(size: int, mode: str) -> None:
    data, test = Maps(), pipeline(mode, flip=True)
    models = [PerPixel() for _ in range(size)]
    sets = [Maps() for _ in range(size)]
    found = in_worlds(
        size,
        lambda w: evaluate_segmentation(models[w.rank], sets[w.rank], test, 3, 0, 1.0, w),
    )
    matrix = ConfusionMatrix(CLASSES, CPU)
    for number in range(len(data)):
        classes = predict_map(PerPixel(), data.open(number), test, 3, CPU)
        matrix.add(classes, torch.from_numpy(data.maps[number]))
    scores = matrix.scores()
    assert all(isinstance(each, tuple) for each in found), found
    assert [each for each, _ in found] == [scores] * size
    assert sorted(number for each in sets for number in each.opened) == list(range(len(data))), "each image once"
    assert len({len(model.shapes) for model in models}) == 1, "equally many calls on every rank"
    if mode == "slide":
        assert {shape for model in models for shape in model.shapes} == {(3, 24, 32, 3)}


def test_workers_and_examples() -> None:
    data, model = Maps(), PerPixel()
    world = alone(CPU)
    first = evaluate_segmentation(model, data, pipeline(), 3, 0, 1.0, world)  # type: ignore[arg-type]
    scores, kept = evaluate_segmentation(model, data, pipeline(), 3, 2, 1.0, world, examples=3)  # type: ignore[arg-type]
    assert scores == first[0]
    assert isinstance(scores, SegmentationScores)
    for number, example in zip((0, 2, 4), kept, strict=True):
        assert (example.image == data.pixels[number]).all()
        assert (example.truth == data.maps[number]).all()
        expected = predict_map(model, data.open(number), pipeline(), 3, CPU)
        assert (example.prediction == expected.numpy()).all()


@pytest.mark.gpu
def test_maps_of_a_gpu_are_those_of_the_cpu() -> None:
    data, device = Maps(), torch.device("cuda")
    for test in (pipeline(flip=True, scales=[0.5, 1.0]), pipeline("whole")):
        for number in range(len(data)):
            found = predict_map(neighbourhood, data.open(number), test, 3, device).cpu()
            expected = predict_map(neighbourhood, data.open(number), test, 3, CPU)
            assert (found == expected).float().mean() > 0.97, "but for ties within the precision of convolutions"
        on_gpu, _ = evaluate_segmentation(neighbourhood, data, test, 3, 0, 1.0, alone(device))  # type: ignore[arg-type]
        on_cpu, _ = evaluate_segmentation(neighbourhood, data, test, 3, 0, 1.0, alone(CPU))  # type: ignore[arg-type]
        assert on_gpu.miou == pytest.approx(on_cpu.miou, abs=1)


def test_a_bad_image_or_a_request_to_stop_at_one_rank_ends_all() -> None:
    ends = in_worlds(
        3,
        lambda w: evaluate_segmentation(PerPixel(), Maps(bad=5), pipeline(), 2, 0, 1.0, w),  # type: ignore[arg-type]
    )
    assert [type(end) for end in ends] == [UserError, UserError, BadImage]
    stopping = threading.Event()

    class Stopped(PerPixel):
        def __call__(self, images: Tensor) -> Tensor:
            if len(self.shapes) == 2:
                stopping.set()
            return super().__call__(images)

    models = [PerPixel(), Stopped()]
    many = ((60, 60),) * 12
    with interrupted_by(stopping.is_set):
        ends = in_worlds(
            2,
            lambda w: evaluate_segmentation(models[w.rank], Maps(many), pipeline(), 1, 0, 1.0, w),  # type: ignore[arg-type]
        )
    assert [type(end) for end in ends] == [StopRequested, StopRequested]
    assert len(models[0].shapes) == len(models[1].shapes) < 10
