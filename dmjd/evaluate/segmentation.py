"""Semantic segmentation: maps of classes by windows or whole images, and their mean IoU over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.config import SegmentDataConfig, SegmentTestConfig
from dmjd.config.dense import window_stride
from dmjd.data.batch import Batch
from dmjd.data.dataset import ImageDataset, OpenImage, Pixels, Size, evenly
from dmjd.data.dense.ade20k import Ade20k
from dmjd.data.dense.segmentation import resized_size, test_image
from dmjd.data.loader import BatchLoader
from dmjd.data.substitution import Substitution
from dmjd.data.waiting import Limit
from dmjd.data.workers import check_shared_memory
from dmjd.evaluate.confusion import ConfusionMatrix, SegmentationScores
from dmjd.evaluate.overlays import EXAMPLES, predictions_picture, write_validation
from dmjd.evaluate.share import part, together
from dmjd.evaluate.validation import AVERAGE, TRAINED, Validated, class_names
from dmjd.parallel.world import World, alone
from dmjd.progress import Progress
from dmjd.runs.paths import RunPaths

if TYPE_CHECKING:
    from dmjd.config import SegmentConfig

_VALUES = 1 << 24
"""Logits that are resized at a time: 64 MiB of float32."""

Logits = Callable[[Tensor], Tensor]
"""uint8 ``[B, H, W, C]`` on the device -> float32 ``[B, classes, H, W]``."""


@dataclass(frozen=True)
class MapTesting:
    """How a map is predicted: mmsegmentation's test pipeline.

    An image is resized to each of ``resizes`` (shorter and longest side), mirrored too with ``flip``. Each of these
    views is cut into windows of ``window`` pixels in steps of ``stride``, the last ones aligned to the border, and the
    logits of overlapping windows are averaged (slide), or taken at once (whole). Images that are smaller than a window,
    and whole ones up to a multiple of ``multiple``, are padded with ``fill`` at the bottom and the right. Logits are
    resized bilinearly to the size of the original image. With several views their softmax is averaged.
    """

    slide: bool
    window: Size
    stride: Size
    resizes: Sequence[tuple[int, int]]
    flip: bool
    multiple: int
    fill: Tensor

    @classmethod
    def of(cls, test: SegmentTestConfig, data: SegmentDataConfig, multiple: int) -> MapTesting:
        """MapTesting of a model whose images have sides that are multiples of ``multiple``."""
        short, longest = data.resize
        stride = window_stride(test.stride, data.image_size)
        return cls(
            slide=test.mode == "slide",
            window=(data.image_size[0], data.image_size[1]),
            stride=(stride[0], stride[1]),
            resizes=[(int(short * scale), int(longest * scale)) for scale in test.scales],
            flip=test.flip,
            multiple=multiple,
            fill=(255 * torch.tensor(data.mean)).round().clamp(0, 255).to(torch.uint8),
        )

    def calls(self, size: Size) -> int:
        """Windows of an image of ``size`` in all views, or in whole mode the number of views."""
        each = sum(len(self.places(resized_size(size, resize))) for resize in self.resizes)
        return each * (1 + self.flip)

    def places(self, size: Size) -> list[tuple[int, int]]:
        """Top and left of the windows of a view of ``size``."""
        if not self.slide:
            return [(0, 0)]
        tops, lefts = map(_starts, size, self.window, self.stride)
        return [(top, left) for top in tops for left in lefts]

    def window_of(self, size: Size) -> Size:
        """Size of the model's images for a view of ``size``."""
        if self.slide:
            return self.window
        height, width = (-(-side // self.multiple) * self.multiple for side in size)
        return height, width

    def padded(self, crop: Tensor, window: Size) -> Tensor:
        """``crop``, uint8 ``[h, w, C]``, at the top left of a window."""
        image = self.fill.expand(*window, -1).clone()
        image[: crop.shape[0], : crop.shape[1]] = crop
        return image


def _starts(side: int, window: int, stride: int) -> list[int]:
    """First pixels of the windows along one axis."""
    count = max(side - window + stride - 1, 0) // stride + 1
    return [max(min(number * stride, side - window), 0) for number in range(count)]


@dataclass
class _View:
    """A resized image, perhaps mirrored, and the sums of the logits of its windows."""

    size: Size
    mirrored: bool
    sums: Tensor = field(default_factory=lambda: torch.empty(0))
    counts: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, logits: Tensor, top: int, left: int) -> None:
        """Add the logits ``[classes, h, w]`` of the window at (top, left); what lies beyond the view was padding."""
        if not self.sums.numel():
            self.sums = logits.new_zeros(logits.shape[0], *self.size)
            self.counts = logits.new_zeros(self.size)
        height, width = min(logits.shape[1], self.size[0] - top), min(logits.shape[2], self.size[1] - left)
        rows, columns = slice(top, top + height), slice(left, left + width)
        self.sums[:, rows, columns] += logits[:, :height, :width]
        self.counts[rows, columns] += 1

    def logits(self) -> Tensor:
        mean = self.sums / self.counts
        return mean.flip(-1) if self.mirrored else mean


@dataclass
class _Image:
    """An image of which some windows are not predicted yet."""

    number: int
    size: Size
    truth: Tensor
    views: list[_View]
    left: int


def validate_segmentation(
    step: Validated,
    dataset: ImageDataset,
    config: SegmentConfig,
    world: World,
    run: RunPaths | None = None,
    at: int = 0,
) -> dict[str, float | None]:
    """Scores of the current weights, and of their average if there is one, as columns of log.jsonl. Collective.

    Args:
        dataset: the validation images.
        run: gets a picture of predictions and the scores of each class (:mod:`dmjd.evaluate.overlays`), of optimizer
            step ``at``; on rank 0.

    Returns:
        ``val_miou``, ``val_aacc``, ``val_macc``, and with ``ema_decay`` ``val_ema_miou`` etc. The same values on every
        rank.

    Raises:
        StopRequested: on every rank, if one is asked to stop meanwhile.
        DataError: on every rank, if an image cannot be read, or no pixel has a class.
    """
    assert isinstance(dataset, Ade20k)
    micro_batch = config.batch_size // (config.engine.grad_accum_steps * world.size)
    testing = MapTesting.of(config.test, config.data, config.backbone.patch_size)
    names = class_names(dataset)

    def scores(prefix: str, main: bool) -> dict[str, float | None]:
        shown = EXAMPLES if run is not None and main and world.is_main else 0
        found, examples = evaluate_segmentation(
            step.logits, dataset, testing, micro_batch, config.workers, config.data.timeout, world, shown
        )
        if shown and run is not None:
            images, truths, shown_maps = ([each[part] for each in examples] for part in range(3))
            picture = predictions_picture(images, truths, shown_maps, names)
            write_validation(run, at, picture, names, {"iou": found.iou, "accuracy": found.accuracy})
        return {f"{prefix}{name}": getattr(found, name) for name in ("miou", "aacc", "macc")}

    trained = scores(TRAINED, not step.averages)
    if not step.averages:
        return trained
    with step.with_average():
        return trained | scores(AVERAGE, True)


class Example(NamedTuple):
    """image: uint8 ``[H, W, C]``; truth, prediction: classes, uint8 ``[H, W]``."""

    image: Pixels
    truth: Pixels
    prediction: Pixels


def evaluate_segmentation(
    logits: Logits,
    dataset: Ade20k,
    testing: MapTesting,
    batch_size: int,
    workers: int,
    timeout: float,
    world: World,
    examples: int = 0,
) -> tuple[SegmentationScores, list[Example]]:
    """Scores of ``logits`` on ``dataset``, each image once. Collective over ``world``.

    Every rank calls ``logits`` equally often, as sharded engines need.

    Args:
        batch_size: windows per forward pass and process.
        workers: loader workers per process, at most one per image. timeout: minutes, as ``data.timeout``.
        examples: this many images of this rank are returned with their predictions.
    """
    own = part(len(dataset), world)
    scaled = ScaledImages(dataset, own, testing.resizes)
    workers = min(workers, len(own)) if len(own) > 1 else 0
    check_shared_memory(max((scaled.nbytes(number) for number in own), default=0), workers)
    windows = sum(testing.calls(dataset.size(number)) for number in own)
    calls = max(world.gather(-(-windows // (batch_size if testing.slide else 1))))
    loader = BatchLoader(scaled, 0, len(scaled), workers, pin_memory=False, limit=Limit(timeout, finishes=False))
    confusion = ConfusionMatrix(dataset.num_classes, world.device)
    chosen, kept = {own[place] for place in evenly(len(own), examples)}, list[Example]()
    with Progress("validation batch", calls) as bar, closing(iter(loader)) as batches:

        def shown(images: Tensor) -> Tensor:
            found = logits(images)
            bar.advance()
            return found

        for number, classes, truth in predictions(shown, batches, testing, batch_size, calls, world):
            confusion.add(classes, truth)
            if number in chosen:
                kept.append(Example(dataset.image(number), truth.cpu().numpy(), classes.cpu().numpy()))
    return confusion.scores(world), kept


class Predicted(NamedTuple):
    """number: of the image. classes, truth: uint8 ``[H, W]`` in its original size, on the device."""

    number: int
    classes: Tensor
    truth: Tensor


class _Window(NamedTuple):
    pixels: Tensor
    top: int
    left: int
    view: _View
    image: _Image


def predictions(
    logits: Logits, scaled: Iterable[Batch], testing: MapTesting, batch_size: int, calls: int, world: World
) -> Iterator[Predicted]:
    """The classes of each image, in order. Collective over ``world``.

    Args:
        scaled: of each image one batch for each of ``testing.resizes``, from :class:`ScaledImages`.
        batch_size: windows per call; whole images are predicted one by one. In slide mode the shapes of all calls are
            equal, and a call may hold windows of several images.
        calls: of ``logits`` on every rank. Where the images of a rank end, it predicts the fill colour.

    Raises:
        StopRequested: on every rank, if one is asked to stop meanwhile.
        DataError: on every rank, if an image cannot be read.
    """
    windows = _windows(scaled, testing)
    batch_size = batch_size if testing.slide else 1
    blank = testing.padded(testing.fill.new_empty(0, 0, len(testing.fill)), testing.window)
    for _ in range(calls):
        taken = together(lambda: list(islice(windows, batch_size)), world)
        images = [window.pixels for window in taken]
        images += [blank] * (batch_size - len(images))
        found = logits(torch.stack(images).to(world.device, non_blocking=True))
        for window, values in zip(taken, found, strict=False):
            window.view.add(values, window.top, window.left)
            image = window.image
            image.left -= 1
            if not image.left:
                classes = _classes([view.logits() for view in image.views], image.size)
                yield Predicted(image.number, classes, image.truth.to(world.device))


def _windows(scaled: Iterable[Batch], testing: MapTesting) -> Iterator[_Window]:
    image: _Image | None = None
    for batch in scaled:
        pixels, number = batch.images[0], int(batch.sample_ids)
        if image is None or image.number != number:
            height, width = batch.labels.tolist()
            size = height, width
            image = _Image(number, size, torch.empty(0), [], testing.calls(size))
        if batch.maps.numel():
            image.truth = batch.maps[0]
        for mirrored in (False, True)[: 1 + testing.flip]:
            view = _View((pixels.shape[0], pixels.shape[1]), mirrored)
            image.views.append(view)
            window = testing.window_of(view.size)
            source = pixels.flip(1) if mirrored else pixels
            for top, left in testing.places(view.size):
                crop = source[top : top + window[0], left : left + window[1]]
                yield _Window(testing.padded(crop, window), top, left, view, image)


def _classes(views: Sequence[Tensor], size: Size) -> Tensor:
    """The class of each pixel, uint8 of ``size``, by the logits ``[classes, h, w]`` of one or several views."""
    rows = max(1, _VALUES // (views[0].shape[0] * size[1]))
    parts = []
    for start in range(0, size[0], rows):
        stop = min(start + rows, size[0])
        total = _resized_rows(views[0], start, stop, size)
        if len(views) > 1:
            total = total.softmax(0)
        for view in views[1:]:
            total += _resized_rows(view, start, stop, size).softmax(0)
        parts.append(total.argmax(0).to(torch.uint8))
    return torch.cat(parts)


def _resized_rows(values: Tensor, start: int, stop: int, size: Size) -> Tensor:
    """Rows ``start`` to ``stop`` of ``F.interpolate(values, size, mode="bilinear")``: memory of large images stays
    bounded."""
    rows = torch.arange(start, stop, device=values.device, dtype=torch.float64)
    at = ((rows + 0.5) * (values.shape[1] / size[0]) - 0.5).clamp(min=0)
    above = at.long()
    below = (above + 1).clamp(max=values.shape[1] - 1)
    weight = (at - above).to(values.dtype)[:, None]
    picked = values[:, above] * (1 - weight) + values[:, below] * weight
    resized = F.interpolate(picked[None], (stop - start, size[1]), mode="bilinear", align_corners=False)
    return resized[0]


class ScaledImages:
    """Batches by number for a loader: of each image one for each of ``resizes``.

    ``images`` uint8 ``[1, h, w, C]``, ``sample_ids`` the number of the image, ``labels`` its original height and width,
    ``maps`` uint8 ``[1, H, W]`` with the first of its batches.
    """

    def __init__(self, dataset: Ade20k, numbers: Sequence[int], resizes: Sequence[tuple[int, int]]) -> None:
        self._dataset, self._numbers, self._resizes = dataset, numbers, resizes

    def __len__(self) -> int:
        return len(self._numbers) * len(self._resizes)

    def nbytes(self, index: int) -> int:
        """Size in bytes of the largest batch of image ``index``."""
        (height, width), channels = self._dataset.size(index), self._dataset.channels
        sizes = (resized_size((height, width), resize) for resize in self._resizes)
        return height * width + max(tall * wide for tall, wide in sizes) * channels

    def load(self, number: int) -> tuple[Batch, Sequence[Substitution]]:
        place, scale = divmod(number, len(self._resizes))
        index = self._numbers[place]
        opened = self._dataset.open(index)
        maps = torch.empty(0, dtype=torch.uint8)
        if scale == 0:
            maps = torch.from_numpy(opened.classes())[None]
        return scaled_image(opened, self._resizes[scale], index)._replace(maps=maps), ()


def scaled_image(opened: OpenImage, resize: tuple[int, int], number: int = 0) -> Batch:
    """A batch of :class:`ScaledImages` without annotation."""
    pixels = torch.from_numpy(test_image(opened, resize))[None]
    return Batch(pixels, torch.tensor([number]), torch.tensor(opened.size))


def predict_map(
    logits: Logits, opened: OpenImage, testing: MapTesting, batch_size: int, device: torch.device
) -> Tensor:
    """The class of each pixel of one image, uint8 ``[H, W]`` in its original size, on the device."""
    scaled = (scaled_image(opened, resize) for resize in testing.resizes)
    calls = -(-testing.calls(opened.size) // (batch_size if testing.slide else 1))
    (found,) = predictions(logits, scaled, testing, batch_size, calls, alone(device))
    return found.classes
