"""``dmjd knn``: weighted cosine k-nearest-neighbour accuracy (Wu et al., InstDisc, CVPR'18), with DINO's k and T.

Several k or temperatures are searched in one pass, and leave-one-out on the training images chooses among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dmjd.config import EvaluationConfig
from dmjd.config.fields import numbers, positive
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

    neighbours: Number of neighbours (k). null: 20, or fewer for few images per class (docs/evaluation.md). A list such
        as [10,20,100,200] measures every k in one pass; the score is that of the k with the best leave-one-out accuracy
        on the training images.
    temperature: Softmax temperature of the neighbours' cosine similarities. A list is searched as for neighbours, in
        all pairs of both.
    batch_size: Images per forward pass.
    """

    neighbours: list[int] | None = positive(None)
    temperature: list[float] = numbers(0.07, above=0)
    batch_size: int = positive(256)

    def check(self) -> None:
        for key in ("neighbours", "temperature"):
            if getattr(self, key) == []:
                raise ConfigError(f"{key} must hold at least one number, got []")


class KnnResult(NamedTuple):
    """Accuracies in per cent. top5 counts only classes with a vote; it is None with fewer than six classes.
    balanced_top1 is the mean of the classes' top-1."""

    top1: float
    top5: float | None
    balanced_top1: float


def neighbours_for(images: int, classes: int) -> int:
    """k for a bank of ``images``: 20, as DINO on ImageNet, or a quarter of the images of an average class."""
    return max(1, min(20, images // (4 * classes)))


LEFT_OUT = 10_000
"""Training images that choose among several k and temperatures, at most: evenly spaced ones."""


def run(context: Context[KnnConfig]) -> Scores:
    """Classify the test images by the training images."""
    config, frozen = context.config, context.frozen
    train, test = context.dataset("train", config.train_images), context.dataset("test")
    neighbours = sorted(set(config.neighbours or [neighbours_for(len(train), train.num_classes)]))
    temperatures = sorted(set(config.temperature))
    several = len(neighbours) * len(temperatures) > 1
    if (k := neighbours[-1]) > len(train) - several:
        others = f"{len(train) - 1}, the training images beside the one that is left out" if several else ""
        raise ConfigError(f"neighbours={k} must be at most {others or f'the number of training images, {len(train)}'}")
    bank, queries = (frozen.features(data, config.pooling, config.batch_size, config.workers) for data in (train, test))
    table = knn_table(
        *(bank, queries, train.num_classes),
        device=frozen.device,
        neighbours=neighbours,
        temperatures=temperatures,
    )
    settings: dict[str, Any] = {"pooling": config.pooling, "k": k, "temperature": temperatures[0]}
    if several:
        left_out = _left_out(bank, train.num_classes, frozen.device, neighbours, temperatures)
        images = min(LEFT_OUT, len(train))
        settings |= {"k": neighbours, "temperature": temperatures, "chosen_by": f"leave-one-out, {images} images"}
        values = _chosen(table, left_out)
    else:
        values = table[k, temperatures[0]]._asdict()
    settings |= {"train_images": len(train), **context.image_settings()}
    return Scores({**values, **references(train, test)}, settings)


Table = dict[tuple[int, float], KnnResult]
"""(k, temperature) -> accuracies, by ascending k, then temperature."""


def _left_out(
    bank: Features, num_classes: int, device: torch.device, neighbours: Sequence[int], temperatures: Sequence[float]
) -> Table:
    """Accuracies of training images that are no neighbours of themselves."""
    import torch

    from dmjd.data.dataset import evenly
    from dmjd.evaluate.features import Features

    own = torch.from_numpy(evenly(len(bank), LEFT_OUT))
    queries = Features(bank.values[own], bank.labels[own])
    return knn_table(
        *(bank, queries, num_classes), device=device, neighbours=neighbours, temperatures=temperatures, own=own
    )


def leave_one_out(
    bank: Features, num_classes: int, device: torch.device, temperature: float = 0.07
) -> tuple[KnnResult, int]:
    """Accuracies of the images of ``bank``, at least two, by their neighbours in it, and their number k, as
    ``dmjd knn`` chooses it; of more than :data:`LEFT_OUT` images those of evenly spaced ones."""
    k = min(neighbours_for(len(bank), num_classes), len(bank) - 1)
    return _left_out(bank, num_classes, device, [k], [temperature])[k, temperature], k


def _chosen(table: Table, left_out: Table) -> dict[str, Any]:
    """Scores of the pair that is best in ``left_out`` (of equal ones the first), and those of all pairs."""
    best = max(table, key=lambda pair: left_out[pair].top1)
    rows = [
        {"k": k, "temperature": t, "left_out_top1": left_out[k, t].top1, **result._asdict()}
        for (k, t), result in table.items()
    ]
    return {
        **table[best]._asdict(),
        "chosen": dict(zip(("k", "temperature"), best, strict=True)),
        "top1_best_on_test": max(result.top1 for result in table.values()),
        "table": rows,
    }


def knn_accuracy(
    train: Features,
    test: Features,
    num_classes: int,
    *,
    device: torch.device,
    k: int = 20,
    temperature: float = 0.07,
) -> KnnResult:
    """:func:`knn_table` of one pair."""
    table = knn_table(train, test, num_classes, device=device, neighbours=[k], temperatures=[temperature])
    return table[k, temperature]


def knn_table(
    train: Features,
    test: Features,
    num_classes: int,
    *,
    device: torch.device,
    neighbours: Sequence[int],
    temperatures: Sequence[float],
    own: Tensor | None = None,
) -> Table:
    """Classify each test image by its ``k`` nearest training images, each voting with ``exp(cosine / temperature)``.

    The similarities are computed once for all pairs of ``k`` and temperature.

    Args:
        train: the bank of ``N`` images.
        test: the queries, ``[Q, D]``.
        num_classes: labels are in ``[0, num_classes)``.
        device: where to search; it holds the bank.
        neighbours: values of ``k``, ascending, at most ``N``, or ``N - 1`` with ``own``.
        temperatures: above 0.
        own: int64 ``[Q]``, the row of each query in the bank, which is none of its neighbours.

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
    pairs = [(k, temperature) for k in neighbours for temperature in temperatures]
    hits1: dict[tuple[int, float], list[Tensor]] = {pair: [] for pair in pairs}
    hits5 = {pair: torch.zeros((), dtype=torch.int64, device=device) for pair in pairs}
    rows = max(1, _SIMILARITIES_PER_BLOCK // len(train))
    for place in range(0, len(test), rows):
        values, labels = test.values[place : place + rows], test.labels[place : place + rows].to(device)
        similarities = F.normalize(values.to(device), dim=1) @ bank.T
        if own is not None:
            similarities.scatter_(1, own[place : place + rows, None].to(device), -torch.inf)
        similarity, nearest = similarities.topk(neighbours[-1], dim=1)
        for k, temperature in pairs:
            found = votes(similarity[:, :k], bank_labels[nearest[:, :k]], num_classes, temperature)
            weight, ranked = found.topk(min(5, num_classes), dim=1)
            hit = (ranked == labels.unsqueeze(1)) & (weight > 0)
            hits1[k, temperature].append(hit[:, 0])
            hits5[k, temperature] += hit.sum()
    table: Table = {}
    for pair in pairs:
        top1, balanced = accuracies(torch.cat(hits1[pair]).cpu(), test.labels)
        table[pair] = KnnResult(top1, 100 * int(hits5[pair]) / len(test) if num_classes > 5 else None, balanced)
    return table


def votes(similarity: Tensor, labels: Tensor, num_classes: int, temperature: float) -> Tensor:
    """Votes, float64 ``[Q, num_classes]``, of neighbours ``[Q, k]`` by descending similarity."""
    # Relative to the nearest neighbour: the same ranking, and no overflow at a small temperature. In float64, whose
    # range keeps the votes of far neighbours above 0.
    weights = ((similarity - similarity[:, :1]).double() / temperature).exp()
    return weights.new_zeros(len(labels), num_classes).scatter_add_(1, labels, weights)


EVALUATION = Evaluation(
    "knn",
    "k-nearest-neighbour top-1 accuracy on frozen features",
    KnnConfig,
    run,
    {"top1": Column("kNN", "k-nearest-neighbour top-1")},
)
