"""``dmjd linprobe``: a classifier on frozen features, by a published protocol (:data:`PROTOCOLS`) or by the number of
images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dmjd.config import BackboneConfig, EvaluationConfig
from dmjd.config.fields import choice, number, numbers, positive
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import Column, Context, Evaluation, Scores, references

if TYPE_CHECKING:
    from torch import Tensor

    from dmjd.config import DataConfig
    from dmjd.data.batch import Batch
    from dmjd.data.dataset import ImageDataset
    from dmjd.evaluate.encoder import FrozenEncoder
    from dmjd.evaluate.probe import FeatureSource, ProbeResult, Recipe


class Protocol(NamedTuple):
    """Published settings of a probe on ImageNet-1k.

    head: "linear" (BatchNorm without affine parameters, a linear layer, LARS), "layers" (BEiT's linear layer on each
        block, AdamW) or "attentive" (a cross-attention, AdamW).
    batch_size, base_lr, epochs, warmup_epochs: see :class:`~dmjd.evaluate.probe.Recipe`; those of ViT-B.
    large: base_lr and epochs of ViT-L and ViT-H. None: as ViT-B.
    interpolation: of the random crops.
    single_draw: of the random crops, see :class:`~dmjd.data.crops.RandomResizedCrop`.
    """

    head: str
    batch_size: int
    base_lr: float
    epochs: int
    warmup_epochs: int
    large: tuple[float, int] | None = None
    interpolation: str = "bicubic"
    single_draw: bool = True


PROTOCOLS = {
    "mae": Protocol("linear", 16384, 0.1, 90, 10, large=(0.1, 50)),
    "convmae": Protocol("linear", 4096, 0.1, 90, 10, large=(0.05, 50)),
    "dmjd": Protocol("linear", 4096, 0.1, 90, 10, large=(0.05, 50)),
    "beit": Protocol("layers", 1024, 1e-3, 100, 0, interpolation="bilinear", single_draw=False),
    "attentive": Protocol("attentive", 1024, 2.5e-4, 20, 0, single_draw=False),
}
"""The repositories facebookresearch/mae, Alpha-VL/ConvMAE, mx-mark/DMJD (main_linprobe.py and READMEs), microsoft/unilm
(beit/run_linear_eval.py with 8 GPUs) and facebookresearch/jepa (configs/evals/vitl16_in1k.yaml)."""

LARGE = {(1024, 24), (1280, 32), (1024, 23)}
"""Width and depth of ViT-L, ViT-H, and stage 3 of ConvViT-L."""
AUGMENTED_FROM = 100_000
"""Training images from which on augment=null is true."""
CACHE_BYTES = 2 << 30
"""Most bytes of tokens or features of layers that are kept without augmentation."""


@dataclass
class LinprobeConfig(EvaluationConfig):
    """A linear or attentive classifier on frozen features.

    null: the protocol's value; with protocol=auto a value that depends on the number of training images, and on
    ImageNet MAE's (docs/evaluation.md).

    protocol: auto: MAE's linear probe, with values that depend on the number of images. mae, convmae, dmjd: the
        published linear probes. beit: a linear layer on each block; the best on the test images is reported. attentive:
        V-JEPA's cross-attention from one query. cached: features computed once, linear layers at all rates in one pass.
    pooling: Image feature. mean: mean of the patch tokens. cls: class token. auto: mean; with protocol=mae the class
        token if there is one. mean and cls need protocol=auto, mae or cached.
    epochs: Training epochs of the probe. null: the protocol's; auto: 90, or as many as give 1000 steps.
    warmup_epochs: Epochs of linear learning-rate warm-up. null: the protocol's; auto: a ninth of the epochs.
    base_lr: Base learning rate per 256 images; the peak learning rate is base_lr * batch_size / 256. null: the
        protocol's; auto: a peak of 6.4 at the default batch_size.
    batch_size: Images per step. null: the protocol's; auto: 64 to 16384, for at least 78 steps per epoch if possible.
    augment: Train on a new random crop and flip of each image in every epoch. false: compute the features once. null:
        true for a published protocol, else true for at least 100,000 training images.
    crop_scale: Smallest and largest area of the random crop, as fractions of the image's area. data.crop_scale
        belongs to pre-training and is ignored here.
    rates: (protocol=cached) Peak learning rates of SGD; the one that is best on a held-out tenth of the training images
        is used. null: 13 from 0.001 to 10.
    test_best: (protocol=cached) Also report the highest top-1 of all rates on the test images, as "best on test".
    seed: Random seed of initialisation, sample order and crops.
    """

    protocol: str = choice("auto", *PROTOCOLS, "cached")
    pooling: str = choice("auto", "mean", "cls")
    epochs: int | None = positive(None)
    warmup_epochs: int | None = number(None, least=0)
    base_lr: float | None = positive(None)
    batch_size: int | None = positive(None)
    augment: bool | None = None
    crop_scale: list[float] = numbers(0.08, 1.0, length=2, above=0, most=1)
    rates: list[float] | None = positive(None)
    test_best: bool = False
    seed: int = number(0, least=0, below=2**32)

    def check(self) -> None:
        least, greatest = self.crop_scale
        if least > greatest:
            raise ConfigError(f"crop_scale must be [smallest,largest], got {self.crop_scale}")
        if self.epochs is not None and self.warmup_epochs is not None:
            _check_warmup(self.warmup_epochs, self.epochs)
        if self.pooling != "auto" and self.protocol not in ("auto", "mae", "cached"):
            raise ConfigError(
                f"protocol={self.protocol} sets the feature itself: leave pooling={self.pooling} out, or use "
                "protocol=auto, mae or cached"
            )
        self._check_cached()

    def _check_cached(self) -> None:
        if self.protocol != "cached":
            for key, given in (("rates", self.rates is not None), ("test_best", self.test_best)):
                if given:
                    raise ConfigError(f"{key} needs protocol=cached, got protocol={self.protocol}")
            return
        if self.rates == []:
            raise ConfigError("rates must hold at least one number, got []")
        if self.augment:
            raise ConfigError("protocol=cached computes the features once: remove augment=true, or use protocol=auto")
        if self.base_lr is not None:
            raise ConfigError(f"protocol=cached has several learning rates: set rates, not base_lr={self.base_lr:g}")
        if self.warmup_epochs is not None:
            raise ConfigError(f"protocol=cached has no warm-up: remove warmup_epochs={self.warmup_epochs}")


def _check_warmup(warmup_epochs: int, epochs: int) -> None:
    if warmup_epochs >= epochs:
        raise ConfigError(f"warmup_epochs must be below epochs={epochs}, got {warmup_epochs}; set warmup_epochs")


def run(context: Context[LinprobeConfig]) -> Scores:
    """Train a classifier on the training images and test it."""
    if context.config.protocol == "cached":
        from dmjd.evaluate.sweep import cached_scores

        return cached_scores(context)
    config, frozen = context.config, context.frozen
    protocol = PROTOCOLS.get(config.protocol)
    train, test = context.dataset("train", config.train_images), context.dataset("test")
    pooling = _pooling(config, frozen)
    augment = config.augment
    if augment is None:
        augment = protocol is not None or len(train) >= AUGMENTED_FROM
    augmented = _augmented(frozen, train, config, pooling) if augment else None
    images = len(train) if augmented is None else len(augmented)
    recipe = _recipe(config, frozen.trained.backbone, images)
    results = _results(context, train, test, pooling, augmented, recipe)
    best = max(range(len(results)), key=lambda number: results[number].top1)
    result = results[best]
    settings: dict[str, Any] = {} if protocol is None else {"protocol": config.protocol}
    settings |= {
        "pooling": _pooling_name(pooling, frozen),
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
        crop = _crop_data(frozen, config)
        crops = {key: getattr(crop, key) for key in ("crop_ratio", "interpolation", "flip")}
        settings |= {"crop_scale": config.crop_scale, **crops}
    scores: dict[str, float | None] = {
        "top1": result.top1,
        "balanced_top1": result.balanced_top1,
        "final_loss": result.final_loss,
    }
    if pooling == "layers":
        settings["selection"] = f"best of {len(results)} layers on the test images"
        scores |= {"best_layer": best + 1}
        scores |= {f"top1_layer_{number}": each.top1 for number, each in enumerate(results, 1)}
    return Scores({**scores, **references(train, test)}, settings)


def _pooling(config: LinprobeConfig, frozen: FrozenEncoder) -> str:
    """The feature that is trained on, as for :func:`~dmjd.evaluate.features.encode`."""
    protocol = PROTOCOLS.get(config.protocol)
    if protocol is None:
        return "mean" if config.pooling == "auto" else config.pooling
    if protocol.head != "linear":
        return {"layers": "layers", "attentive": "tokens"}[protocol.head]
    has_cls = config.protocol == "mae" and frozen.encoder.num_prefix_tokens > 0
    if config.pooling == "cls" or (config.pooling == "auto" and has_cls):
        return "cls"
    return "fc_norm"  # of the published codes with --global_pool


def _pooling_name(pooling: str, frozen: FrozenEncoder) -> str:
    layers = "cls and mean" if frozen.encoder.num_prefix_tokens else "mean"
    return {"fc_norm": "mean", "layers": layers, "tokens": "attention"}.get(pooling, pooling)


def _recipe(config: LinprobeConfig, backbone: BackboneConfig, images: int) -> Recipe:
    """The values of the configuration, of its protocol or of the number of ``images``, in this order.

    Raises:
        ConfigError: if there are too few images, or the warm-up is too long.
    """
    from dmjd.evaluate.probe import Recipe, recipe_for

    if images < 2:
        raise ConfigError(f"a probe needs at least 2 training images, got {images}; use dmjd knn")
    given = {key: value for key in Recipe._fields if (value := getattr(config, key)) is not None}
    protocol = PROTOCOLS.get(config.protocol)
    if protocol is None:
        recipe = recipe_for(images)
        if "epochs" in given:
            recipe = recipe._replace(warmup_epochs=given["epochs"] // 9)
    else:
        base_lr, epochs = protocol.base_lr, protocol.epochs
        if protocol.large is not None and (backbone.embed_dim, backbone.depth) in LARGE:
            base_lr, epochs = protocol.large
        recipe = Recipe(protocol.batch_size, base_lr, epochs, protocol.warmup_epochs)
    recipe = recipe._replace(**given)
    _check_warmup(recipe.warmup_epochs, recipe.epochs)
    if protocol is not None and recipe.batch_size > images and config.batch_size is None:
        raise ConfigError(
            f"protocol={config.protocol} has batch_size={recipe.batch_size}, and there are {images} training images; "
            f"set batch_size (base_lr is per 256 images), or use protocol=auto"
        )
    if not 2 <= recipe.batch_size <= images:
        raise ConfigError(f"batch_size must be between 2 and the {images} training images, got {recipe.batch_size}")
    return recipe


def _results(
    context: Context[LinprobeConfig],
    train: ImageDataset,
    test: ImageDataset,
    pooling: str,
    augmented: FeatureSource | None,
    recipe: Recipe,
) -> list[ProbeResult]:
    """Train and test the head of the protocol; of BEiT's the result of each layer."""
    import torch

    from dmjd.evaluate.attentive import AttentiveHead
    from dmjd.evaluate.features import FEATURE_BATCH
    from dmjd.evaluate.probe import CachedFeatures, LayerHeads, linear_probe, train_and_test

    config, frozen, classes = context.config, context.frozen, train.num_classes
    device, seed, several = frozen.device, config.seed, pooling in ("layers", "tokens")
    dim, number = _shape(frozen, pooling) if several else (0, 0)
    source = augmented
    if source is None:
        dtype = torch.float16 if pooling == "tokens" else torch.float32
        needed = len(train) * dim * number * dtype.itemsize
        if needed > CACHE_BYTES:
            raise ConfigError(
                f"augment=false would keep {needed / 2**30:.1f} GiB of features, at most {CACHE_BYTES >> 30}; use "
                "augment=true, or fewer train_images"
            )
        source = CachedFeatures(frozen.features(train, pooling, FEATURE_BATCH, config.workers, dtype), seed=seed)
    if not several:
        queries = frozen.features(test, pooling, FEATURE_BATCH, config.workers)
        return [linear_probe(source, queries, classes, **recipe._asdict(), seed=seed, device=device)]
    chunks = frozen.encoded(test, pooling, FEATURE_BATCH, config.workers)
    head: LayerHeads | AttentiveHead
    if pooling == "layers":
        head = LayerHeads(number, dim, classes, seed=seed).to(device)
        options: dict[str, Any] = {"constant_epochs": True}
    else:
        head = AttentiveHead(dim, _heads(frozen), classes, seed=seed).to(device)
        options = {"clip": 1.0, "micro_batch": FEATURE_BATCH}
    return train_and_test(head, head.optimizer(), source, chunks, classes, recipe, device=device, **options)


def _shape(frozen: FrozenEncoder, pooling: str) -> tuple[int, int]:
    """Width of a feature, and number of layers or tokens of an image."""
    import torch

    from dmjd.evaluate.features import encode

    data = frozen.data
    image = torch.zeros(1, *frozen.size, data.channels, dtype=torch.uint8, device=frozen.device)
    features = encode(frozen.encoder, image, mean=data.mean, std=data.std, pooling=pooling)
    return features.shape[2], features.shape[1]


def _heads(frozen: FrozenEncoder) -> int:
    """Attention heads of the last block."""
    backbone = frozen.trained.backbone
    return backbone.windows.num_heads[-1] if backbone.name == "swin" else backbone.num_heads


def _crop_data(frozen: FrozenEncoder, config: LinprobeConfig) -> DataConfig:
    """The data settings of the random crops: ``crop_scale`` and, unless it is typed, the protocol's interpolation."""
    data, protocol = replace(frozen.data, crop_scale=config.crop_scale), PROTOCOLS.get(config.protocol)
    if protocol is None or "interpolation" in (config.data_keys or ()):
        return data
    return replace(data, interpolation=protocol.interpolation)


def _augmented(frozen: FrozenEncoder, train: ImageDataset, config: LinprobeConfig, pooling: str) -> FeatureSource:
    from dmjd.builders.augment import flip_by_coin
    from dmjd.data.build import training_batches
    from dmjd.data.crops import RandomResizedCrop
    from dmjd.data.loader import make_loader
    from dmjd.data.waiting import Limit
    from dmjd.evaluate.encoder import loader_workers
    from dmjd.evaluate.features import FEATURE_BATCH, encode
    from dmjd.evaluate.probe import RecomputedFeatures
    from dmjd.ops import make_key

    data, protocol = _crop_data(frozen, config), PROTOCOLS.get(config.protocol)
    # A chunk is no larger than the data set, so that small ones are accepted; the images it drops vary by epoch.
    chunk = min(FEATURE_BATCH, len(train))
    batches = training_batches(data, train, chunk, config.seed)
    if protocol is not None:
        assert isinstance(batches.crop, RandomResizedCrop)
        batches.crop = replace(batches.crop, single_draw=protocol.single_draw)

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
        return encode(frozen.encoder, images, mean=data.mean, std=data.std, pooling=pooling)

    return RecomputedFeatures(epoch_batches, encode_batch, images_per_epoch=batches.steps_per_epoch * chunk)


EVALUATION = Evaluation(
    "linprobe",
    "Linear probe: top-1 accuracy of a linear classifier on frozen features",
    LinprobeConfig,
    run,
    {"top1": Column("Lin.", "linear-probing top-1")},
)
