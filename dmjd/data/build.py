"""From the ``data`` group of the configuration to a data set."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast, overload

from dmjd.config import DataConfig
from dmjd.data.crops import RandomResizedCrop
from dmjd.data.dataset import ImageDataset, Split
from dmjd.data.digits import Digits
from dmjd.data.fetch import fashion_mnist_folder
from dmjd.data.folder import Check, ImageFolder
from dmjd.data.idx import FashionMnist
from dmjd.data.loader import Ahead, StepBatches
from dmjd.data.shards.cache import GIB, ShardCache
from dmjd.data.shards.dataset import ShardDataset
from dmjd.data.shards.index import ShardSet, load_splits
from dmjd.data.shards.local import check_files
from dmjd.data.shards.location import is_remote
from dmjd.data.shards.plan import shard_plan
from dmjd.data.shards.prefetch import Prefetch
from dmjd.data.stream.batches import StreamBatches
from dmjd.data.stream.source import TarStream
from dmjd.data.stream.tars import PIPE
from dmjd.errors import ConfigError, DataError
from dmjd.files import private_folder
from dmjd.redact import MARK, is_incomplete, shown

STREAM = "stream"
AUTO = {"fashion_mnist": 60000, "digits": 1437}
"""What ``data.name=auto`` may be, with the size of the training split."""
_EXAMPLE = "'\"s3://bucket/train-{000000..000146}.tar\"'"

_log = logging.getLogger("dmjd")


def build_dataset(config: DataConfig, split: Split) -> ImageDataset:
    """The data set that ``config.name`` asks for; see :func:`resolve_auto` for "auto".

    Raises:
        ConfigError: if the name is unknown, or ``config.channels`` is not what the data set has.
        DataError: if more than ``config.max_bad_percent`` of the images are found missing, damaged or too small.
    """
    _require_whole_root(config)
    if config.name == STREAM:
        raise ConfigError(
            "data.name=stream can only be trained from, as it comes; evaluate with data=folder or data=shards"
        )
    if config.samples is not None:
        raise ConfigError(f"data.samples is for data.name=stream; data.name={config.name} counts its images itself")
    dataset = _build(config, split)
    if dataset.channels != config.channels:
        raise ConfigError(
            f"data.channels={config.channels}, but the images of data.name={config.name} have {dataset.channels}; "
            f"set data.channels={dataset.channels}"
        )
    return dataset


def resolve_auto(config: DataConfig) -> DataConfig:
    """``config`` with the data set that ``name=auto`` is here: Fashion-MNIST, or digits where it cannot be had.

    Says which it is. A run resolves its data once and stores the outcome, since another start might find other data.
    """
    if config.name != "auto":
        return config
    try:
        folder = Path(config.root) if config.root is not None else fashion_mnist_folder()
    except DataError as error:
        _log.warning(
            "data=auto takes scikit-learn's 1797 digits, which show that everything runs and little about a method: a "
            "linear probe of their raw pixels already reaches 97 %%; %s",
            error,
        )
        return replace(config, name="digits", pad=0)
    _log.info("data=auto takes Fashion-MNIST in %s, on which scores show what pre-training has learnt", folder)
    return replace(config, name="fashion_mnist")


def training_source(config: DataConfig) -> ImageDataset | TarStream:
    """What a run learns from: :func:`build_dataset`, or a stream where there is no data set.

    Raises:
        ConfigError, DataError: as :func:`build_dataset` does.
    """
    _require_whole_root(config)
    return _stream(config) if config.name == STREAM else build_dataset(config, "train")


def _require_whole_root(config: DataConfig) -> None:
    """Raise ConfigError for what was stored of a root, and not the root."""
    if config.root is not None and is_incomplete(config.root):
        root = shown(config.root)
        why = "a run keeps no secret"
        if MARK not in config.root:
            why = "its variable is not set, or could be sent to any host that a file names"
        raise ConfigError(f"data.root={root} is incomplete: {why}; give data.root=LOCATION again")


_KEYS = {"size": "image_size", "scale": "crop_scale", "ratio": "crop_ratio"}
"""Arguments of :class:`RandomResizedCrop` -> keys of ``data``, where they are not called the same."""


def training_crop(config: DataConfig) -> RandomResizedCrop:
    """How a run's images are cropped.

    Raises:
        ConfigError: what :class:`RandomResizedCrop` refuses, by the configuration's name for it.
    """
    (height, width), second = config.image_size, config.second_size
    try:
        return RandomResizedCrop(
            size=(height, width),
            scale=(config.crop_scale[0], config.crop_scale[1]),
            ratio=(config.crop_ratio[0], config.crop_ratio[1]),
            interpolation=config.interpolation,
            second_size=None if second is None else (second[0], second[1]),
        )
    except ValueError as error:
        argument, _, rest = str(error).partition(" ")
        raise ConfigError(f"data.{_KEYS.get(argument, argument)} {rest}") from error


@overload
def training_batches(
    config: DataConfig, dataset: ImageDataset, batch_size: int, seed: int, rank: int = 0, world: int = 1
) -> StepBatches: ...
@overload
def training_batches(
    config: DataConfig, dataset: ImageDataset | TarStream, batch_size: int, seed: int, rank: int = 0, world: int = 1
) -> StepBatches | StreamBatches: ...
def training_batches(
    config: DataConfig, dataset: ImageDataset | TarStream, batch_size: int, seed: int, rank: int = 0, world: int = 1
) -> StepBatches | StreamBatches:
    """Randomly cropped batches of ``dataset``, by step number, or the part of process ``rank`` of ``world``.

    Raises:
        ConfigError: if the data set is smaller than a batch, ``world`` does not divide it, or a crop range is none; or
            if a stream has fewer tars than processes.
    """
    crop = training_crop(config)
    if isinstance(dataset, TarStream):
        batches = StreamBatches(dataset, batch_size, crop, seed, rank, world)
        if rank == 0:
            _log.info(
                "data.name=stream is not resumed exactly: a run that is started again sees other images than one left "
                "alone; where tars can be read in any order, dmjd shards index and data=shards do better"
            )
        return batches
    plan = shard_plan(dataset.sizes, batch_size) if isinstance(dataset, ShardDataset) else None
    return StepBatches(dataset, batch_size, crop, seed, rank, world, plan)


def fetch_ahead(
    dataset: ImageDataset | TarStream,
    batch_size: int,
    seed: int,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
) -> Ahead | None:
    """What fetches shards from afar for all processes of this host, in the first of them; None where there is nothing.

    Args:
        dataset, batch_size, seed, rank, world: as for :func:`training_batches`.
        local_rank, local_world: which of how many processes of this host, which have consecutive ranks, this is.
    """
    if not isinstance(dataset, ShardDataset) or dataset.cache is None or local_rank % local_world:
        return None
    part = batch_size // world
    columns = rank * part, min(rank + local_world, world) * part
    return Prefetch(dataset.cache, dataset.shards, shard_plan(dataset.sizes, batch_size), seed, columns)


def _stream(config: DataConfig) -> TarStream:
    if config.root is None:
        raise DataError(f"data.name=stream needs data.root, such as {_EXAMPLE}")
    if config.samples is None:
        raise ConfigError("data.name=stream needs data.samples, how many images count as an epoch")
    if config.check != "none":
        raise ConfigError(f"data.check={config.check} needs images that can be looked at before; set data.check=none")
    if config.cache is not None:
        raise ConfigError("data.cache is for data.name=shards; a stream keeps nothing")
    if config.channels not in (1, 3):
        raise ConfigError(f"data.channels must be 1 or 3 for data.name=stream, got {config.channels}")
    try:
        import webdataset  # noqa: F401 -- before anything is read, and once for all workers
        from braceexpand import braceexpand
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.name=stream needs {error.name}; pip install 'dmjd[remote]'") from error
    try:
        locations = [location for pattern in config.root.split("::") for location in braceexpand(pattern)]
    except ValueError as error:
        raise ConfigError(f"data.root={shown(config.root)} has an unmatched brace; write {_EXAMPLE}") from error
    missing = next((path for path in locations if _is_path(path) and not Path(path).is_file()), None)
    if missing is not None:
        raise DataError(f"{missing}, which data.root names, is not there; give paths, URLs or pipe:COMMAND")
    return TarStream(locations, config.samples, config.channels, config.shuffle_buffer)


def _is_path(location: str) -> bool:
    return not (location.startswith(PIPE) or is_remote(location))


def _build(config: DataConfig, split: Split) -> ImageDataset:
    config = resolve_auto(config)
    if config.name == "shards":
        return _shards(config, split)
    if config.root is not None and not Path(config.root).is_dir():
        raise DataError(f"data.root={shown(config.root)} is not a folder")
    if config.name == "fashion_mnist":
        return FashionMnist(Path(config.root) if config.root else fashion_mnist_folder(), split, config.pad)
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
    raise ConfigError(
        f"data.name={config.name} is unknown; choose auto, fashion_mnist, digits, folder, shards or stream"
    )


def _shards(config: DataConfig, split: Split) -> ShardDataset:
    if config.root is None:
        raise DataError("data.name=shards needs data.root, what dmjd shards build has made, or its URL")
    if config.check == "decode":
        raise ConfigError(
            "data.check=decode is for folders, since shards are checked when they are built; "
            f"to check them again: dmjd shards verify {shown(config.root)} decode=true"
        )
    root = config.root
    splits = load_splits(root)
    name = "val" if split == "test" else "train"
    if name not in splits:
        raise DataError(f"{root} has no shards of {name}, only of {', '.join(splits)}; build them from such a source")
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
            f"data.cache_gib={config.cache_gib:g} is less than one shard of {shards.folder}, which has "
            f"{largest / GIB:.3g} GiB"
        )
    # TMPDIR is what a scheduler sets to the disk of a node.
    folder = Path(config.cache) if config.cache else private_folder("dmjd-shards")
    return ShardCache(folder, budget)
