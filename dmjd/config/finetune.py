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

    ema_decay: Decay of an exponential moving average (EMA) of the model's weights. The EMA is validated and exported.
        null: no EMA.
    init: Run folder (its newest checkpoint), checkpoint folder, or file of weights of any known code base. Backbone,
        channels and normalisation are those of init unless they are set on the command line. null: an untrained
        encoder. Ignored when resuming.
    weights: Weights of init to start from. trained: the trained weights; the teacher's, if a file holds a student and a
        teacher (DINO, iBOT). ema: exponential moving average. student: the student's weights of such a file. untrained:
        random weights; only the configuration of init is read.
    freeze: Number of frozen layers, from the input. 0: none. 1: the embeddings. n + 1: the embeddings and the first n
        blocks.
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

    init: Run folder (its newest checkpoint), checkpoint folder, or file of weights of any known code base. Backbone,
        channels and normalisation are those of init unless they are set on the command line. Image size, and the data
        set of a run, are those of init unless the command line or the preset sets them. null: an untrained encoder.
        Ignored when resuming.
    few_shot: Percentage of each class's training images to use, such as 1 or 10; at least one image of each class. The
        choice depends on the file names only. null: all.
    labels: Text file with one image name per line: only these training images are used. null: all.
    recipe: none: keys that are not set keep the preset's values. small_data: at the first start, the schedule and the
        augmentation are chosen from the number of training images.
    """

    run: str = may_change(path("runs/finetune", of="a folder"))
    head: HeadConfig = field(default_factory=HeadConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    few_shot: float | None = number(None, above=0, below=100)
    labels: str | None = may_change(path())  # checkpoints store which images it selects
    command: str = recorded("finetune")
