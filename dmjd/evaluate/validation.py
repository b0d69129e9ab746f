"""Validation of a classifier: top-1, top-5, balanced top-1 and loss of the test images, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.config import DataConfig
from dmjd.data.build import build_dataset, check_labels
from dmjd.data.dataset import ImageDataset
from dmjd.data.loader import evaluation_loader
from dmjd.errors import DataError
from dmjd.evaluate.share import Share, together
from dmjd.parallel.world import World, alone
from dmjd.progress import Progress

if TYPE_CHECKING:
    from dmjd.config.finetune import FinetuneConfig

TRAINED, AVERAGE = "val_", "val_ema_"
"""Prefixes of the scores in log.jsonl: of the trained weights, and of their moving average."""


class Averaged(Protocol):
    """The parts of a step that the validation of its moving average uses."""

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """Moving averages of the parameters; empty without ``ema_decay``."""
        ...

    def with_average(self) -> AbstractContextManager[None]:
        """Context in which the parameters have the values of the average."""
        ...


class Validated(Averaged, Protocol):
    """The parts of a step of fine-tuning or segmentation that a validation uses."""

    def logits(self, images: Tensor) -> Tensor:
        """uint8 ``[B, H, W, C]`` on the device -> ``[B, classes]``, of segmentation ``[B, classes, H, W]``, in
        evaluation mode. Collective where the engine is."""
        ...


class Totals(NamedTuple):
    """Scores of a whole test set. top1, top5, balanced_top1: per cent; balanced_top1 is the mean of the classes' top-1,
    top5 is None below six classes. loss: mean cross-entropy."""

    top1: float
    top5: float | None
    balanced_top1: float
    loss: float


def validate(step: Validated, dataset: ImageDataset, config: FinetuneConfig, world: World) -> dict[str, float | None]:
    """Scores of the current weights, and of their average if there is one, as columns of log.jsonl. Collective.

    Each image is counted once, whatever the number of processes and the batch size.

    Args:
        dataset: the test images, from :func:`validation_dataset`.

    Returns:
        ``val_top1``, ``val_top5`` (None below six classes), ``val_loss``, ``val_balanced_top1``, and with ``ema_decay``
        the same scores of the average as ``val_ema_top1`` etc. The same values on every rank.

    Raises:
        StopRequested: on every rank, if one is asked to stop meanwhile.
        DataError: on every rank, if an image cannot be read.
    """
    micro_batch = config.batch_size // (config.engine.grad_accum_steps * world.size)

    def scores(prefix: str) -> dict[str, float | None]:
        found = evaluate_classifier(step.logits, dataset, config.data, micro_batch, config.workers, world)
        return {prefix + name: value for name, value in found._asdict().items()}

    trained = scores(TRAINED)
    if not step.averages:
        return trained
    with step.with_average():
        return trained | scores(AVERAGE)


def main_prefix(scores: Mapping[str, float | None]) -> str:
    """The prefix of the main scores: of the average if there is one."""
    return AVERAGE if any(name.startswith(AVERAGE) for name in scores) else TRAINED


def main_score(scores: Mapping[str, float | None], name: str = "top1") -> float:
    """The score ``name`` that selects the best checkpoint."""
    score = scores[f"{main_prefix(scores)}{name}"]
    assert score is not None
    return score


def validation_dataset(data: DataConfig, train: ImageDataset) -> ImageDataset:
    """The test images of ``data``, with the classes of ``train``.

    Raises:
        DataError: if there are none, one of them is bad, they have no labels or other classes than ``train``, or there
            is one class alone.
    """
    check_labels(train, "the training images")
    test = build_dataset(replace(data, max_bad_percent=0.0), "test")
    check_labels(test, "the test images")
    check_same_classes(test, class_names(train), "the training images")
    return test


def class_names(dataset: ImageDataset) -> list[str]:
    """Names of the classes in the order of their labels; their numbers where the data set has no names."""
    return list(getattr(dataset, "classes", ())) or [str(number) for number in range(dataset.num_classes)]


def check_same_classes(test: ImageDataset, names: Sequence[str], of: str) -> None:
    """Raise DataError unless the test images have the classes ``names`` of ``of``, in this order."""
    if test.num_classes != len(names):
        raise DataError(
            f"the test images have {test.num_classes} classes, and {of} {len(names)}; use images of the same classes"
        )
    for number, (found, expected) in enumerate(zip(class_names(test), names, strict=True)):
        if found != expected:
            raise DataError(
                f"class {number} of the test images is {found!r}, and of {of} {expected!r}; use images of the same "
                "classes"
            )


def evaluate_classifier(
    logits: Callable[[Tensor], Tensor],
    dataset: ImageDataset,
    data: DataConfig,
    batch_size: int,
    workers: int,
    world: World | None = None,
    device: torch.device | None = None,
) -> Totals:
    """Scores of ``logits`` on ``dataset``, each image once. Collective over ``world``.

    Every rank calls ``logits`` equally often with batches of one size, as sharded engines need: where its images end,
    the last image of the data set is repeated and not counted.

    Args:
        logits: uint8 ``[B, H, W, C]`` on the device -> ``[B, classes]``, or more classes than the data set has.
        data: image size, crop and time-out.
        batch_size: images per forward pass and process, at most.
        workers: loader workers per process, at most one per batch.
        world: one process on ``device`` if left out.
    """
    world = alone(device or torch.device("cpu")) if world is None else world
    share = Share(dataset, batch_size, world)
    size = data.image_size[0], data.image_size[1]
    workers = min(workers, share.passes) if share.passes > 1 else 0
    loader = evaluation_loader(share, share.batch_size, size, workers, data.crop_pct, data.timeout)
    classes = dataset.num_classes
    counts = torch.zeros(2 * classes + 2, dtype=torch.float64, device=world.device)
    images = share.batch_size * world.size
    with Progress("validation batch", share.passes, images=images) as bar, closing(iter(loader)) as batches:
        for _ in range(share.passes):
            batch = together(partial(next, batches), world)
            counted = share.counted(batch.sample_ids).to(world.device, non_blocking=True)
            batch = batch.to(world.device)
            counts += _counts(logits(batch.images), batch.labels, counted, classes)
            bar.advance()
    return _totals(torch.stack(world.gather(counts.cpu())).sum(0), classes)


@torch.no_grad()
def _counts(logits: Tensor, labels: Tensor, counted: Tensor, classes: int) -> Tensor:
    """Sums over one batch, float64: images of each class, correct ones of each class, top-5 hits, loss.

    The rank of a label counts the classes with a larger logit, and those with an equal one (frequent in bfloat16) and a
    smaller number: the order of a stable sort. Logits that are not finite are no hit.
    """
    logits = logits.float()
    own = logits.gather(1, labels.unsqueeze(1))
    before = torch.arange(logits.shape[1], device=labels.device) < labels.unsqueeze(1)
    ranks = ((logits > own) | ((logits == own) & before)).sum(dim=1)
    usable = counted & logits.isfinite().all(dim=1)
    sums = torch.zeros(2 * classes + 2, dtype=torch.float64, device=logits.device)
    sums.index_add_(0, labels, counted.double())
    sums.index_add_(0, labels + classes, (usable & (ranks < 1)).double())
    sums[-2] = (usable & (ranks < 5)).sum()
    sums[-1] = torch.where(counted, F.cross_entropy(logits, labels, reduction="none"), 0.0).double().sum()
    return sums


def _totals(sums: Tensor, classes: int) -> Totals:
    images, right = sums[:classes], sums[classes : 2 * classes]
    count, present = float(images.sum()), images > 0
    return Totals(
        top1=100 * float(right.sum()) / count,
        top5=100 * float(sums[-2]) / count if classes > 5 else None,
        balanced_top1=100 * float((right[present] / images[present]).mean()),
        loss=float(sums[-1]) / count,
    )
