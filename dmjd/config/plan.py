"""Configuration of ``dmjd plan``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from dmjd.accelerators import ACCELERATORS
from dmjd.config.dense import DetectConfig, SegmentConfig
from dmjd.config.fields import choice, number, path, positive
from dmjd.config.finetune import FinetuneConfig
from dmjd.config.pretrain import PretrainConfig


class Published(NamedTuple):
    """A data set that a plan is for if there is no other: its training images and classes."""

    name: str
    images: int
    classes: int


@dataclass
class ClusterConfig:
    """The machine and the images of a plan.

    gpus: Number of GPUs.
    gpu: GPU model.
    gpus_per_node: GPUs per node.
    images: Training images. null: those of data.root, which are counted, or ImageNet-1k's without data.root.
    mfu: Assumed model FLOPs utilisation, in percent of the GPU's peak.
    """

    published: ClassVar = Published("ImageNet-1k", 1_281_167, 1000)
    traced: ClassVar[tuple[int, ...]] = (32, 64, 256)
    """Micro-batch sizes that are traced, in images. A peak is the maximum over moments of a step; some moments grow
    with the batch and some, as the end of the backward pass, do not. Beyond the last size the former decide."""

    gpus: int = positive(1)
    gpu: str = choice("h100", *(name for name in ACCELERATORS if name != "h100"))
    gpus_per_node: int = positive(8)
    images: int | None = number(None, least=1)
    mfu: float = number(30.0, above=0, most=100)


@dataclass
class PlanConfig(PretrainConfig, ClusterConfig):
    """Estimate parameters, FLOPs, memory and GPU hours of a pre-training.

    Its own keys, then those of pretrain; keys of a run's files, logs and checkpoints have no effect.
    """


@dataclass
class FinetunePlanConfig(FinetuneConfig, ClusterConfig):
    """Estimate parameters, FLOPs, memory and GPU hours of a fine-tuning.

    Its own keys, then those of finetune; keys of a run's files, logs and checkpoints have no effect.

    init: Run folder whose backbone and data are planned for, as by finetune. null: those of preset and backbone.
    """

    init: str | None = path()


@dataclass
class SegmentPlanConfig(SegmentConfig, ClusterConfig):
    """Estimate parameters, FLOPs, memory and GPU hours of a segmentation.

    Its own keys, then those of segment; keys of a run's files, logs and checkpoints have no effect.

    init: Run folder whose backbone is planned for, as by segment. null: that of preset and backbone.
    images: Training images. null: those of data.root, which are counted, or ADE20K's without data.root.
    """

    published: ClassVar = Published("ADE20K", 20_210, 150)
    traced: ClassVar[tuple[int, ...]] = (1, 2, 4)
    init: str | None = path()


@dataclass
class DetectPlanConfig(DetectConfig, ClusterConfig):
    """Estimate parameters, FLOPs, memory and GPU hours of a detection.

    Its own keys, then those of detect; keys of a run's files, logs and checkpoints have no effect.

    init: Run folder whose backbone is planned for, as by detect. null: that of preset and backbone.
    images: Training images. null: those of data.root, which are counted, or COCO's without data.root.
    """

    published: ClassVar = Published("COCO", 117_266, 80)
    traced: ClassVar[tuple[int, ...]] = (1, 2, 4)
    init: str | None = path()
