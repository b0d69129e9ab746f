"""Labelled images whose features ``dmjd predict`` compares with: those of a run, or of a file of ``dmjd embed``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmjd.errors import ConfigError, DataError
from dmjd.explore.embed import digest_of, preparation
from dmjd.explore.embeddings import embeddings_at, read_embeddings

if TYPE_CHECKING:
    from dmjd.evaluate.encoder import FrozenEncoder
    from dmjd.evaluate.features import Features
    from dmjd.explore.embeddings import Embeddings
    from dmjd.explore.predict import PredictConfig

logger = logging.getLogger("dmjd")


def bank_of_run(frozen: FrozenEncoder, config: PredictConfig) -> tuple[Features, list[str]]:
    """Features of the labelled training images of the run, and the names of their classes."""
    from dmjd.data.build import check_labels, resolve_auto
    from dmjd.evaluate.encoder import OF_DATA_SET
    from dmjd.evaluate.validation import class_names

    if frozen.path.is_file():
        raise ConfigError(
            f"checkpoint={config.checkpoint} is a file without a classifier; add labelled=FILE, a file of "
            "dmjd embed with labelled images"
        )
    own = resolve_auto(frozen.trained.data)
    data = replace(frozen.data, **{key: getattr(own, key) for key in ("name", *OF_DATA_SET)})
    labelled = replace(frozen, data=data)
    images = labelled.dataset("train")
    cure = "; or name labelled images with labelled=FILE, which dmjd embed writes"
    try:
        check_labels(images, f"{labelled.source}: the training images")
    except DataError as error:
        raise DataError(f"{error}{cure}") from error
    features = labelled.features(images, config.pooling, config.batch_size, config.workers)
    return features, class_names(images)


def bank_of_file(frozen: FrozenEncoder, config: PredictConfig) -> tuple[Features, list[str]]:
    """Features of the labelled images of a file of embeddings, and the names of their classes.

    Raises:
        ConfigError: if no encoder of the file is this one, with the same preparation of images; it names what differs.
        DataError: if the file has no labels.
    """
    import torch

    from dmjd.evaluate.features import Features

    path = embeddings_at(config.labelled or "")
    file = read_embeddings(path)
    values = file.features[_same_encoder(file, frozen, config, path)]
    known = torch.from_numpy(file.labels >= 0)
    if not known.any():
        raise DataError(f"labelled={path} has no labels; embed images with a folder for each class")
    logger.info("kNN on %d labelled images of %s", int(known.sum()), path)
    return Features(torch.from_numpy(values)[known], torch.from_numpy(file.labels)[known]), file.classes


def _same_encoder(file: Embeddings, frozen: FrozenEncoder, config: PredictConfig, path: Path) -> str:
    """The name in ``file`` of the encoder with the weights of ``frozen`` and its preparation of images."""
    own = {"sha256": digest_of(frozen.encoder), **preparation(frozen, config.pooling)}
    recorded = file.settings.get("encoders")
    known = recorded if isinstance(recorded, dict) else {}
    found = {name: each if isinstance(each := known.get(name), dict) else {} for name in file.features}
    unlike = {name: [key for key, value in own.items() if each.get(key) != value] for name, each in found.items()}
    name = min(unlike, key=lambda each: len(unlike[each]))
    if unlike[name]:
        pairs = [_difference(key, own[key], found[name], frozen) for key in unlike[name]]
        cure = f"set {' '.join(setting for _, setting in pairs)}, or " if all(setting for _, setting in pairs) else ""
        raise ConfigError(
            f"labelled={path} was not made with this encoder: it has {'; '.join(text for text, _ in pairs)}; {cure}"
            f"embed the labelled images with dmjd embed {config.checkpoint}"
        )
    return name


def _difference(key: str, own: Any, recorded: Mapping[str, Any], frozen: FrozenEncoder) -> tuple[str, str]:
    """How the encoder of a file differs from ``frozen`` in ``key``, and the setting of equal ones, empty if unknown."""
    if key != "sha256":
        value = recorded.get(key)
        setting = f"pooling={value}" if key == "pooling" and value in ("mean", "cls") else ""
        return f"{key} {str(value)[:40]}, not {own}", setting
    weights = recorded.get("weights")
    same_step = recorded.get("step") == frozen.step
    if same_step and weights in ("trained", "ema", "student") and weights != frozen.weights:
        return f"weights {weights}, not {frozen.weights}", f"weights={weights}"
    return "other weights", ""
