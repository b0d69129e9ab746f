"""``dmjd linprobe protocol=cached``: linear classifiers at several learning rates, trained together on features that
were computed once.

The protocol of DINOv2's linear evaluation (Oquab et al., 2023): a linear layer per learning rate, 13 rates, SGD with
momentum 0.9, half a cosine without warm-up. Different from theirs: features are not augmented; BatchNorm without affine
parameters precedes the layer, as in MAE, with the statistics of all training images, which are constant here; the rate
is chosen on a tenth of the training images, not on the test images, and a layer is then trained with it on all of them,
as for CLIP's linear probes (Radford et al., 2021).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dmjd.builders.schedules import cosine
from dmjd.errors import ConfigError, DataError
from dmjd.evaluate.features import FEATURE_BATCH, Features, accuracies, require_labels
from dmjd.evaluate.probe import make_head
from dmjd.evaluate.registry import Context, Scores, references
from dmjd.ops.philox import Domain, keyed_bits, make_key
from dmjd.progress import Progress

if TYPE_CHECKING:
    from dmjd.evaluate.linprobe import LinprobeConfig

logger = logging.getLogger("dmjd")

RATES = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Peak learning rates. As many and as far apart as DINOv2's, which at its batch of 1024 are 4e-5 to 0.4."""

_MOMENTUM = 0.9
_EPSILON = 1e-6
_HELD_OUT_LANE = 1  # lane 0 orders the images of an epoch
_BATCHES_PER_CHUNK = 16
_LOGITS_PER_CHUNK = 1 << 24


class RateScore(NamedTuple):
    """A peak learning rate with its top-1 in per cent and cross-entropy on the held-out tenth of the training images,
    and, where asked for, its top-1 on the test images after training on all of them."""

    lr: float
    held_out_top1: float
    held_out_loss: float
    top1: float | None


class SweepResult(NamedTuple):
    """top1: per cent of the test images at the chosen rate. balanced_top1: mean of the classes' top-1. final_loss: mean
    training cross-entropy of the last epoch. lr: the chosen rate. rates: every rate, ascending."""

    top1: float
    balanced_top1: float
    final_loss: float
    lr: float
    rates: list[RateScore]


def cached_scores(context: Context[LinprobeConfig]) -> Scores:
    """:func:`cached_probe` of the frozen encoder's features."""
    config, frozen = context.config, context.frozen
    train, test = context.dataset("train", config.train_images), context.dataset("test")
    labels = torch.tensor([train.label(index) for index in range(len(train))])
    held = int(held_out_rows(labels, config.seed).sum())
    kept = len(train) - held
    batch_size = batch_size_for(kept) if config.batch_size is None else config.batch_size
    if batch_size > kept:
        raise ConfigError(
            f"batch_size must be at most {kept}, the training images without {held} that choose the learning rate, got "
            f"{batch_size}"
        )
    epochs = epochs_for(kept, batch_size) if config.epochs is None else config.epochs
    rates = sorted(set(config.rates or RATES))
    pooling = "mean" if config.pooling == "auto" else config.pooling
    bank, queries = (frozen.features(data, pooling, FEATURE_BATCH, config.workers) for data in (train, test))
    result = cached_probe(
        *(bank, queries, train.num_classes),
        rates=rates,
        epochs=epochs,
        batch_size=batch_size,
        seed=config.seed,
        device=frozen.device,
        test_best=config.test_best,
    )
    if len(rates) > 1 and result.lr in (rates[0], rates[-1]):
        logger.warning(
            "the chosen learning rate %g is the %s of rates; the best one may be beyond it",
            *(result.lr, "smallest" if result.lr == rates[0] else "largest"),
        )
    settings = {
        "protocol": "cached",
        "pooling": pooling,
        "augment": False,
        "train_images": len(train),
        **context.image_settings(),
        "seed": config.seed,
        "epochs": epochs,
        "batch_size": batch_size,
        "rates": rates,
        "chosen_by": f"{held} held-out training images",
    }
    values: dict[str, Any] = {
        "top1": result.top1,
        "balanced_top1": result.balanced_top1,
        "final_loss": result.final_loss,
        "chosen": {"lr": result.lr},
    }
    tested = [rate.top1 for rate in result.rates if rate.top1 is not None]
    if tested:
        values["top1_best_on_test"] = max(tested)
    rows = [rate._asdict() for rate in result.rates]
    values["table"] = rows if tested else [{key: row[key] for key in row if key != "top1"} for row in rows]
    return Scores({**values, **references(train, test)}, settings)


def batch_size_for(images: int) -> int:
    """The largest power of two of which an epoch has at least 78 steps, from 64 (or all images) to DINOv2's 1024."""
    fitting = 1 << max(images // 78, 1).bit_length() - 1
    return min(max(fitting, 64), 1024, images)


def epochs_for(images: int, batch_size: int) -> int:
    """10, as DINOv2, or as many as give 2000 steps."""
    return max(10, -(-2000 // (images // batch_size)))


def held_out_rows(labels: Tensor, seed: int) -> Tensor:
    """The images that choose the rate, bool ``[N]``: a tenth of each class, and at least one of a class of two or more.

    A pure function of (seed, row, number of images of the class).

    Raises:
        DataError: if no class has two images.
    """
    drawn = _shuffled(torch.arange(len(labels)), seed, epoch=0, lane=_HELD_OUT_LANE)
    drawn = drawn[labels[drawn].argsort(stable=True)]
    counts = labels.bincount()
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[drawn]]
    quota = (counts // 10).clamp(min=1) * (counts > 1)
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[drawn] = rank < quota[labels[drawn]]
    if not held.any():
        raise DataError(
            "protocol=cached chooses its learning rate on training images that it holds out, and no class has two "
            "images; use dmjd knn"
        )
    return held


def cached_probe(
    train: Features,
    test: Features,
    num_classes: int,
    *,
    rates: Sequence[float] = RATES,
    epochs: int,
    batch_size: int,
    seed: int,
    device: torch.device,
    test_best: bool = False,
) -> SweepResult:
    """Train a linear classifier at each of ``rates`` without a tenth of the training images, choose the rate that is
    best on these, train with it on all training images, and test the result; equal arguments give equal bits.

    Rates of equal top-1 on the held-out images are ordered by their cross-entropy.

    Args:
        train, test: features and labels.
        num_classes: labels are in ``[0, num_classes)``.
        rates: peak learning rates, ascending.
        epochs: passes over the training images, of each of both trainings.
        batch_size: images per step, at most those that are not held out.
        seed: of the held-out images, the initial weights (the same at every rate) and the order of the images.
        device: where to train; it holds the features where they take at most half of its free memory.
        test_best: also test every rate, trained on all training images, which doubles the time. The other results do
            not depend on it.

    Raises:
        DataError: if labels are out of range, or no class has two training images.
    """
    require_labels(train.labels, num_classes)
    require_labels(test.labels, num_classes)
    held = held_out_rows(train.labels, seed)
    every, kept = torch.arange(len(train)), (~held).nonzero()[:, 0]
    assert batch_size <= len(kept)
    values = _placed(train.values, device)

    def fit(rows: Tensor, rates: Sequence[float]) -> Heads:
        return train_heads(
            *(values, train.labels, rows, num_classes),
            rates=rates,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            device=device,
        )

    hits, losses = fit(kept, rates).score(train.values[held], train.labels[held])
    correct = hits.sum(1).tolist()
    best = min(range(len(rates)), key=lambda rate: (-correct[rate], losses[rate]))
    final = fit(every, [rates[best]])
    on_test, _ = final.score(test.values, test.labels)
    top1, balanced = accuracies(on_test[0], test.labels)
    of_test: list[float | None] = [None] * len(rates)
    if test_best:
        others, _ = fit(every, rates).score(test.values, test.labels)
        of_test = [accuracies(each, test.labels)[0] for each in others]
        of_test[best] = top1
    held_out = int(held.sum())
    table = [
        RateScore(rate, 100 * right / held_out, loss, tested)
        for rate, right, loss, tested in zip(rates, correct, losses, of_test, strict=True)
    ]
    return SweepResult(top1, balanced, final.losses[0], rates[best], table)


class Heads(NamedTuple):
    """Linear layers of ``R`` learning rates on the same normalised features.

    weight: ``[R * C, D]``. bias: ``[R * C]``. mean, scale: float64 ``[D]``, of the training images: mean and
    ``1 / sqrt(variance + 1e-6)``. losses: mean training cross-entropy of the last epoch at each rate.
    """

    weight: Tensor
    bias: Tensor
    mean: Tensor
    scale: Tensor
    losses: list[float]

    def normalised(self, values: Tensor) -> Tensor:
        """``values [B, D]`` as the layers read them, on their device."""
        # In float64, which a large mean leaves enough digits.
        return ((values.to(self.mean.device).double() - self.mean) * self.scale).float()

    def logits(self, normalised: Tensor) -> Tensor:
        """``[B, D]`` -> ``[B, R, C]``; one matrix product for all rates."""
        product = torch.addmm(self.bias, normalised, self.weight.T)
        return product.view(len(normalised), len(self.losses), -1)

    def score(self, values: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
        """Whether each image's class is predicted, bool ``[R, N]`` on the CPU, and mean cross-entropies ``[R]``."""
        hits, losses = [], torch.zeros(len(self.losses), dtype=torch.float64, device=self.mean.device)
        rows = max(1, _LOGITS_PER_CHUNK // len(self.bias))
        for part, classes in zip(values.split(rows), labels.split(rows), strict=True):
            logits, classes = self.logits(self.normalised(part)), classes.to(self.mean.device)
            hits.append((logits.argmax(2) == classes[:, None]).T.cpu())
            losses += _cross_entropies(logits, classes)
        return torch.cat(hits, dim=1), (losses / len(labels)).tolist()


@torch.no_grad()
def train_heads(
    values: Tensor,
    labels: Tensor,
    rows: Tensor,
    num_classes: int,
    *,
    rates: Sequence[float],
    epochs: int,
    batch_size: int,
    seed: int,
    device: torch.device,
) -> Heads:
    """Train a linear layer at each of ``rates`` with SGD on the same batches, on ``rows`` of ``values [N, D]``.

    The features are the same for every rate, so one product gives the logits ``[B, R * C]`` and one the gradient of all
    weights. Momentum 0.9, no weight decay; the learning rate follows half a cosine to 0 per step; the incomplete last
    batch of an epoch is dropped. The head of a rate equals the one that is trained alone, up to rounding.
    """
    dim, count = values.shape[1], len(rates)
    mean, variance = _moments(values, rows)
    initial = make_head(dim, num_classes, seed=seed).get_parameter("1.weight")
    weight = initial.to(device).repeat(count, 1)
    bias = weight.new_zeros(len(weight))
    scale = (variance + _EPSILON).rsqrt()
    heads = Heads(weight, bias, mean.to(device), scale.to(device), [0.0] * count)
    weight_momentum, bias_momentum = torch.zeros_like(weight), torch.zeros_like(bias)
    steps_per_epoch = len(rows) // batch_size
    total, step = epochs * steps_per_epoch, 0
    peaks = torch.tensor(rates, dtype=torch.float32, device=device).repeat_interleave(num_classes)
    losses = torch.zeros(count, dtype=torch.float64, device=device)
    labels = labels.to(device)
    with Progress(f"epochs at {count} learning rate{'s' * (count > 1)}", epochs) as bar:
        for epoch in range(epochs):
            order = _shuffled(rows, seed, epoch)[: steps_per_epoch * batch_size]
            for chunk in order.split(batch_size * _BATCHES_PER_CHUNK):
                features = heads.normalised(values[chunk.to(values.device)])
                targets = labels[chunk.to(device)]
                for x, y in zip(features.split(batch_size), targets.split(batch_size), strict=True):
                    logits = heads.logits(x)
                    if epoch == epochs - 1:
                        losses += _cross_entropies(logits, y)
                    gradient = logits.softmax(2)
                    at_target = y[:, None, None].expand(-1, count, 1)
                    gradient.scatter_(2, at_target, gradient.gather(2, at_target) - 1)
                    gradient = gradient.view(batch_size, -1)
                    weight_momentum.addmm_(gradient.T, x, beta=_MOMENTUM, alpha=1 / batch_size)
                    bias_momentum.mul_(_MOMENTUM).add_(gradient.sum(0), alpha=1 / batch_size)
                    factor = cosine(step, total=total, warmup=0, peak=1.0)
                    weight.addcmul_(weight_momentum, peaks[:, None], value=-factor)
                    bias.addcmul_(bias_momentum, peaks, value=-factor)
                    step += 1
            bar.advance()
    return heads._replace(losses=(losses / (steps_per_epoch * batch_size)).tolist())


def _cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Sums over the images, float64 ``[R]``, of logits ``[B, R, C]`` and labels ``[B]``."""
    at_target = logits.gather(2, labels[:, None, None].expand(-1, logits.shape[1], 1))[:, :, 0]
    return (logits.logsumexp(2) - at_target).double().sum(0)


def _shuffled(rows: Tensor, seed: int, epoch: int, lane: int = 0) -> Tensor:
    """``rows`` in an order that is a function of (seed, epoch, lane, row)."""
    bits = keyed_bits(rows, 2, key=make_key(seed, epoch), domain=Domain.ORDER, lane=lane)
    return rows[(bits[:, 0] << 31 | bits[:, 1] >> 1).argsort()]  # 63 bits: no ties, even among a billion images


def _moments(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of ``rows``, float64 ``[D]``."""
    chunks = [chunk.to(values.device) for chunk in rows.split(1 << 16)]
    mean = torch.stack([values[chunk].double().sum(0) for chunk in chunks]).sum(0) / len(rows)
    squares = torch.stack([(values[chunk].double() - mean).square().sum(0) for chunk in chunks]).sum(0)
    return mean, squares / len(rows)


def _placed(values: Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device`` if they fit; results do not depend on it."""
    if device.type != "cuda" or values.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        return values
    return values.to(device)
