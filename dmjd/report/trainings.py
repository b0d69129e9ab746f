"""Trainings that begin from an encoder: their names and the scores that they record. Imports no other report module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dmjd.evaluate import Column


class Training(NamedTuple):
    """title: in place of a method. columns: scores of the record that the command leaves in its run and in the run that
    it began from: of the last epoch, but for ``best_*``; the first is the main one. loss: label of the losses' axis.
    parts: losses in the log whose weighted sum is the loss -> their labels."""

    title: str
    columns: Mapping[str, Column]
    loss: str = "loss"
    parts: Mapping[str, str] = {}

    @property
    def main(self) -> str:
        return next(iter(self.columns))


def _best(column: Column) -> Column:
    return Column(
        f"{column.title} best on test", f"{column.meaning} of the best validation, which its images chose", column.unit
    )


_MIOU = Column("Seg. mIoU", "mean IoU of the segmentation")
_BOX = Column("Det. AP box", "box AP of the detection")

TRAININGS = {
    "finetune": Training(
        "fine-tuning",
        {
            "top1": Column("Ft.", "fine-tuning top-1"),
            "top5": Column("Ft. top-5", "fine-tuning top-5"),
            "best_top1": Column("Ft. best on test", "fine-tuning top-1 of the best epoch, which the test images chose"),
        },
        "cross-entropy",
    ),
    "segment": Training(
        "segmentation",
        {
            "miou": _MIOU,
            "aacc": Column("Seg. aAcc", "pixel accuracy of the segmentation"),
            "macc": Column("Seg. mAcc", "mean class accuracy of the segmentation"),
            "best_miou": _best(_MIOU),
        },
        "cross-entropy",
        {"decode": "UPerNet", "auxiliary": "auxiliary head"},
    ),
    "detect": Training(
        "detection",
        {
            "box_ap": _BOX,
            "mask_ap": Column("Det. AP mask", "mask AP of the detection"),
            "box_ap50": Column("Det. AP50 box", "box AP at IoU .5 of the detection"),
            "mask_ap50": Column("Det. AP50 mask", "mask AP at IoU .5 of the detection"),
            "best_box_ap": _best(_BOX),
        },
        parts={
            "rpn_class": "objectness of proposals",
            "rpn_box": "boxes of proposals",
            "class": "classes",
            "box": "boxes",
            "mask": "masks",
        },
    ),
}
"""Command -> its record. Log rows have the scores as ``val_SCORE``, of a moving average as ``val_ema_SCORE``."""


_NAMES = {"miou": "mIoU", "aacc": "aAcc", "macc": "mAcc"}
_SIZES = {"aps": "AP, small objects", "apm": "AP, medium objects", "apl": "AP, large objects"}


def score_name(name: str) -> str:
    """The name of a score of validations for readers: "top-1", "mIoU", "box AP50", "mask AP, small objects"."""
    kind, _, measure = name.rpartition("_")
    if kind in ("box", "mask"):
        return f"{kind} {_SIZES.get(measure, measure.replace('ap', 'AP'))}"
    return _NAMES.get(name, name.replace("top", "top-").replace("_", " "))


def is_by_size(name: str) -> bool:
    """Whether a score counts objects of one size alone."""
    return name.rpartition("_")[2] in _SIZES


def training_of(config: Mapping[str, Any]) -> Training | None:
    """The record of the command that made a run of ``config``; None for pre-training."""
    return TRAININGS.get(str(config.get("command")))
