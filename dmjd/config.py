"""The typed configuration: every key, its default, and what it may be.

Science (mask, backbone, method, target, optim) and orchestration (engine, run settings) are separate groups: changing
only the latter does not change a result, so a run may be resumed with other values there and only there.
Values that depend on each other are checked by :func:`dmjd.train.build.build`, which has the objects at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from dmjd.errors import ConfigError


def choice(default: str, *others: str) -> Any:
    """A field that may be one of a few words."""
    return field(default=default, metadata={"choices": (default, *others)})


def positive(default: Any) -> Any:
    """A number that must be above 0."""
    return field(default=default, metadata={"positive": True})


@dataclass
class MaskConfig:
    """Disjoint masking; the fields are those of :class:`dmjd.masking.MaskSpec`."""

    views: int = positive(2)
    pattern: str = choice("block", "uniform")
    block: list[int] = field(default_factory=lambda: [2, 2])
    mask_ratio: float = 0.6
    pred_ratio: float | None = None
    regulation: str = choice("disjoint", "none", "complementary")
    rounding: str = choice("exact", "official")
    count: int | None = None
    predict_ratio: float | None = None


@dataclass
class BackboneConfig:
    """The encoder. ``hidden``: leave hidden tokens out, or put a mask token in their place."""

    name: str = choice("vit")
    patch_size: int = positive(16)
    embed_dim: int = positive(768)
    depth: int = positive(12)
    num_heads: int = positive(12)
    mlp_ratio: float = positive(4.0)
    class_token: bool = True
    hidden: str = choice("drop", "mask_token")


@dataclass
class DecoderConfig:
    """The masked branch: MAE's transformer decoder, or a linear head on the encoder's mask tokens."""

    name: str = choice("mae", "linear")
    dim: int = positive(512)
    depth: int = positive(8)
    num_heads: int = positive(16)
    mlp_ratio: float = positive(4.0)


@dataclass
class VisibleBranchConfig:
    """The visible distillation branch."""

    enabled: bool = True
    width: int = positive(512)


@dataclass
class MethodConfig:
    """``mim_weight`` is the paper's lambda."""

    name: str = "dmjd"
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    visible_branch: VisibleBranchConfig = field(default_factory=VisibleBranchConfig)
    mim_loss: str = choice("mse", "l1", "smooth_l1")
    mim_weight: float = positive(1.0)


@dataclass
class TargetConfig:
    """What is predicted. ``norm``: none or patch for pixels; none, l2 or layernorm for HOG.

    ``cell`` (HOG) is in pixels, half a patch if left out; ``unbiased`` (pixels) is the variance that MAE uses.
    """

    name: str = choice("hog", "pixels")
    norm: str = choice("layernorm", "none", "l2", "patch")
    cell: int | None = None
    bins: int = positive(9)
    flavour: str = choice("dmjd")
    unbiased: bool = True


@dataclass
class DataConfig:
    """Images. ``mean`` and ``std`` are per channel, on the 0..1 scale; ``pad`` is a black border in pixels."""

    name: str = choice("folder", "fashion_mnist", "digits", "auto")
    root: str | None = None
    image_size: list[int] = field(default_factory=lambda: [224, 224])
    channels: int = positive(3)
    pad: int = 0
    check: str = choice("header", "none", "decode")
    crop_scale: list[float] = field(default_factory=lambda: [0.2, 1.0])
    crop_ratio: list[float] = field(default_factory=lambda: [0.75, 4 / 3])
    flip: bool = True
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])


@dataclass
class OptimConfig:
    """AdamW and its learning rate.

    ``lr_rule``: the paper's Eq. 4, ``base_lr * batch_size * m_pred / m_corr / 256``, or the classic
    ``base_lr * K * batch_size / 256``. ``lr_rates``: the rates as asked for (.6), or as the counts give them (30/49).
    """

    base_lr: float = positive(1.5e-4)
    lr_rule: str = choice("adaptive", "classic")
    lr_rates: str = choice("nominal", "true")
    min_lr: float = 0.0
    warmup_epochs: float = 40.0
    weight_decay: float = 0.05
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = positive(1e-8)
    clip_grad: float | None = None


@dataclass
class EngineConfig:
    """How a step is computed. ``accumulation`` micro-batches make one step of ``batch_size`` images."""

    name: str = choice("single")
    device: str = choice("auto", "cpu", "cuda")
    precision: str = choice("auto", "fp32", "bf16")
    accumulation: int = positive(1)
    activation_checkpointing: str = choice("none", "full")
    compile: bool = False


@dataclass
class PretrainConfig:
    """A pre-training run. ``batch_size`` counts unique images a step, each of which gives K views."""

    run: str = "runs/pretrain"
    seed: int = 0
    epochs: int = positive(800)
    batch_size: int = positive(1024)
    mask: MaskConfig = field(default_factory=MaskConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    workers: int = 8
    resume: str = choice("auto", "never")
    log_every: int = positive(20)
    checkpoint_every: int = positive(1000)
    keep_checkpoints: int = positive(2)


SCIENCE = ("seed", "epochs", "batch_size", "mask", "backbone", "method", "target", "data", "optim")
"""Keys of :class:`PretrainConfig` that decide a result; a run folder holds one value of each for ever."""


@dataclass
class KnnConfig:
    """Weighted kNN on frozen features.

    ``checkpoint`` is a run folder or one of its checkpoints. ``train_images`` keeps that many, evenly spaced.
    """

    checkpoint: str = "???"
    weights: str = choice("trained", "untrained")
    pooling: str = choice("mean", "cls")
    train_images: int | None = None
    neighbours: int = positive(20)
    temperature: float = positive(0.07)
    batch_size: int = positive(256)
    workers: int = 8
    device: str = choice("auto", "cpu", "cuda")
    data: DataConfig | None = None


@dataclass
class LinprobeConfig:
    """MAE's linear probe: affine-free BatchNorm and a linear layer on frozen features, trained with LARS.

    ``augment`` draws a new crop and flip of every image in each epoch; without it features are computed once.
    """

    checkpoint: str = "???"
    weights: str = choice("trained", "untrained")
    pooling: str = choice("mean", "cls")
    train_images: int | None = None
    epochs: int = positive(90)
    warmup_epochs: int = 10
    base_lr: float = positive(0.1)
    batch_size: int = positive(16384)
    augment: bool = True
    seed: int = 0
    workers: int = 8
    device: str = choice("auto", "cpu", "cuda")
    data: DataConfig | None = None


def check_fields(config: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first value outside its field's choices or sign."""
    for item in fields(config):
        value, key = getattr(config, item.name), prefix + item.name
        if is_dataclass(value):
            check_fields(value, key + ".")
        choices = item.metadata.get("choices")
        if choices and value not in choices:
            raise ConfigError(f"{key} must be one of {', '.join(sorted(choices))}, got {value!r}")
        if item.metadata.get("positive") and not value > 0:
            raise ConfigError(f"{key} must be above 0, got {value}")
