"""The confusion matrix of class maps over all ranks, and the scores that follow from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dmjd.data.dense.ade20k import IGNORED
from dmjd.errors import DataError
from dmjd.parallel.world import World


class SegmentationScores(NamedTuple):
    """Scores of a whole data set, in per cent.

    miou: mean IoU of the classes that occur in the annotations or the predictions. aacc: accuracy of all pixels. macc:
    mean accuracy of the classes that occur in the annotations. iou, accuracy: of each class, None where it does not
    occur. occurring: number of classes that have an IoU.
    """

    miou: float
    aacc: float
    macc: float
    iou: list[float | None]
    accuracy: list[float | None]
    occurring: int


class ConfusionMatrix:
    """Pixels of each pair of true and predicted class, int64 ``[classes, classes + 1]`` on ``device``.

    The last column counts predictions of a wider head that are no class of the data. Pixels of value 255 in the truth
    are left out.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self._classes = classes
        self.counts = torch.zeros(classes, classes + 1, dtype=torch.int64, device=device)

    def add(self, predicted: Tensor, truth: Tensor) -> None:
        """Count the pixels of a map: uint8 or int64, of equal shapes, on the device."""
        columns = self._classes + 1
        pairs = truth.long() * columns + predicted.long().clamp(max=self._classes)
        pairs = torch.where(truth == IGNORED, self.counts.numel(), pairs).flatten()
        self.counts += torch.bincount(pairs, minlength=self.counts.numel() + 1)[:-1].view_as(self.counts)

    def scores(self, world: World | None = None) -> SegmentationScores:
        """Scores of all pixels of all ranks. Collective over ``world``.

        Raises:
            DataError: if no pixel has a class.
        """
        parts = [self.counts.cpu()] if world is None else world.gather(self.counts.cpu())
        counts = torch.stack(parts).sum(0)
        total = int(counts.sum())
        if not total:
            raise DataError("no pixel of the validation images has a class: all annotations are 255 (ignored)")
        right, true, predicted = counts.diagonal().double(), counts.sum(1), counts.sum(0)[:-1]
        union = true + predicted - counts.diagonal()
        iou, accuracy = 100 * right / union, 100 * right / true
        return SegmentationScores(
            miou=float(iou.nanmean()),
            aacc=100 * float(right.sum()) / total,
            macc=float(accuracy.nanmean()),
            iou=[value if count else None for value, count in zip(iou.tolist(), union.tolist(), strict=True)],
            accuracy=[value if count else None for value, count in zip(accuracy.tolist(), true.tolist(), strict=True)],
            occurring=int((union > 0).sum()),
        )
