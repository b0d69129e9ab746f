"""The configuration of a training that begins from an encoder: its backbone and data are those of ``config.init``."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TypeVar

from dmjd.builders.weights import described_model
from dmjd.builders.weights import read_file as read_weights_file
from dmjd.compose import from_yaml_of_run, keys_of_preset
from dmjd.config import BackboneConfig, DataConfig, DenseDataConfig, DownstreamConfig, FinetuneConfig, TrainConfig
from dmjd.data.build import AUTO
from dmjd.errors import ConfigError
from dmjd.files import read_file
from dmjd.runs.folder import RunFolder
from dmjd.runs.paths import CONFIG

logger = logging.getLogger("dmjd")

Config = TypeVar("Config", bound=DownstreamConfig)

_OWN = ("drop_path", "bias_tables")
"""Keys of ``backbone`` that belong to the training; a run's others describe its weights."""
_DATA_SET = ("name", "root", "endings", "skipped_folders", "skip_undecodable", "pad", "crop_pct")
_HELD_OUT = ("val_percent", "val_seed")
_CROPS = ("crop_scale", "crop_ratio", "interpolation", "flip", "jitter")
_OF_PRESET = ("data.image_size", "backbone.windows.size", *(f"data.{key}" for key in _CROPS))
"""Keys of a run that a preset replaces; it describes the model of a file of weights with others."""


def with_init(config: Config, path: Path) -> Config:
    """``config`` with the backbone, channels and normalisation of the run that wrote the checkpoint ``path``, but for
    keys that are typed; in fine-tuning also with its data set, image size and, without a preset, recipe. Of a file of
    weights with what it shows (:func:`~dmjd.builders.weights.described_model`), unless ``backbone=NAME`` is typed.

    A configuration that was not made from overrides stays as it is.

    Raises:
        ConfigError: for images of other channels. CheckpointError: for a file that cannot be read.
    """
    if config.typed is None:
        return config
    typed = {name.partition("=")[0] for name in config.typed}
    if path.is_file():
        if "backbone" in typed:
            return config
        stored = _stored_in(path, config, typed)
    else:
        stored = from_yaml_of_run(read_file(path / CONFIG), path / CONFIG)
        stored = RunFolder(path.parent.parent).with_stored_data(stored)
    if isinstance(config, FinetuneConfig) and not {"preset", "recipe"} & typed and stored.recipe != "none":
        # published settings do not fit few images
        warmup = config.optim.warmup_epochs if "optim.warmup_epochs" in typed else None
        config = replace(config, recipe=stored.recipe, optim=replace(config.optim, warmup_epochs=warmup))
    presets = [name.partition("=")[2] for name in config.typed or () if name.startswith("preset=")]
    of_preset = {key for preset in presets for key in keys_of_preset(preset)}
    given = typed | of_preset.intersection(_OF_PRESET)
    data = _data(
        config.data, stored.data, {key.removeprefix("data.") for key in given if key.startswith("data.")}, typed
    )
    if "backbone" in of_preset - typed:
        other = ", or preset=own_photos" if isinstance(config, FinetuneConfig) else ""
        _check_size(presets[-1], config.backbone, config.init, stored.backbone, other)
    if data.channels != stored.data.channels:
        raise ConfigError(
            f"data.channels={data.channels}, but the encoder of init={config.init} reads {stored.data.channels}; "
            f"choose images with {stored.data.channels}"
        )
    if isinstance(config, FinetuneConfig) and isinstance(stored, FinetuneConfig):
        # The head of a fine-tuned model is loaded if its classes are those of the data.
        kept = [key for key in ("pooling", "norm") if f"head.{key}" not in typed | of_preset]
        config = replace(config, head=replace(config.head, **{key: getattr(stored.head, key) for key in kept}))
    return replace(
        config, data=data, backbone=config.backbone if "backbone" in typed else _backbone(config, stored, given)
    )


def _stored_in(path: Path, config: DownstreamConfig, typed: set[str]) -> TrainConfig:
    """A file of weights as the configuration of the run that might have written it."""
    own = [name.partition(".")[2] for name in typed if name.startswith("backbone.")]
    given = {key: reduce(getattr, key.split("."), config.backbone) for key in own}
    weights = "trained" if config.weights == "untrained" else config.weights
    stored = described_model(read_weights_file(path, weights), given, config.data)
    data, shown = config.data, stored.data
    stored.data = replace(data, image_size=shown.image_size, channels=shown.channels, mean=shown.mean, std=shown.std)
    return stored


def _check_size(preset: str, own: BackboneConfig, init: str | None, stored: BackboneConfig, other: str) -> None:
    """Raise ConfigError if the settings of ``preset`` are for another architecture, and warn for another size.

    other: preset for all architectures, as the end of the error.
    """
    if own.name != stored.name:
        raise ConfigError(
            f"preset={preset} is for backbone.name={own.name}, and the encoder of init={init} is {stored.name}; choose "
            f"a preset for {stored.name}{other}"
        )
    sizes = [f"embed_dim={each.embed_dim} depth={each.depth}" for each in (own, stored)]
    if sizes[0] != sizes[1]:
        logger.warning(
            "preset=%s is for an encoder of %s, and that of init=%s has %s; its learning rate, layer_decay and "
            "drop_path may not fit",
            *(preset, sizes[0], init, sizes[1]),
        )


def _backbone(config: DownstreamConfig, stored: TrainConfig, given: set[str]) -> BackboneConfig:
    keys = {key.removeprefix("backbone.") for key in given if key.startswith("backbone.")}
    backbone, own = stored.backbone, config.backbone
    sections = {name: getattr(backbone, name) for name in ("windows", "conv_stages")}
    for key in keys:
        section, _, name = key.partition(".")
        if name:
            sections[section] = replace(sections[section], **{name: getattr(getattr(own, section), name)})
    plain = {key: getattr(own, key) for key in {*_OWN, *keys} if "." not in key}
    if backbone.bias_tables == "per_block" and "bias_tables" not in keys:
        plain["bias_tables"] = "per_block"  # its tables differ, so they cannot be shared
    return replace(backbone, **sections, **plain)


def _data(own: DataConfig, stored: DataConfig, given: set[str], typed: set[str]) -> DataConfig:
    """``own`` with the values of ``stored`` for the normalisation; in fine-tuning also image size and data set, unless
    one of the two has annotations of pixels or objects."""
    taken = {"mean", "std", "channels"}
    if isinstance(own, DenseDataConfig) or isinstance(stored, DenseDataConfig):
        return replace(own, **{key: getattr(stored, key) for key in taken - given})
    taken.add("image_size")
    if "data" in typed and own.name != stored.name:
        if own.name not in ("folder", "shards"):  # these convert to the run's channels
            taken.remove("channels")
    else:
        taken |= {*_DATA_SET}
        if "root" not in given or _same_folder(own.root, stored.root):
            taken |= {*_HELD_OUT}
        if stored.name in AUTO:  # small images, whose group has crops for them
            taken |= {*_CROPS}
    return replace(own, **{key: getattr(stored, key) for key in taken - given})


def _same_folder(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)
