"""``dmjd linprobe``: linear probe of frozen features with MAE's recipe (:mod:`dmjd.evaluate.probe`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dmjd.config import EvaluationConfig
from dmjd.config.fields import number, numbers, positive
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import Column, Context, Evaluation, Scores, references

if TYPE_CHECKING:
    from torch import Tensor

    from dmjd.data.batch import Batch
    from dmjd.data.dataset import ImageDataset
    from dmjd.evaluate.encoder import FrozenEncoder
    from dmjd.evaluate.probe import FeatureSource


@dataclass
class LinprobeConfig(EvaluationConfig):
    """Linear probe as in MAE: BatchNorm without affine parameters and a linear layer on frozen features, trained with
    LARS.

    Where null, values follow from the number of training images, and on ImageNet are MAE's (docs/evaluation.md).

    epochs: Training epochs of the probe. null: 90, or as many as give 1000 steps.
    warmup_epochs: Epochs of linear learning-rate warm-up. null: a ninth of the epochs.
    base_lr: Base learning rate per 256 images; the peak learning rate is base_lr * batch_size / 256. null: a peak of
        6.4 at the batch size that follows from the images.
    batch_size: Images per step. null: 64 to 16384, so that an epoch has at least 78 steps where it can.
    augment: Train on a new random crop and flip of each image in every epoch. false: compute the features once. null:
        true from 100,000 training images on.
    crop_scale: Smallest and largest area of the random crop, as fractions of the image's area. data.crop_scale
        belongs to pre-training and is ignored here.
    seed: Random seed of initialisation, sample order and crops.
    """

    epochs: int | None = positive(None)
    warmup_epochs: int | None = number(None, least=0)
    base_lr: float | None = positive(None)
    batch_size: int | None = positive(None)
    augment: bool | None = None
    crop_scale: list[float] = numbers(0.08, 1.0, length=2, above=0, most=1)
    seed: int = number(0, least=0, below=2**32)

    def check(self) -> None:
        least, greatest = self.crop_scale
        if least > greatest:
            raise ConfigError(f"crop_scale must be [smallest,largest], got {self.crop_scale}")
        if self.epochs is not None and self.warmup_epochs is not None:
            _check_warmup(self.warmup_epochs, self.epochs)


def _check_warmup(warmup_epochs: int, epochs: int) -> None:
    if warmup_epochs >= epochs:
        raise ConfigError(f"warmup_epochs must be below epochs={epochs}, got {warmup_epochs}")


AUGMENTED_FROM = 100_000
"""Training images from which on augment=null is true."""


def run(context: Context[LinprobeConfig]) -> Scores:
    """Train a linear classifier on the training images and test it."""
    from dmjd.evaluate.features import FEATURE_BATCH
    from dmjd.evaluate.probe import CachedFeatures, linear_probe, recipe_for

    config, frozen = context.config, context.frozen
    train, test = context.dataset("train", config.train_images), context.dataset("test")
    augment = len(train) >= AUGMENTED_FROM if config.augment is None else config.augment
    augmented = _augmented(frozen, train, config) if augment else None
    images = len(train) if augmented is None else len(augmented)
    if images < 2:
        raise ConfigError(f"a probe needs at least 2 training images, got {images}; use dmjd knn")
    recipe = recipe_for(images)
    given = {key: value for key in recipe._fields if (value := getattr(config, key)) is not None}
    if "epochs" in given:
        recipe = recipe._replace(warmup_epochs=given["epochs"] // 9)
    recipe = recipe._replace(**given)
    _check_warmup(recipe.warmup_epochs, recipe.epochs)
    if not 2 <= recipe.batch_size <= images:
        raise ConfigError(f"batch_size must be between 2 and the {images} training images, got {recipe.batch_size}")
    queries = frozen.features(test, config.pooling, FEATURE_BATCH, config.workers)
    source = augmented
    if source is None:
        source = CachedFeatures(frozen.features(train, config.pooling, FEATURE_BATCH, config.workers), seed=config.seed)
    result = linear_probe(
        source,
        queries,
        train.num_classes,
        **recipe._asdict(),
        seed=config.seed,
        device=frozen.device,
    )
    settings = {
        "pooling": config.pooling,
        "augment": augment,
        "train_images": images,
        **context.image_settings(),
        "seed": config.seed,
        "epochs": recipe.epochs,
        "warmup_epochs": recipe.warmup_epochs,
        "batch_size": recipe.batch_size,
        "lr": result.lr,
    }
    if augment:
        crops = {key: getattr(frozen.data, key) for key in ("crop_ratio", "interpolation", "flip")}
        settings |= {"crop_scale": config.crop_scale, **crops}
    scores = {"top1": result.top1, "balanced_top1": result.balanced_top1, "final_loss": result.final_loss}
    return Scores({**scores, **references(train, test)}, settings)


def _augmented(frozen: FrozenEncoder, train: ImageDataset, config: LinprobeConfig) -> FeatureSource:
    from dmjd.builders.augment import flip_by_coin
    from dmjd.data.build import training_batches
    from dmjd.data.loader import make_loader
    from dmjd.data.waiting import Limit
    from dmjd.evaluate.encoder import loader_workers
    from dmjd.evaluate.features import FEATURE_BATCH, encode
    from dmjd.evaluate.probe import RecomputedFeatures
    from dmjd.ops import make_key

    data = replace(frozen.data, crop_scale=config.crop_scale)
    # A chunk is no larger than the data set, so that small ones are accepted; the images it drops vary by epoch.
    chunk = min(FEATURE_BATCH, len(train))
    batches = training_batches(data, train, chunk, config.seed)

    workers = loader_workers(len(train), chunk) if config.workers is None else config.workers

    def epoch_batches(epoch: int) -> Iterable[Batch]:
        first = epoch * batches.steps_per_epoch
        stop, limit = first + batches.steps_per_epoch, Limit(data.timeout)
        return make_loader(batches, first, stop, workers, pin_memory=False, limit=limit)

    def encode_batch(batch: Batch, epoch: int) -> Tensor:
        batch = batch.to(frozen.device)
        images = (
            flip_by_coin(batch.images, batch.sample_ids, make_key(config.seed, epoch)) if data.flip else batch.images
        )
        return encode(frozen.encoder, images, mean=data.mean, std=data.std, pooling=config.pooling)

    return RecomputedFeatures(epoch_batches, encode_batch, images_per_epoch=batches.steps_per_epoch * chunk)


EVALUATION = Evaluation(
    "linprobe",
    "Linear probe: top-1 accuracy of a linear classifier on frozen features",
    LinprobeConfig,
    run,
    {"top1": Column("Lin.", "linear-probing top-1")},
)
