"""Build data sets, crops and batches from the ``data`` section of the configuration."""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast, overload

from dmjd.config import AugmentConfig, DataConfig, DetectDataConfig, SegmentDataConfig
from dmjd.config.data import ENDINGS, SKIPPED_FOLDERS
from dmjd.data.augment import RandAugment
from dmjd.data.crops import RandomResizedCrop
from dmjd.data.dataset import ImageDataset, Split
from dmjd.data.decode import decodable
from dmjd.data.dense.annotated import AnnotatedImages
from dmjd.data.fetch import fashion_mnist_folder
from dmjd.data.folder import Check, ImageFolder
from dmjd.data.held_out import HeldOut
from dmjd.data.loader import Ahead, StepBatches
from dmjd.data.shards.cache import GIB, ShardCache
from dmjd.data.shards.dataset import ShardDataset
from dmjd.data.shards.index import ShardSet, load_splits
from dmjd.data.shards.local import check_files
from dmjd.data.shards.location import is_remote
from dmjd.data.shards.prefetch import Prefetch
from dmjd.data.shards.sampler import shard_sampler
from dmjd.data.small import Digits, FashionMnist
from dmjd.data.stream.batches import StreamBatches, TarStream
from dmjd.data.stream.tars import PIPE
from dmjd.data.transform import Transform
from dmjd.errors import ConfigError, DataError, NoSplit
from dmjd.files import private_folder
from dmjd.redact import MARK, is_incomplete, shown

STREAM = "stream"
AUTO = {"fashion_mnist": 60000, "digits": 1437}
"""The data sets that ``data.name=auto`` selects from, and the size of their training split."""
_MOST_TARS = 10_000_000
_EXAMPLE = "'s3://bucket/train-{000000..000146}.tar'"

_log = logging.getLogger("dmjd")


def build_dataset(config: DataConfig, split: Split) -> ImageDataset:
    """The data set ``config.name``; see :func:`resolve_auto` for "auto".

    Raises:
        ConfigError: if ``config.channels`` differs from the data set's, or ``config.val_percent`` is for another one.
        DataError: if more than ``config.max_bad_percent`` percent of the images are missing, damaged or too small.
        NoSplit: if a folder or shard set does not have ``split``.
    """
    _check(config)
    if config.name == STREAM:
        raise ConfigError("data.name=stream is for training only; evaluate with data=folder or data=shards")
    if config.samples is not None:
        raise ConfigError(f"data.samples is for data.name=stream, got data.name={config.name}; leave data.samples out")
    dataset = _build(config, split)
    if dataset.channels != config.channels:
        raise ConfigError(
            f"data.channels={config.channels}, but the images of data.name={config.name} have {dataset.channels}; "
            f"set data.channels={dataset.channels}"
        )
    return dataset


def resolve_auto(config: DataConfig) -> DataConfig:
    """``config`` with all that depends on this machine replaced by what is here.

    ``name=auto`` becomes Fashion-MNIST, or digits where that cannot be fetched; the choice is logged. For a folder,
    ``endings`` and ``skipped_folders`` become this version's lists; with ``skip_undecodable`` without the formats that
    cannot be decoded here. A run resolves its data once and stores the result, since another start could choose
    differently.
    """
    if config.name == "folder":
        endings = ENDINGS if config.endings is None else config.endings.split()
        names = SKIPPED_FOLDERS if config.skipped_folders is None else config.skipped_folders.split()
        kept = decodable(endings) if config.skip_undecodable else endings
        return replace(config, endings=" ".join(kept), skipped_folders=" ".join(names))
    if config.name != "auto":
        return config
    try:
        folder = Path(config.root) if config.root is not None else fashion_mnist_folder()
    except DataError as error:
        _log.warning(
            "data=auto: using scikit-learn's 1797 digits, a test of the installation. They are too easy to compare "
            "methods (a linear probe of raw pixels reaches 97 %%). %s",
            error,
        )
        return replace(config, name="digits", pad=0)
    _log.info("data=auto: using Fashion-MNIST in %s", folder)
    return replace(config, name="fashion_mnist")


def training_source(config: DataConfig) -> ImageDataset | TarStream:
    """The training images: a stream if ``config.name`` is "stream", else :func:`build_dataset`, and its errors.

    Rank 0 logs which files were skipped.
    """
    if config.name == STREAM:
        return _stream(config)
    dataset = build_dataset(config, "train")
    if os.environ.get("RANK", "0") == "0":
        report(dataset)
    return dataset


def report(dataset: ImageDataset) -> None:
    """Log what :func:`build_dataset` found in a folder besides usable images; nothing for other data sets."""
    if isinstance(dataset, ImageFolder | AnnotatedImages):
        dataset.report()


def _check(config: DataConfig) -> None:
    """Raise ConfigError for values that no data set, or not this one, has.

    So is a redacted ``config.root``, as runs store it.
    """
    if config.channels not in (1, 3):
        raise ConfigError(f"data.channels must be 1 or 3, got {config.channels}")
    if config.val_percent and config.name != "folder":
        cure = {
            "shards": "make the split when the shards are built: dmjd shards build SRC DST "
            f"val_percent={config.val_percent:g}",
            STREAM: "evaluate with data=folder or data=shards",
        }.get(config.name, "it has a test split of its own")
        raise ConfigError(
            f"data.val_percent={config.val_percent:g} is for data.name=folder, got data.name={config.name}; {cure}"
        )
    if config.name == "digits" and config.root is not None:
        raise ConfigError(
            f"data.root={shown(config.root)} is a folder, and data.name=digits are scikit-learn's own images; add "
            "data=folder to read those of the folder"
        )
    odd = [each for each in (config.endings or "").split() if not re.fullmatch(r"(\.\w+)+", each)]
    if odd:
        raise ConfigError(
            f"data.endings must be file name extensions such as .jpg, separated by spaces, got {odd[0]!r}"
        )
    if config.root is not None and is_incomplete(config.root):
        root = shown(config.root)
        why = "runs store no secrets"
        if MARK not in config.root:
            why = "its variable is not set, or could be sent to any host that a file names"
        raise ConfigError(f"data.root={root} is incomplete: {why}; give data.root=LOCATION again")


def check_labels(dataset: ImageDataset, images: str) -> None:
    """Raise DataError unless there are two classes and every image has a label. ``images``: "the test images"."""
    classes = dataset.num_classes
    if not classes:
        raise DataError(f"{images} have no labels; put those of each class into a folder of its own")
    if classes < 2:
        raise DataError(
            f"{images} have one class, and a score needs two or more; put those of each class into a folder of its own"
        )
    odd = next((index for index in range(len(dataset)) if not 0 <= dataset.label(index) < classes), None)
    if odd is not None:
        raise DataError(
            f"{images} must have labels 0 to {classes - 1}, and {dataset.name(odd)} has {dataset.label(odd)}; build "
            "the data set again, from class folders or from tars with a .cls beside every image"
        )


def training_crop(config: DataConfig, augment: AugmentConfig | None = None) -> RandomResizedCrop:
    """The random crop of training images, with the RandAugment of ``augment``.

    Raises:
        ConfigError: if ``crop_scale`` or ``crop_ratio`` has its greatest value first, or the policy is none.
    """
    (height, width), second, scale, ratio = config.image_size, config.second_size, config.crop_scale, config.crop_ratio
    policy = None if augment is None else augment.randaugment
    for key, (least, greatest) in (("crop_scale", scale), ("crop_ratio", ratio)):
        if least > greatest:
            raise ConfigError(f"data.{key} must be least <= greatest, got [{least}, {greatest}]")
    return RandomResizedCrop(
        size=(height, width),
        scale=(scale[0], scale[1]),
        ratio=(ratio[0], ratio[1]),
        interpolation=config.interpolation,
        second_size=None if second is None else (second[0], second[1]),
        augment=None if policy is None else RandAugment(policy, config.mean, config.interpolation),
    )


def training_transform(
    config: DataConfig, augment: AugmentConfig | None = None, dataset: ImageDataset | TarStream | None = None
) -> Transform:
    """The random transform of training images: :func:`training_crop`, or that of segmentation or detection.

    With ``dataset`` its size of a batch is that of these images.

    Raises:
        ConfigError: as :func:`training_crop`, and for ranges whose greatest value comes first.
    """
    if isinstance(config, SegmentDataConfig):
        from dmjd.data.dense.segmentation import SegmentationTransform

        return SegmentationTransform.of(config)
    if isinstance(config, DetectDataConfig):
        from dmjd.data.dense.coco import Coco
        from dmjd.data.dense.detection import LargeScaleJitter

        known = (dataset.most_objects,) if isinstance(dataset, Coco) else ()
        return LargeScaleJitter.of(config, *known)
    return training_crop(config, augment)


@overload
def training_batches(
    config: DataConfig,
    dataset: ImageDataset,
    batch_size: int,
    seed: int,
    rank: int = 0,
    world: int = 1,
    augment: AugmentConfig | None = None,
) -> StepBatches: ...
@overload
def training_batches(
    config: DataConfig,
    dataset: ImageDataset | TarStream,
    batch_size: int,
    seed: int,
    rank: int = 0,
    world: int = 1,
    augment: AugmentConfig | None = None,
) -> StepBatches | StreamBatches: ...
def training_batches(
    config: DataConfig,
    dataset: ImageDataset | TarStream,
    batch_size: int,
    seed: int,
    rank: int = 0,
    world: int = 1,
    augment: AugmentConfig | None = None,
) -> StepBatches | StreamBatches:
    """Randomly cropped batches of ``dataset`` by step number; of each, the part of process ``rank`` of ``world``.

    ``augment``: of fine-tuning; its RandAugment is applied to the crops. The rest follows on the device.

    Raises:
        ConfigError: if an epoch is smaller than a batch, ``world`` does not divide a batch, a crop range is reversed,
            or a stream has fewer tars than there are processes.
    """
    if not 1 <= batch_size <= len(dataset):
        raise ConfigError(
            f"batch_size={batch_size} must be between 1 and the {len(dataset)} images of an epoch; set a smaller one, "
            "or experiment=own_photos, which follows the number of images"
        )
    if batch_size % world:
        raise ConfigError(f"batch_size={batch_size} is not divisible by {world} processes; change one of them")
    if isinstance(dataset, TarStream):
        tars = len(dataset.locations)
        if tars < world:
            raise ConfigError(f"data.root has {tars} tar(s), fewer than {world} processes; split it into more tars")
        batches = StreamBatches(dataset, batch_size, training_crop(config), seed, rank, world)
        if rank == 0:
            _log.info(
                "data.name=stream does not resume exactly: a restarted run sees other images than an uninterrupted "
                "one. Where tars can be read in any order, dmjd shards index and data=shards resume exactly"
            )
        return batches
    sampler = shard_sampler(dataset.sizes, batch_size) if isinstance(dataset, ShardDataset) else None
    transform = training_transform(config, augment)
    return StepBatches(dataset, batch_size, transform, seed, rank, world, sampler)


def fetch_ahead(
    dataset: ImageDataset | TarStream,
    batch_size: int,
    seed: int,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
) -> Ahead | None:
    """The prefetcher of remote shards for this host, in its first process; None elsewhere and without remote shards.

    Args:
        dataset, batch_size, seed, rank, world: as for :func:`training_batches`.
        local_rank, local_world: rank and number of the processes of this host, whose global ranks are consecutive.
    """
    if not isinstance(dataset, ShardDataset) or dataset.cache is None or local_rank % local_world:
        return None
    part = batch_size // world
    columns = rank * part, min(rank + local_world, world) * part
    return Prefetch(dataset.cache, dataset.shards, shard_sampler(dataset.sizes, batch_size), seed, columns)


def _is_endless(pattern: str) -> bool:
    """Whether the ranges in ``pattern`` expand to more locations than memory should hold."""
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)[.}]", pattern)
    return math.prod(abs(int(last[:20]) - int(first[:20])) + 1 for first, last in ranges) > _MOST_TARS


def _stream(config: DataConfig) -> TarStream:
    _check(config)
    if config.root is None:
        raise DataError(f"data.name=stream needs data.root, such as {_EXAMPLE}")
    if config.samples is None:
        raise ConfigError("data.name=stream needs data.samples, the number of images per epoch")
    if config.check != "none":
        raise ConfigError(
            f"data.check={config.check} needs an indexed data set; for data.name=stream set data.check=none"
        )
    if config.cache is not None:
        raise ConfigError("data.cache is for data.name=shards; leave it out for data.name=stream")
    try:
        import webdataset  # noqa: F401 -- fail before anything is read
        from braceexpand import braceexpand
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.name=stream needs {error.name}; pip install 'dmjd[remote]'") from error
    if any(map(_is_endless, config.root.split("::"))):
        raise ConfigError(f"data.root={shown(config.root)} names more than {_MOST_TARS:,} tars; give smaller ranges")
    try:
        locations = [location for pattern in config.root.split("::") for location in braceexpand(pattern)]
    except ValueError as error:
        raise ConfigError(f"data.root={shown(config.root)} has an unmatched brace; write {_EXAMPLE}") from error
    paths = [location for location in locations if not (location.startswith(PIPE) or is_remote(location))]
    missing = next((path for path in paths if not Path(path).is_file()), None)
    if missing is not None:
        raise DataError(f"{missing} of data.root does not exist; give paths, URLs or pipe:COMMAND")
    return TarStream(locations, config.samples, config.channels, config.shuffle_buffer)


def _build(config: DataConfig, split: Split) -> ImageDataset:
    config = resolve_auto(config)
    if config.name == "shards":
        return _shards(config, split)
    if config.root is not None and not Path(config.root).is_dir():
        raise DataError(f"data.root={shown(config.root)} is not a folder; set data.root to an existing folder")
    if config.name == "fashion_mnist":
        return FashionMnist(Path(config.root) if config.root else fashion_mnist_folder(), split, config.pad)
    if config.name == "digits":
        return Digits(split)
    if isinstance(config, SegmentDataConfig):
        from dmjd.data.dense.ade20k import Ade20k

        return Ade20k(config, split)
    if isinstance(config, DetectDataConfig):
        from dmjd.data.dense.coco import Coco

        return Coco(config, split)
    if config.root is None:
        raise DataError("data.name=folder needs data.root, the folder of images")
    height, width = config.image_size
    channels, check = cast(Literal[1, 3], config.channels), cast(Check, config.check)
    return ImageFolder(
        config.root,
        split,
        channels,
        check,
        (height, width),
        config.max_bad_percent,
        endings=(config.endings or "").lower().split(),
        skipped_folders=(config.skipped_folders or "").split(),
        held_out=HeldOut(config.val_percent, config.val_seed) if config.val_percent else None,
    )


def _shards(config: DataConfig, split: Split) -> ShardDataset:
    if config.root is None:
        raise DataError("data.name=shards needs data.root, the folder or URL of a set made by dmjd shards build")
    if config.check == "decode":
        raise ConfigError(
            "data.check=decode is for data.name=folder; shards are decoded when they are built, "
            f"and again by: dmjd shards verify {shown(config.root)} decode=true"
        )
    root = config.root
    splits = load_splits(root)
    name = "val" if split == "test" else "train"
    if name not in splits:
        raise NoSplit(f"{root} has no {name} shards, only {', '.join(splits)}; build from images with a {name} split")
    shards = splits[name]
    if not shards.manifest.samples:
        raise DataError(f"{shards.folder} holds no samples; build it again")
    cache = _shard_cache(config, shards)
    if config.check == "none":
        return ShardDataset(shards, cache)
    check_files(shards)
    return ShardDataset(shards, cache, (config.image_size[0], config.image_size[1]), config.max_bad_percent)


def _shard_cache(config: DataConfig, shards: ShardSet) -> ShardCache | None:
    remote = [shard for number, shard in enumerate(shards.manifest.shards) if is_remote(shards.location(number))]
    if not remote:
        return None
    budget, largest = round(config.cache_gib * GIB), max(shard.bytes for shard in remote)
    if budget < largest:
        raise ConfigError(
            f"data.cache_gib={config.cache_gib:g} must be at least {largest / GIB:.3g}, the largest shard of "
            f"{shards.folder}"
        )
    # Schedulers set TMPDIR to a disk of the node.
    folder = Path(config.cache) if config.cache else private_folder("dmjd-shards")
    return ShardCache(folder, budget)
