"""``dmjd knn`` and ``dmjd linprobe``: judge the frozen encoder of a checkpoint and keep the score in its run folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dmjd.builders.augment import flip_by_coin
from dmjd.config import KnnConfig, LinprobeConfig
from dmjd.data.batch import Batch
from dmjd.data.build import training_batches
from dmjd.data.dataset import ImageDataset
from dmjd.data.loader import make_loader
from dmjd.data.waiting import Limit
from dmjd.errors import ConfigError
from dmjd.evaluate.encoder import FrozenEncoder, load_encoder
from dmjd.evaluate.features import encode
from dmjd.evaluate.knn import knn_accuracy, require_neighbours
from dmjd.evaluate.linprobe import linear_probe, require_steps
from dmjd.evaluate.sources import CachedFeatures, FeatureSource, RecomputedFeatures
from dmjd.files import obstacle, standing_place
from dmjd.ops import make_key
from dmjd.runs.folder import RunFolder

FEATURE_BATCH = 256
"""Images per forward pass; it decides speed and memory, not results."""


def knn(config: KnnConfig) -> dict[str, Any]:
    """Weighted kNN of the test images among the training images; the record that was kept."""
    frozen = load_encoder(config)
    scores = _place_of_scores(config, frozen)
    train, test = frozen.dataset("train", config.train_images), frozen.dataset("test")
    require_neighbours(config.neighbours, len(train))
    bank, queries = (frozen.features(data, config.pooling, config.batch_size, config.workers) for data in (train, test))
    result = knn_accuracy(
        bank, queries, train.num_classes, device=frozen.device, k=config.neighbours, temperature=config.temperature
    )
    settings = {
        "pooling": config.pooling,
        "k": result.k,
        "temperature": result.temperature,
        "train_images": len(train),
        **_pixels(frozen),
    }
    return _record(frozen, scores, "knn", config.weights, {"top1": result.top1, "top5": result.top5}, settings)


def linprobe(config: LinprobeConfig) -> dict[str, Any]:
    """A linear classifier on frozen features; the record that was kept."""
    least, greatest = config.crop_scale
    if least > greatest:
        raise ConfigError(f"crop_scale must be least <= greatest, got {config.crop_scale}")
    frozen = load_encoder(config)
    scores = _place_of_scores(config, frozen)
    train, test = frozen.dataset("train", config.train_images), frozen.dataset("test")
    augmented = _augmented(frozen, train, config) if config.augment else None
    images = len(train) if augmented is None else len(augmented)
    require_steps(images, epochs=config.epochs, batch_size=config.batch_size, warmup_epochs=config.warmup_epochs)
    queries = frozen.features(test, config.pooling, FEATURE_BATCH, config.workers)
    source = _cached(frozen, train, config) if augmented is None else augmented
    result = linear_probe(
        source,
        queries,
        train.num_classes,
        epochs=config.epochs,
        batch_size=config.batch_size,
        base_lr=config.base_lr,
        warmup_epochs=config.warmup_epochs,
        seed=config.seed,
        device=frozen.device,
    )
    settings = {
        "pooling": config.pooling,
        "augment": config.augment,
        "train_images": images,
        **_pixels(frozen),
        "seed": config.seed,
        "epochs": result.epochs,
        "warmup_epochs": config.warmup_epochs,
        "batch_size": result.batch_size,
        "lr": result.lr,
    }
    if config.augment:
        settings |= {"crop_scale": config.crop_scale, **_crops(frozen)}
    found = {"top1": result.top1, "final_loss": result.final_loss}
    return _record(frozen, scores, "linprobe", config.weights, found, settings)


def _cached(frozen: FrozenEncoder, train: ImageDataset, config: LinprobeConfig) -> FeatureSource:
    features = frozen.features(train, config.pooling, FEATURE_BATCH, config.workers)
    return CachedFeatures(features, seed=config.seed)


def _augmented(frozen: FrozenEncoder, train: ImageDataset, config: LinprobeConfig) -> FeatureSource:
    data = replace(frozen.data, crop_scale=config.crop_scale)
    # A chunk no larger than the data set, so that small ones are not refused; what it drops varies by epoch.
    chunk = min(FEATURE_BATCH, len(train))
    batches = training_batches(data, train, chunk, config.seed)

    def epoch_batches(epoch: int) -> Iterable[Batch]:
        first = epoch * batches.steps_per_epoch
        stop, limit = first + batches.steps_per_epoch, Limit(data.timeout)
        return make_loader(batches, first, stop, config.workers, pin_memory=False, limit=limit)

    def encode_batch(batch: Batch, epoch: int) -> Tensor:
        batch = batch.to(frozen.device)
        images = (
            flip_by_coin(batch.images, batch.sample_ids, make_key(config.seed, epoch)) if data.flip else batch.images
        )
        return encode(frozen.encoder, images, mean=data.mean, std=data.std, pooling=config.pooling)

    return RecomputedFeatures(epoch_batches, encode_batch, images_per_epoch=batches.steps_per_epoch * chunk)


def _pixels(frozen: FrozenEncoder) -> dict[str, Any]:
    """Settings that tell what the encoder is shown."""
    return {"data": frozen.source, **{key: getattr(frozen.data, key) for key in ("crop_pct", "mean", "std")}}


def _crops(frozen: FrozenEncoder) -> dict[str, Any]:
    """Settings that tell how images are augmented besides, which runs do differently."""
    return {key: getattr(frozen.data, key) for key in ("crop_ratio", "interpolation", "flip")}


def _place_of_scores(config: KnnConfig | LinprobeConfig, frozen: FrozenEncoder) -> RunFolder:
    """Known to be writable before hours are spent on a score."""
    folder = frozen.run if config.output is None else RunFolder(Path(config.output))
    if what := obstacle(folder.evaluations, folder=True):
        raise ConfigError(
            f"{folder.evaluations} is {what}, where scores need a folder; move it away, or name a folder for the score "
            "with output=FOLDER"
        )
    standing = standing_place(folder.path)
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise ConfigError(f"{standing} cannot be written to; name a folder for the score with output=FOLDER")
    return folder


def _record(
    frozen: FrozenEncoder, place: RunFolder, verb: str, weights: str, scores: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    if frozen.path.is_file():
        settings |= {"checkpoint": frozen.path.name}
    record = {"verb": verb, "weights": weights, "step": frozen.step, **scores, "settings": settings}
    # Scores under other settings are other scores: none may overwrite another.
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    place.write_evaluation(f"{verb}-{weights}-step{frozen.step:08d}-{digest}", record)
    return record


VERBS: dict[str, Callable[[Any], dict[str, Any]]] = {"knn": knn, "linprobe": linprobe}
