"""Weighted cosine k-nearest-neighbour accuracy: Wu et al. (InstDisc, CVPR'18), with the DINO settings as defaults."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.errors import ConfigError
from dmjd.evaluate.features import Features, require_labels

_SIMILARITIES_PER_BLOCK = 1 << 26  # 256 MiB of float32: large enough to fill a GPU, small enough to fit beside a bank


@dataclass(frozen=True)
class KnnResult:
    """Accuracies in percent, with the settings they depend on: a kNN score without k and T cannot be compared.

    top5 counts only classes that some neighbour voted for; None below six classes, where it says nothing.
    """

    top1: float
    top5: float | None
    k: int
    temperature: float


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
        ConfigError: on a ``k`` or ``temperature`` out of range. DataError: on labels out of range.
    """
    require_neighbours(k, len(train))
    if not temperature > 0:
        raise ConfigError(f"temperature must be above 0, got {temperature}")
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
    return KnnResult(top1, top5 if num_classes > 5 else None, k, temperature)


def require_neighbours(k: int, bank: int) -> None:
    """Raise ConfigError if ``k`` neighbours cannot be had of ``bank`` images."""
    if not 1 <= k <= bank:
        raise ConfigError(f"neighbours (k) must be between 1 and the {bank} images in the bank, got {k}")


def _votes(queries: Tensor, bank: Tensor, labels: Tensor, num_classes: int, k: int, temperature: float) -> Tensor:
    """Votes, float64 ``[Q, num_classes]``, of unit queries ``[Q, D]`` over a unit bank ``[N, D]``."""
    similarity, nearest = (queries @ bank.T).topk(k, dim=1)
    # Relative to the nearest neighbour: the same ranking, and no overflow at a small temperature. In float64, whose
    # range keeps the votes of far neighbours above 0.
    weights = ((similarity - similarity[:, :1]).double() / temperature).exp()
    return weights.new_zeros(len(queries), num_classes).scatter_add_(1, labels[nearest], weights)
