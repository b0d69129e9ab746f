"""Configuration of ``dmjd pretrain``."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.config.fields import choice, may_change, number, path, positive, recorded
from dmjd.config.model import MaskConfig, MethodConfig, TargetConfig
from dmjd.config.step import PretrainOptimConfig
from dmjd.config.train import TrainConfig

IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""


@dataclass
class OnlineKnnConfig:
    """kNN evaluation during pre-training.

    every_epochs: Epochs between evaluations. 0 disables them.
    train_images: Maximum number of training images, evenly spaced.
    neighbours: Number of neighbours (k). null: 20, or fewer for few images per class (docs/evaluation.md).
    temperature: Softmax temperature of the neighbours' cosine similarities.
    pooling: Image feature. mean: mean of the patch tokens. cls: class token.
    warn_drop: Warn if the accuracy falls more than this many percentage points below the best so far. null: 2, or two
        standard errors of the accuracy if that is more, which is so for few test images.
    """

    every_epochs: int = number(0, least=0)
    train_images: int = positive(20000)
    neighbours: int | None = positive(None)
    temperature: float = positive(0.07)
    pooling: str = choice("mean", "cls")
    warn_drop: float | None = number(None, least=0)


@dataclass
class PretrainConfig(TrainConfig):
    """Pre-training.

    batch_size: Global batch size: images per optimizer step over all processes. Each image gives mask.views masked
        views.
    ema_decay: Decay of an exponential moving average (EMA) of the encoder's weights. null: no EMA.
    weights: Weights of init to start from. trained: the trained weights; the teacher's, if a file holds a student and a
        teacher (DINO, iBOT). ema: exponential moving average of the encoder. student: the student's weights of such a
        file.
    recipe: none: keys that are not set keep the presets' values. small_data: at the first start, the size of the model,
        the crops and the schedule are chosen from the training images and the device (docs/own_photos.md).
    """

    run: str = may_change(path("runs/pretrain", of="a folder"))
    epochs: int = positive(800)
    weights: str = choice("trained", "ema", "student")
    optim: PretrainOptimConfig = field(default_factory=PretrainOptimConfig)
    mask: MaskConfig = field(default_factory=MaskConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    online_knn: OnlineKnnConfig = may_change(field(default_factory=OnlineKnnConfig))
    command: str = recorded("pretrain")
