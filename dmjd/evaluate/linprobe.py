"""``dmjd linprobe``: linear probe of frozen features with MAE's recipe (:mod:`dmjd.evaluate.probe`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dmjd.config import EvaluationConfig
from dmjd.config.fields import number, numbers, positive
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import Column, Context, Evaluation, Scores

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

    epochs: Training epochs of the probe.
    warmup_epochs: Epochs of linear learning-rate warm-up.
    base_lr: Base learning rate per 256 images; the peak learning rate is base_lr * batch_size / 256.
    batch_size: Images per step.
    augment: Train on a new random crop and flip of each image in every epoch. false: compute the features once.
    crop_scale: Smallest and largest area of the random crop, as fractions of the image's area. data.crop_scale
        belongs to pre-training and is ignored here.
    seed: Random seed of initialisation, sample order and crops.
    """

    epochs: int = positive(90)
    warmup_epochs: int = number(10, least=0)
    base_lr: float = positive(0.1)
    batch_size: int = positive(16384)
    augment: bool = True
    crop_scale: list[float] = numbers(0.08, 1.0, length=2, above=0, most=1)
    seed: int = number(0, least=0, below=2**32)

    def check(self) -> None:
        least, greatest = self.crop_scale
        if least > greatest:
            raise ConfigError(f"crop_scale must be [smallest,largest], got {self.crop_scale}")
        if self.warmup_epochs >= self.epochs:
            raise ConfigError(f"warmup_epochs must be below epochs={self.epochs}, got {self.warmup_epochs}")


def run(context: Context[LinprobeConfig]) -> Scores:
    """Train a linear classifier on the training images and test it."""
    from dmjd.evaluate.features import FEATURE_BATCH
    from dmjd.evaluate.probe import CachedFeatures, linear_probe

    config, frozen = context.config, context.frozen
    train, test = context.dataset("train", config.train_images), context.dataset("test")
    augmented = _augmented(frozen, train, config) if config.augment else None
    images = len(train) if augmented is None else len(augmented)
    if not 2 <= config.batch_size <= images:
        raise ConfigError(f"batch_size must be between 2 and the {images} training images, got {config.batch_size}")
    queries = frozen.features(test, config.pooling, FEATURE_BATCH, config.workers)
    source = augmented
    if source is None:
        source = CachedFeatures(frozen.features(train, config.pooling, FEATURE_BATCH, config.workers), seed=config.seed)
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
        **context.image_settings(),
        "seed": config.seed,
        "epochs": config.epochs,
        "warmup_epochs": config.warmup_epochs,
        "batch_size": config.batch_size,
        "lr": result.lr,
    }
    if config.augment:
        crops = {key: getattr(frozen.data, key) for key in ("crop_ratio", "interpolation", "flip")}
        settings |= {"crop_scale": config.crop_scale, **crops}
    return Scores({"top1": result.top1, "final_loss": result.final_loss}, settings)


def _augmented(frozen: FrozenEncoder, train: ImageDataset, config: LinprobeConfig) -> FeatureSource:
    from dmjd.builders.augment import flip_by_coin
    from dmjd.data.build import training_batches
    from dmjd.data.loader import make_loader
    from dmjd.data.waiting import Limit
    from dmjd.evaluate.features import FEATURE_BATCH, encode
    from dmjd.evaluate.probe import RecomputedFeatures
    from dmjd.ops import make_key

    data = replace(frozen.data, crop_scale=config.crop_scale)
    # A chunk is no larger than the data set, so that small ones are accepted; the images it drops vary by epoch.
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


EVALUATION = Evaluation(
    "linprobe",
    "Linear probe: top-1 accuracy of a linear classifier on frozen features",
    LinprobeConfig,
    run,
    {"top1": Column("Lin.", "linear-probing top-1")},
)
