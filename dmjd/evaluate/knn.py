"""``dmjd knn``: weighted cosine k-nearest-neighbour accuracy (Wu et al., InstDisc, CVPR'18), with DINO's k and T."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dmjd.config import EvaluationConfig
from dmjd.config.fields import positive
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import Column, Context, Evaluation, Scores, references

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dmjd.evaluate.features import Features

_SIMILARITIES_PER_BLOCK = 1 << 26  # 256 MiB of float32: large enough to fill a GPU, small enough to fit beside a bank


@dataclass
class KnnConfig(EvaluationConfig):
    """Weighted k-nearest-neighbour classification on frozen features.

    neighbours: Number of neighbours (k). null: 20, or fewer for few images per class (docs/evaluation.md).
    temperature: Softmax temperature of the neighbours' cosine similarities.
    batch_size: Images per forward pass.
    """

    neighbours: int | None = positive(None)
    temperature: float = positive(0.07)
    batch_size: int = positive(256)


class KnnResult(NamedTuple):
    """Accuracies in per cent. top5 counts only classes with a vote; it is None with fewer than six classes.
    balanced_top1 is the mean of the classes' top-1."""

    top1: float
    top5: float | None
    balanced_top1: float


def neighbours_for(images: int, classes: int) -> int:
    """k for a bank of ``images``: 20, as DINO on ImageNet, or a quarter of the images of an average class."""
    return max(1, min(20, images // (4 * classes)))


def run(context: Context[KnnConfig]) -> Scores:
    """Classify the test images by the training images."""
    config, frozen = context.config, context.frozen
    train, test = context.dataset("train", config.train_images), context.dataset("test")
    k = neighbours_for(len(train), train.num_classes) if config.neighbours is None else config.neighbours
    if k > len(train):
        raise ConfigError(f"neighbours={k} must be at most the number of training images, {len(train)}")
    bank, queries = (frozen.features(data, config.pooling, config.batch_size, config.workers) for data in (train, test))
    result = knn_accuracy(bank, queries, train.num_classes, device=frozen.device, k=k, temperature=config.temperature)
    settings = {
        "pooling": config.pooling,
        "k": k,
        "temperature": config.temperature,
        "train_images": len(train),
        **context.image_settings(),
    }
    return Scores({**result._asdict(), **references(train, test)}, settings)


def knn_accuracy(
    train: Features,
    test: Features,
    num_classes: int,
    *,
    device: torch.device,
    k: int = 20,
    temperature: float = 0.07,
) -> KnnResult:
    """Classify each test image by its ``k`` nearest training images, each voting with ``exp(cosine / temperature)``.

    Args:
        train: the bank of ``N`` images.
        test: the queries, ``[Q, D]``.
        num_classes: labels are in ``[0, num_classes)``.
        device: where to search; it holds the bank.
        k: neighbours, at most ``N``.
        temperature: above 0.

    Raises:
        DataError: if labels are out of range.
    """
    import torch
    import torch.nn.functional as F

    from dmjd.evaluate.features import accuracies, require_labels

    require_labels(train.labels, num_classes)
    require_labels(test.labels, num_classes)

    bank = F.normalize(train.values.to(device), dim=1)
    bank_labels = train.labels.to(device)
    hits1, hits5 = [], torch.zeros((), dtype=torch.int64, device=device)
    rows = max(1, _SIMILARITIES_PER_BLOCK // len(train))
    for values, labels in zip(test.values.split(rows), test.labels.split(rows), strict=True):
        votes = _votes(F.normalize(values.to(device), dim=1), bank, bank_labels, num_classes, k, temperature)
        weight, ranked = votes.topk(min(5, num_classes), dim=1)
        hit = (ranked == labels.to(device).unsqueeze(1)) & (weight > 0)
        hits1.append(hit[:, 0])
        hits5 += hit.sum()
    top1, balanced = accuracies(torch.cat(hits1).cpu(), test.labels)
    return KnnResult(top1, 100 * int(hits5) / len(test) if num_classes > 5 else None, balanced)


def _votes(queries: Tensor, bank: Tensor, labels: Tensor, num_classes: int, k: int, temperature: float) -> Tensor:
    """Votes, float64 ``[Q, num_classes]``, of unit queries ``[Q, D]`` over a unit bank ``[N, D]``."""
    similarity, nearest = (queries @ bank.T).topk(k, dim=1)
    # Relative to the nearest neighbour: the same ranking, and no overflow at a small temperature. In float64, whose
    # range keeps the votes of far neighbours above 0.
    weights = ((similarity - similarity[:, :1]).double() / temperature).exp()
    return weights.new_zeros(len(queries), num_classes).scatter_add_(1, labels[nearest], weights)


EVALUATION = Evaluation(
    "knn",
    "k-nearest-neighbour top-1 accuracy on frozen features",
    KnnConfig,
    run,
    {"top1": Column("kNN", "k-nearest-neighbour top-1")},
)
