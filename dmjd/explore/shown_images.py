"""The images that ``dmjd show`` draws: those that are named, or evenly spaced ones of a folder or of the run's data."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, cast

from dmjd.data.crops import evaluation_view
from dmjd.data.dataset import ImageDataset, OpenImage, Split, evenly
from dmjd.data.decode import open_image, read_bytes
from dmjd.data.folder import ImageFolder
from dmjd.errors import BadImage, ConfigError, DataError, NoSplit
from dmjd.evaluate.encoder import FrozenEncoder
from dmjd.files import at_home

if TYPE_CHECKING:
    from dmjd.explore.show import ShowConfig

MOST_IMAGES = 64
"""Images of one figure."""

logger = logging.getLogger("dmjd")


def images_of(config: ShowConfig, frozen: FrozenEncoder) -> tuple[list[OpenImage], list[int], str]:
    """The images that ``config`` names, their sample ids, and a description: those of ``paths``, numbered, or evenly
    spaced ones of the run's data, with the ids that training gives them.

    Raises:
        DataError: if one is missing or no image.
    """
    if config.paths:
        found = [each for path in config.paths for each in _images_at(at_home(path), config, frozen)]
        if len(found) > MOST_IMAGES:
            raise ConfigError(f"{len(found)} images are named, and a picture shows at most {MOST_IMAGES}; name fewer")
        return found, list(range(len(found))), "given images"
    split: Split = "test" if config.split == "test" else "train"
    dataset = None
    if config.split == "auto":
        with suppress(NoSplit):
            dataset, split = frozen.dataset("test"), "test"
    dataset = frozen.dataset(split) if dataset is None else dataset
    chosen = _readable(dataset, config, frozen)
    return list(chosen.values()), list(chosen), f"{'training' if split == 'train' else 'test'} images"


def _images_at(path: str, config: ShowConfig, frozen: FrozenEncoder) -> Iterator[OpenImage]:
    channels = frozen.data.channels
    if not os.path.isdir(path):
        yield open_image(read_bytes(path), path, channels)
        return
    folder = ImageFolder(path, "train", cast(Literal[1, 3], channels), "none")
    yield from _readable(folder, config, frozen).values()


def _readable(dataset: ImageDataset, config: ShowConfig, frozen: FrozenEncoder) -> dict[int, OpenImage]:
    """Number -> image, of evenly spaced ones. One that cannot be decoded is logged, and the next one before the
    following of these takes its place, if there is one.

    Raises:
        DataError: if none can be decoded.
    """
    starts = evenly(len(dataset), config.images).tolist()
    found, faults = dict[int, OpenImage](), list[str]()
    for start, stop in pairwise([*starts, len(dataset)]):
        for index in range(start, stop):
            try:
                opened = dataset.open(index)
                evaluation_view(opened, frozen.size, frozen.data.crop_pct)  # decodes it
            except BadImage as error:
                faults.append(f"{error.name} {error.fault}")
            else:
                found[index] = opened
                break
    if not found:
        raise DataError(f"none of {len(dataset)} images can be decoded; the first: {faults[0]}")
    if faults:
        logger.warning("left out %d image(s) that cannot be decoded; the first: %s", len(faults), faults[0])
    return found
