"""From the ``data`` group of the configuration to a data set."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Literal, cast

from dmjd.config import DataConfig
from dmjd.data.dataset import ImageDataset, Split
from dmjd.data.digits import Digits
from dmjd.data.folder import Check, ImageFolder
from dmjd.data.idx import DEBIAN_FOLDER, FashionMnist, has_fashion_mnist
from dmjd.data.loader import StepBatches
from dmjd.errors import ConfigError, DataError

_log = logging.getLogger("dmjd")


def build_dataset(config: DataConfig, split: Split) -> ImageDataset:
    """The data set that ``config.name`` asks for.

    "auto" is Fashion-MNIST from ``config.root`` or, without a root, from Debian's package, and digits where that is not
    installed.

    Raises:
        ConfigError: if the name is unknown, or ``config.channels`` is not what the data set has.
        DataError: if more than ``config.max_bad_percent`` of the images are found missing, damaged or too small.
    """
    dataset = _build(config, split)
    if dataset.channels != config.channels:
        raise ConfigError(
            f"data.channels={config.channels}, but the images of data.name={config.name} have {dataset.channels}; "
            f"set data.channels={dataset.channels}"
        )
    return dataset


def training_batches(
    config: DataConfig, dataset: ImageDataset, batch_size: int, seed: int, rank: int = 0, world: int = 1
) -> StepBatches:
    """Randomly cropped batches of ``dataset``, by step number, or the part of process ``rank`` of ``world``.

    Raises:
        ConfigError: if the data set is smaller than a batch, ``world`` does not divide it, or a crop range is none.
    """
    (height, width), scale, ratio = config.image_size, config.crop_scale, config.crop_ratio
    ranges = (scale[0], scale[1]), (ratio[0], ratio[1])
    return StepBatches(dataset, batch_size, (height, width), seed, *ranges, rank=rank, world=world)


def _build(config: DataConfig, split: Split) -> ImageDataset:
    if config.root is not None and not Path(config.root).expanduser().is_dir():
        raise DataError(f"data.root={config.root} is not a folder")
    if config.name == "fashion_mnist":
        return FashionMnist(config.root, split, config.pad)
    if config.name == "digits":
        return Digits(split)
    if config.name == "folder":
        if config.root is None:
            raise DataError("data.name=folder needs data.root, the folder of images")
        height, width = config.image_size
        if config.channels != 1 and config.channels != 3:
            raise ConfigError(f"data.channels must be 1 or 3 for data.name=folder, got {config.channels}")
        channels: Literal[1, 3] = 1 if config.channels == 1 else 3
        check = cast(Check, config.check)
        return ImageFolder(config.root, split, channels, check, (height, width), config.max_bad_percent)
    if config.name == "auto":
        if config.root is not None or has_fashion_mnist(DEBIAN_FOLDER):
            return FashionMnist(config.root, split, config.pad)
        _warn_of_digits()
        return Digits(split)
    raise ConfigError(f"data.name={config.name} is unknown; choose auto, fashion_mnist, digits or folder")


@cache  # once per process, not once per split
def _warn_of_digits() -> None:
    _log.warning(
        "data.name=auto found no Fashion-MNIST and takes scikit-learn's digits, which show that the plumbing works and "
        "nothing about a method, since a linear probe on their raw pixels already reaches 97 %; "
        "install Debian's package dataset-fashion-mnist or set data.root"
    )
