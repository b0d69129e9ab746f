"""Random transform of images and their class maps: mmsegmentation 0.x's for ADE20K, with keyed draws.

Resize to a random size, random crop, horizontal flip, photometric distortion, padding. Differences: images are resized
with antialiasing where they become smaller (OpenCV's bilinear filter has none), maps by the nearest pixel centre, so
that both stay aligned (OpenCV takes the pixel to the upper left); the random factor of the hue is continuous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from dmjd.config import SegmentDataConfig
from dmjd.data.batch import Batch
from dmjd.data.dataset import OpenImage, Pixels, Size
from dmjd.data.dense.ade20k import IGNORED, SegmentedImage
from dmjd.errors import ConfigError
from dmjd.ops.philox import Domain, keyed_bits, keyed_uniform

ATTEMPTS = 10
"""Crops that are tested for their classes; the one after them is taken as it is."""

BRIGHTNESS, CONTRAST, SATURATION, HUE = 32.0, (0.5, 1.5), (0.5, 1.5), 18 / 180
"""Of the distortion: greatest difference of pixel values; factors; factors; greatest part of the circle of hues."""

_DISTORTION = 1
"""Lane of ``Domain.CROP`` for the distortion; lane 0 draws size and crop."""
_CHANGES = 9  # random numbers of a distortion

_Table = npt.NDArray[np.uint8]
_AS_IS: _Table = np.arange(256, dtype=np.uint8)


def resized_size(size: Size, resize: Sequence[int], factor: float = 1.0) -> Size:
    """(height, width) of an image of ``size`` after a resize without distortion, each at least 1.

    Args:
        resize: shorter and longest side; the image becomes as large as both allow.
        factor: of both, which are then rounded down, as in mmcv.
    """
    short, long = (int(side * factor) for side in resize)
    height, width = size
    scale = min(long / max(size), short / min(size))
    return max(1, int(height * scale + 0.5)), max(1, int(width * scale + 0.5))


def test_image(opened: OpenImage, resize: Sequence[int]) -> Pixels:
    """The whole image after the resize of :func:`resized_size`, uint8 ``[h, w, C]``, for evaluations.

    Raises:
        BadImage: if the pixels cannot be decoded.
    """
    size = resized_size(opened.size, resize)
    return _pixels(_resampled(opened, size, (0, 0, *size))).copy()


@dataclass(frozen=True)
class SegmentationTransform:
    """The random transform of training images and their maps.

    Args:
        size: (height, width) of the crops.
        resize: shorter and longest side to which images are resized without distortion.
        ratio: range of a random factor of ``resize``.
        max_class_share: another crop is tried, up to ten times, while one class has this share or more of the pixels
            with a class, or none has a class. 1: the first is taken.
        flip: horizontal flip with probability 1/2.
        distortion: photometric distortion (:class:`Distortion`).
        mean: mean colour for pixel values in 0..1, of which the padding is, so that it is 0 after the normalisation.
    """

    size: Size
    resize: Sequence[int]
    ratio: tuple[float, float]
    max_class_share: float
    flip: bool
    distortion: bool
    mean: Sequence[float]

    @classmethod
    def of(cls, config: SegmentDataConfig) -> SegmentationTransform:
        """The transform of a configuration.

        Raises:
            ConfigError: if a range has its greatest value first, or the mean colour has another number of channels.
        """
        for key in ("resize", "resize_ratio"):
            least, greatest = getattr(config, key)
            if least > greatest:
                raise ConfigError(f"data.{key} must be least <= greatest, got [{least}, {greatest}]")
        if len(config.mean) != config.channels:
            raise ConfigError(f"data.mean must hold data.channels={config.channels} numbers, got {config.mean}")
        (height, width), (low, high) = config.image_size, config.resize_ratio
        return cls(
            size=(height, width),
            resize=config.resize,
            ratio=(low, high),
            max_class_share=config.max_class_share,
            flip=config.flip,
            distortion=config.distortion,
            mean=config.mean,
        )

    def draw(self, sample_ids: Tensor, key: Tensor) -> SegmentationDraws:
        """See :class:`~dmjd.data.transform.Transform`, as for the next three."""
        return SegmentationDraws(self, sample_ids, key)

    def batch(self, views: Sequence[tuple[Tensor, ...]], sample_ids: Tensor, labels: Sequence[int]) -> Batch:
        images, maps = (torch.stack(column) for column in zip(*views, strict=True))
        return Batch(images, sample_ids.clone(), torch.tensor(labels), maps=maps)

    def empty(self, count: int, channels: int) -> Batch:
        maps = torch.full((count, *self.size), IGNORED, dtype=torch.uint8)
        return Batch.empty(count, [self.size], channels)._replace(maps=maps)

    def nbytes(self, count: int, channels: int) -> int:
        return Batch.nbytes(count, [self.size], channels + 1)


class SegmentationDraws:
    """Size, crop, flip and distortion of each sample, drawn for the whole batch and used once the image is known.

    Random number 0 of a sample is the factor of the size; numbers 2 a + 1 and 2 a + 2 place crop a. Arguments as for
    :meth:`SegmentationTransform.draw`.
    """

    def __init__(self, transform: SegmentationTransform, sample_ids: Tensor, key: Tensor) -> None:
        words = 1 + 2 * (ATTEMPTS + 1)
        self._uniform = keyed_uniform(sample_ids, words, key=key, domain=Domain.CROP).numpy()
        self._flip = (keyed_bits(sample_ids, 1, key=key, domain=Domain.FLIP) & 1).bool().squeeze(1).tolist()
        changes = keyed_uniform(sample_ids, _CHANGES, key=key, domain=Domain.CROP, lane=_DISTORTION)
        self._changes = changes.tolist()
        self._transform = transform

    def cut(self, row: int, image: SegmentedImage) -> tuple[Tensor, ...]:
        """Crop and map of sample ``sample_ids[row]``: uint8 ``[H, W, C]`` and ``[H, W]``, padded at the bottom and the
        right.

        Raises:
            BadImage: if the image or its mask cannot be used.
        """
        transform = self._transform
        whole = self.resized(row, image.size)
        top, left, classes = self._crop(row, image.classes(), whole)
        box = top, left, *classes.shape
        pixels = _resampled(image, whole, box)
        if transform.flip and self._flip[row]:
            pixels = pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            classes = classes[:, ::-1]
        if transform.distortion:
            pixels = Distortion.of(self._changes[row])(pixels)
        colour = [min(255, max(0, round(255 * value))) for value in transform.mean]
        padded = _padded(_pixels(pixels), transform.size, colour), _padded(classes, transform.size, IGNORED)
        return tuple(map(torch.from_numpy, padded))

    def resized(self, row: int, size: Size) -> Size:
        """(height, width) of sample ``sample_ids[row]``, an image of ``size``, before the crop."""
        low, high = self._transform.ratio
        return resized_size(size, self._transform.resize, low + (high - low) * float(self._uniform[row, 0]))

    def _crop(self, row: int, classes: Pixels, whole: Size) -> tuple[int, int, Pixels]:
        """Top, left and map of the crop of the resized image, which has the size ``whole``."""
        spare = [max(side - limit, 0) for side, limit in zip(whole, self._transform.size, strict=True)]
        rows, columns = (_nearest(*sides) for sides in zip(classes.shape, whole, strict=True))
        attempts = ATTEMPTS if any(spare) and self._transform.max_class_share < 1 else 0
        for attempt in range(attempts + 1):
            place = self._uniform[row, 2 * attempt + 1 : 2 * attempt + 3].tolist()
            top, left = (math.floor(each * (free + 1)) for each, free in zip(place, spare, strict=True))
            height, width = self._transform.size
            crop = classes.take(rows[top : top + height], 0).take(columns[left : left + width], 1)
            if attempt < attempts and _is_varied(crop, self._transform.max_class_share):
                break
        return top, left, crop


@dataclass(frozen=True)
class Distortion:
    """mmsegmentation's PhotoMetricDistortion, a change of pixel values of 0..255, each part with probability 1/2:

    a summand of all values in +-32 (brightness), then a factor of all values in 0.5..1.5 (contrast), then a factor of
    the saturation in 0.5..1.5 and a shift of the hue by +-36 degrees; with probability 1/2 the contrast comes last.
    Values are cut to 0..255 and rounded down after each. Grey images have neither saturation nor hue.

    Args:
        brightness, contrast, saturation, hue: summand, factors and part of the circle of hues; None: not this one.
        contrast_first: the contrast comes before saturation and hue.
    """

    brightness: float | None = None
    contrast: float | None = None
    saturation: float | None = None
    hue: float | None = None
    contrast_first: bool = True

    @classmethod
    def of(cls, uniform: Sequence[float]) -> Distortion:
        """The distortion of nine random numbers in [0, 1)."""
        coins, places = [each < 0.5 for each in uniform[:5]], uniform[5:]
        ranges = (-BRIGHTNESS, BRIGHTNESS), CONTRAST, SATURATION, (-HUE, HUE)
        values = [low + (high - low) * place for (low, high), place in zip(ranges, places, strict=True)]
        brightness, contrast, saturation, hue = (v if coin else None for v, coin in zip(values, coins[:4], strict=True))
        return cls(brightness, contrast, saturation, hue, contrast_first=coins[4])

    def __call__(self, image: Image.Image) -> Image.Image:
        """The changed ``image``, of mode RGB or L."""
        before, after = _AS_IS, _AS_IS
        if self.brightness is not None:
            before = _changed(before, 1.0, self.brightness)
        if self.contrast is not None and self.contrast_first:
            before = _changed(before, self.contrast, 0.0)
        if self.contrast is not None and not self.contrast_first:
            after = _changed(after, self.contrast, 0.0)
        image = _looked_up(image, before)
        if image.mode == "RGB" and (self.saturation, self.hue) != (None, None):
            shift = round(256 * (self.hue or 0.0))
            saturation = _changed(_AS_IS, 1.0 if self.saturation is None else self.saturation, 0.0)
            tables = [*np.roll(_AS_IS, -shift).tolist(), *saturation.tolist(), *range(256)]
            image = image.convert("HSV").point(tables).convert("RGB")
        return _looked_up(image, after)


def _changed(table: _Table, factor: float, summand: float) -> _Table:
    return (table * np.float32(factor) + np.float32(summand)).clip(0, 255).astype(np.uint8)


def _looked_up(image: Image.Image, table: _Table) -> Image.Image:
    return image if table is _AS_IS else image.point(table.tolist() * len(image.getbands()))


def _nearest(old: int, new: int) -> npt.NDArray[np.int64]:
    """For each of ``new`` pixels of a line, that of ``old`` whose centre is nearest: floor((i + 0.5) old / new)."""
    return (2 * np.arange(new) + 1) * old // (2 * new)


def _is_varied(classes: Pixels, most: float) -> bool:
    """Whether no class has a share of at least ``most`` of the pixels with one, and some pixels have one."""
    counts = Image.fromarray(classes).histogram()[:IGNORED]
    return max(counts) < most * sum(counts)


def _resampled(opened: OpenImage, whole: Size, box: tuple[int, int, int, int]) -> Image.Image:
    """``box``, (top, left, height, width), of the image resized to ``whole``, bilinear and antialiased.

    Only the pixels that it depends on are decoded.
    """
    (top, left, height, width), (old_height, old_width) = box, opened.size
    down, across = old_height / whole[0], old_width / whole[1]
    y0, y1, x0, x1 = top * down, (top + height) * down, left * across, (left + width) * across
    first_row, first_column = (max(0, math.floor(at - max(1, by)) - 1) for at, by in ((y0, down), (x0, across)))
    last_row = min(old_height, math.ceil(y1 + max(1, down)) + 1)
    last_column = min(old_width, math.ceil(x1 + max(1, across)) + 1)
    region = opened.region((first_row, first_column, last_row - first_row, last_column - first_column))
    image = Image.fromarray(region.squeeze(-1) if region.shape[-1] == 1 else region)
    if whole == opened.size:
        image_left, image_top = left - first_column, top - first_row
        return image.crop((image_left, image_top, image_left + width, image_top + height))
    # Rounding may exceed the image.
    right, bottom = min(x1 - first_column, image.width), min(y1 - first_row, image.height)
    place = (x0 - first_column, y0 - first_row, right, bottom)
    return image.resize((width, height), Image.Resampling.BILINEAR, box=place)


def _padded(pixels: Pixels, size: Size, fill: int | Sequence[int]) -> Pixels:
    """A copy of ``pixels``, with ``fill`` at the bottom and the right up to ``size``."""
    height, width = pixels.shape[:2]
    if (height, width) == size:
        return pixels.copy()
    padded = np.empty((*size, *pixels.shape[2:]), dtype=np.uint8)
    padded[:] = fill
    padded[:height, :width] = pixels
    return padded


def _pixels(image: Image.Image) -> Pixels:
    """uint8 ``[H, W, C]``, read-only."""
    pixels: Pixels = np.asarray(image)
    return pixels.reshape(image.height, image.width, -1)
