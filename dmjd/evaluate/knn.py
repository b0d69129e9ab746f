"""``dmjd knn``: weighted cosine k-nearest-neighbour accuracy (Wu et al., InstDisc, CVPR'18), with DINO's k and T."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dmjd.config import EvaluationConfig
from dmjd.config.fields import positive
from dmjd.errors import ConfigError
from dmjd.evaluate.registry import Column, Context, Evaluation, Scores

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dmjd.evaluate.features import Features

_SIMILARITIES_PER_BLOCK = 1 << 26  # 256 MiB of float32: large enough to fill a GPU, small enough to fit beside a bank


@dataclass
class KnnConfig(EvaluationConfig):
    """Weighted k-nearest-neighbour classification on frozen features.

    neighbours: Number of neighbours (k).
    temperature: Softmax temperature of the neighbours' cosine similarities.
    batch_size: Images per forward pass.
    """

    neighbours: int = positive(20)
    temperature: float = positive(0.07)
    batch_size: int = positive(256)


class KnnResult(NamedTuple):
    """Accuracies in per cent. top5 counts only classes with a vote; it is None with fewer than six classes."""

    top1: float
    top5: float | None


def run(context: Context[KnnConfig]) -> Scores:
    """Classify the test images by the training images."""
    config, frozen = context.config, context.frozen
    train, test = context.dataset("train", config.train_images), context.dataset("test")
    if config.neighbours > len(train):
        raise ConfigError(f"neighbours={config.neighbours} must be at most the number of training images, {len(train)}")
    bank, queries = (frozen.features(data, config.pooling, config.batch_size, config.workers) for data in (train, test))
    result = knn_accuracy(
        bank, queries, train.num_classes, device=frozen.device, k=config.neighbours, temperature=config.temperature
    )
    settings = {
        "pooling": config.pooling,
        "k": config.neighbours,
        "temperature": config.temperature,
        "train_images": len(train),
        **context.image_settings(),
    }
    return Scores(result._asdict(), settings)


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

    from dmjd.evaluate.features import require_labels

    require_labels(train.labels, num_classes)
    require_labels(test.labels, num_classes)

    bank = F.normalize(train.values.to(device), dim=1)
    bank_labels = train.labels.to(device)
    hits1 = torch.zeros((), dtype=torch.int64, device=device)
    hits5 = torch.zeros_like(hits1)
    rows = max(1, _SIMILARITIES_PER_BLOCK // len(train))
    for values, labels in zip(test.values.split(rows), test.labels.split(rows), strict=True):
        votes = _votes(F.normalize(values.to(device), dim=1), bank, bank_labels, num_classes, k, temperature)
        weight, ranked = votes.topk(min(5, num_classes), dim=1)
        hit = (ranked == labels.to(device).unsqueeze(1)) & (weight > 0)
        hits1 += hit[:, 0].sum()
        hits5 += hit.sum()
    top1, top5 = (100 * int(hits) / len(test) for hits in (hits1, hits5))
    return KnnResult(top1, top5 if num_classes > 5 else None)


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
