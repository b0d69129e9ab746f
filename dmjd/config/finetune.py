"""Configuration of training that begins from an encoder: what such trainings share, and that of ``dmjd finetune``."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.config.augment import AugmentConfig
from dmjd.config.fields import choice, may_change, number, path, positive, recorded
from dmjd.config.model import HeadConfig
from dmjd.config.step import FinetuneOptimConfig
from dmjd.config.train import TrainConfig


@dataclass
class DownstreamConfig(TrainConfig):
    """Training of a whole encoder with the head of a task.

    ema_decay: Decay of an exponential moving average of the model's weights, which is validated and exported. null: no
        average.
    init: Run folder (its newest checkpoint), checkpoint folder, or file of weights of any known code base. Its
        backbone, channels and normalisation hold unless they are typed. null: an untrained encoder. Ignored when
        resuming.
    weights: Initial weights of init. trained: all; of a file with a student and a teacher the teacher. ema: their
        exponential moving average. student: the student of a file with a teacher. untrained: none, only the
        configuration of init is read.
    freeze: Leading layers that are not trained. 1: the embeddings. n+1: the embeddings and the first n blocks.
    val_every: Epochs between validations; the last epoch is always validated.
    """

    init: str | None = path("???")
    weights: str = choice("trained", "untrained", "ema", "student")
    optim: FinetuneOptimConfig = field(default_factory=FinetuneOptimConfig)
    freeze: int = number(0, least=0)
    val_every: int = may_change(positive(1))


@dataclass
class FinetuneConfig(DownstreamConfig):
    """Fine-tuning of a whole encoder with a classification head. Defaults: MAE's for ViT-B.

    init: Run folder (its newest checkpoint), checkpoint folder, or file of weights of any known code base. Its
        backbone, channels and normalisation hold unless they are typed, and its image size and a run's data set unless
        they are typed or set by the preset. null: an untrained encoder. Ignored when resuming.
    few_shot: Percentage of each class's training images that are used, such as 1 or 10: a fixed choice by the files'
        names, at least one image of each class. null: all.
    labels: Text file with the name of an image in each line: only these training images are used.
    recipe: none: keys that are not typed have the preset's values. small_data: at the first start, the schedule and the
        augmentation follow the number of training images.
    """

    run: str = may_change(path("runs/finetune", of="a folder"))
    head: HeadConfig = field(default_factory=HeadConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    few_shot: float | None = number(None, above=0, below=100)
    labels: str | None = may_change(path())  # checkpoints store which images it selects
    command: str = recorded("finetune")
