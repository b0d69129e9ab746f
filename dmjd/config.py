"""The typed configuration: every key, its default, and what it may be.

Science (mask, backbone, method, target, optim) and orchestration (engine, run settings) are separate groups: changing
only the latter does not change a result, so a run may be resumed with other values there and only there.
Values that depend on each other are checked by :mod:`dmjd.train.build`, which has the objects at hand.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from dmjd.accelerators import ACCELERATORS
from dmjd.errors import ConfigError


def choice(default: str, *others: str) -> Any:
    """A field that may be one of a few words."""
    return field(default=default, metadata={"choices": (default, *others)})


def number(default: Any, **bounds: float) -> Any:
    """A finite number, or None where the type allows it, within ``above``, ``least``, ``below``, ``most``."""
    return field(default=default, metadata={"bounds": bounds})


def positive(default: Any) -> Any:
    """A number that must be above 0."""
    return number(default, above=0)


def numbers(*default: float, length: int | None = None, **bounds: float) -> Any:
    """A list of finite numbers within bounds as for :func:`number`, of a fixed length if one is given."""
    return field(default_factory=lambda: list(default), metadata={"bounds": bounds, "length": length})


def numbers_or_none(length: int, **bounds: float) -> Any:
    """A list as for :func:`numbers`, or None, which is the default."""
    return field(default=None, metadata={"bounds": bounds, "length": length})


@dataclass
class MaskConfig:
    """Disjoint masking; the fields are those of :class:`dmjd.masking.MaskSpec`."""

    views: int = positive(2)
    pattern: str = choice("block", "uniform", "beit")
    block: list[int] = numbers(2, 2, length=2, least=1)
    mask_ratio: float = number(0.6, above=0, below=1)
    pred_ratio: float | None = number(None, above=0, most=1)
    regulation: str = choice("disjoint", "none", "complementary")
    rounding: str = choice("exact", "official")
    count: int | None = number(None, least=1)
    predict_ratio: float | None = number(None, above=0, most=1)


@dataclass
class ConvStagesConfig:
    """The two convolution stages of a ConViT, at strides 4 and 8."""

    embed_dims: list[int] = numbers(256, 384, length=2, above=0)
    depths: list[int] = numbers(2, 2, length=2, least=0)
    mlp_ratios: list[float] = numbers(8.0, 8.0, length=2, above=0)


@dataclass
class WindowsConfig:
    """The stages of a Swin, at strides 4, 8, 16 and 32: blocks, heads, and the side of a window in tokens."""

    depths: list[int] = numbers(2, 2, 18, 2, length=4, above=0)
    num_heads: list[int] = numbers(4, 8, 16, 32, length=4, above=0)
    size: int = positive(6)


@dataclass
class BackboneConfig:
    """The encoder. ``hidden``: leave hidden tokens out, or put a mask token in their place.

    ``positions`` (vit): fixed, learned, or BEiT's bias of attention by relative position, shared by all blocks.
    ``block`` (vit): timm's, or BEiT's, whose keys have no bias and whose branches ``layer_scale`` may scale.
    For "convvit", width, depth, heads and MLP ratio are those of its third stage, a ViT; ``conv_stages`` are the two
    before it, and ``multi_scale`` adds their outputs to the encoder's.
    For "swin", ``embed_dim`` is the last stage's, which is one token wide, and ``windows`` has depths and heads.
    """

    name: str = choice("vit", "convvit", "swin")
    patch_size: int = positive(16)
    embed_dim: int = positive(768)
    depth: int = positive(12)
    num_heads: int = positive(12)
    mlp_ratio: float = positive(4.0)
    class_token: bool = True
    hidden: str = choice("drop", "mask_token")
    drop_path: float = number(0.0, least=0, below=1)
    positions: str = choice("sincos", "learned", "relative")
    block: str = choice("plain", "beit")
    layer_scale: float | None = number(None, above=0)
    conv_stages: ConvStagesConfig = field(default_factory=ConvStagesConfig)
    multi_scale: bool = True
    windows: WindowsConfig = field(default_factory=WindowsConfig)


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
    """The visible distillation branch. ``projector``: three layers with LayerNorm and GELU, or one linear layer."""

    enabled: bool = True
    width: int = positive(512)
    projector: str = choice("nonlinear", "linear")


@dataclass
class MethodConfig:
    """``mim_weight`` is the paper's lambda. ``mim_loss`` is cross_entropy for targets that are codes, and for them
    alone. ``initialisation``: whose weights the model starts from."""

    name: str = "dmjd"
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    visible_branch: VisibleBranchConfig = field(default_factory=VisibleBranchConfig)
    mim_loss: str = choice("mse", "l1", "smooth_l1", "cosine", "cross_entropy")
    mim_weight: float = positive(1.0)
    initialisation: str = choice("mae", "beit", "simmim", "maskfeat")


@dataclass
class TargetConfig:
    """What is predicted. ``norm``: none or patch for pixels; none, l2 or layernorm for HOG; none or layernorm for
    features (clip, teacher).

    ``cell`` (HOG) is in pixels, half a patch if left out; ``flavour`` (HOG) says whose conventions, MaskFeat's go with
    norm l2; ``unbiased`` (pixels) is the variance that MAE uses.

    ``weights`` (clip, dvae, vqkd) is a file on this machine; nothing is ever downloaded. ``model`` (clip) is
    open_clip's name of what the file holds, and ``dim`` the width of its features. ``layer`` counts its blocks from 0,
    or from the last with -1; ``ln_post`` applies its last norm, ``projected`` what maps to the space of texts.
    ``codes`` (dvae, vqkd) is how many there are. ``layers`` (teacher) is how many of the last blocks are averaged; the
    teacher is the average that ``ema_decay`` keeps.
    """

    name: str = choice("hog", "pixels", "clip", "dvae", "vqkd", "teacher")
    norm: str = choice("layernorm", "none", "l2", "patch")
    cell: int | None = number(None, least=1)
    bins: int = positive(9)
    flavour: str = choice("dmjd", "maskfeat", "maskfeat_gauss", "skimage")
    unbiased: bool = True
    weights: str | None = None
    model: str = "ViT-B-16-quickgelu"
    dim: int = positive(512)
    layer: int = -1
    ln_post: bool = True
    projected: bool = True
    codes: int = positive(8192)
    layers: int = positive(6)


@dataclass
class DataConfig:
    """Images. ``mean`` and ``std`` are per channel, on the 0..1 scale; ``pad`` is a black border in pixels.

    ``max_bad_percent``: how many training images may be bad, each with another in its place, before the run stops.
    ``jitter`` is the strength of random brightness, contrast and saturation, 0 for none. ``second_size`` is that of
    the same crop for a target that reads another size, resampled by Lanczos as BEiT does; its tokenizer says which.
    ``cache`` (shards behind a URL) is a folder on a disk of the node, below TMPDIR if left out; ``cache_gib`` its GiB.
    ``samples`` (stream) is how many images count as an epoch, ``shuffle_buffer`` how many a reader draws the next from.
    """

    name: str = choice("folder", "fashion_mnist", "digits", "auto", "shards", "stream")
    root: str | None = None
    image_size: list[int] = numbers(224, 224, length=2, least=1)
    channels: int = positive(3)
    pad: int = number(0, least=0)
    check: str = choice("header", "none", "decode")
    max_bad_percent: float = number(1.0, least=0, most=100)
    cache: str | None = None
    cache_gib: float = positive(100.0)
    samples: int | None = number(None, least=1)
    shuffle_buffer: int = positive(1000)
    crop_scale: list[float] = numbers(0.2, 1.0, length=2, above=0, most=1)
    crop_ratio: list[float] = numbers(0.75, 4 / 3, length=2, above=0)
    interpolation: str = choice("bicubic", "bilinear")
    second_size: list[int] | None = numbers_or_none(length=2, least=1)
    flip: bool = True
    jitter: float = number(0.0, least=0, most=1)
    mean: list[float] = numbers(0.485, 0.456, 0.406)
    std: list[float] = numbers(0.229, 0.224, 0.225, above=0)


@dataclass
class OptimConfig:
    """AdamW and its learning rate.

    ``lr_rule``: the paper's Eq. 4, ``base_lr * batch_size * m_pred / m_corr / 256``, or the classic
    ``base_lr * K * batch_size / 256``. ``lr_rates``: nominal, the rates as asked for (.6), or exact, as the integer
    counts give them (30/49). ``schedule``: half a cosine to ``min_lr``, or a tenth after each epoch of ``milestones``;
    both after a linear warm-up from ``warmup_lr``. ``no_decay`` names parameters that weight decay leaves alone besides
    biases and norms, by the last part of their names.
    """

    base_lr: float = positive(1.5e-4)
    lr_rule: str = choice("adaptive", "classic")
    lr_rates: str = choice("nominal", "exact")
    schedule: str = choice("cosine", "multistep")
    milestones: list[float] = numbers(above=0)
    min_lr: float = number(0.0, least=0)
    warmup_lr: float = number(0.0, least=0)
    warmup_epochs: float = number(40.0, least=0)
    weight_decay: float = number(0.05, least=0)
    betas: list[float] = numbers(0.9, 0.95, length=2, least=0, below=1)
    eps: float = positive(1e-8)
    clip_grad: float | None = number(None, above=0)
    no_decay: list[str] = field(default_factory=list)


@dataclass
class EngineConfig:
    """How a step is computed. ``accumulation`` micro-batches make one step of ``batch_size`` images.

    ``activation_checkpointing``: recompute in the backward pass nothing, each block's MLP, all of a block but its
    matrix products, attention and convolutions, or whole blocks.
    ``compile``: transformer blocks one by one, or the whole model as one graph, which is faster and starts later.
    ``reshard_after_forward`` (fsdp, hsdp): drop a block's gathered parameters until its backward pass.
    ``replicas`` (hsdp): copies of the sharded model, one on each host if left out.
    ``offload_optimizer`` (zero1, zero2, zero3): AdamW runs in the host's memory. ``deepspeed_config`` (the same): a
    JSON file of DeepSpeed's keys that are not ours to decide.
    ``start_timeout`` and ``step_timeout``: minutes a rank waits for the others until the first step is done, and in a
    step after it.
    """

    name: str = choice("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
    device: str = choice("auto", "cpu", "cuda")
    precision: str = choice("auto", "fp32", "bf16")
    accumulation: int = positive(1)
    activation_checkpointing: str = choice("none", "mlp", "selective", "full")
    compile: str = choice("none", "block", "model")
    reshard_after_forward: bool = True
    replicas: int | None = number(None, least=1)
    offload_optimizer: bool = False
    deepspeed_config: str | None = None
    start_timeout: float = positive(30.0)
    step_timeout: float = positive(10.0)


@dataclass
class OnlineKnnConfig:
    """Weighted kNN while a run is under way, every ``every_epochs`` epochs (0: never).

    ``train_images`` keeps at most that many, evenly spaced. ``warn_drop``: how many points below the best score so far
    are worth a warning.
    """

    every_epochs: int = number(0, least=0)
    train_images: int = positive(20000)
    neighbours: int = positive(20)
    temperature: float = positive(0.07)
    pooling: str = choice("mean", "cls")
    warn_drop: float = number(2.0, least=0)


@dataclass
class GuardConfig:
    """What is done about steps that go wrong (docs/robustness.md); a run without any does not depend on it.

    A step whose loss or gradient is not finite is skipped. More than ``max_skips`` of them in ``window`` steps roll the
    run back to a checkpoint from ``margin`` or more steps before the first, and the batches from ``margin`` steps
    before the first to the last are passed over. What would be the rollback after ``max_rollbacks`` stops the run; with
    both limits at 0 the first bad step does. ``spike`` rolls back as well, after ``spike_steps`` losses in a row that
    are so many standard deviations above the median of the last ``window``; null: a loss may be as high as it likes.
    """

    max_skips: int = number(3, least=0)
    window: int = number(100, least=10)
    margin: int = number(100, least=0)
    max_rollbacks: int = number(2, least=0)
    spike: float | None = number(None, above=0)
    spike_steps: int = positive(3)


@dataclass
class PretrainConfig:
    """A pre-training run.

    ``batch_size`` counts unique images a step over all processes, each of which gives K views. ``ema_decay`` keeps an
    average of the encoder. ``init`` is a checkpoint, or a file of weights of any known code base, to begin from where
    the run folder has no checkpoint of its own.
    The newest ``keep_checkpoints`` are kept, and for ever those of every ``keep_every``-th step.
    ``checkpoint_async`` writes them while training goes on, from a copy in the host's memory.
    ``wandb`` names a Weights & Biases project. After ``time_budget``, H:MM:SS or D-HH:MM:SS, a launch saves and stops;
    auto: ``time_margin`` seconds before its Slurm job ends; null: never.
    ``profile=steps:10-14`` has torch's profiler watch these steps, on rank 0 or on all ``profile_ranks``.
    ``memory_history`` keeps the stacks of allocations for the snapshot that running out of memory on CUDA leaves.
    """

    run: str = "runs/pretrain"
    seed: int = number(0, least=0, below=2**32)
    epochs: int = positive(800)
    batch_size: int = positive(1024)
    ema_decay: float | None = number(None, above=0, below=1)
    mask: MaskConfig = field(default_factory=MaskConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    workers: int = number(8, least=0)
    resume: str = choice("auto", "never")
    init: str | None = None
    log_every: int = positive(20)
    checkpoint_every: int = positive(1000)
    keep_checkpoints: int = positive(2)
    keep_every: int | None = number(None, least=1)
    checkpoint_async: bool = True
    guard: GuardConfig = field(default_factory=GuardConfig)
    time_budget: str | None = "auto"
    time_margin: float = number(300.0, least=0)
    online_knn: OnlineKnnConfig = field(default_factory=OnlineKnnConfig)
    tensorboard: bool = False
    wandb: str | None = None
    profile: str | None = None
    profile_ranks: str = choice("main", "all")
    memory_history: bool = False


@dataclass
class PlanConfig(PretrainConfig):
    """What a pre-training run would take on ``gpus`` GPUs of kind ``gpu``, ``gpus_per_node`` to a host.

    ``images`` is the size of the training set, ImageNet-1k's if left out, and ``mfu`` per cent of the GPU's peak.
    """

    gpus: int = positive(1)
    gpu: str = choice("h100", *(name for name in ACCELERATORS if name != "h100"))
    gpus_per_node: int = positive(8)
    images: int = positive(1_281_167)
    mfu: float = number(30.0, above=0, most=100)


SCIENCE = ("seed", "epochs", "batch_size", "ema_decay", "init", "mask", "backbone", "method", "target", "data", "optim")
"""Keys of :class:`PretrainConfig` that decide a result; a run folder holds one value of each for ever."""


@dataclass
class KnnConfig:
    """Weighted kNN on frozen features.

    ``checkpoint`` is a run folder, one of its checkpoints, or a file of weights, of ours or of another code base. What
    model a file is of, ``experiment=NAME`` says, and ``backbone.KEY=VALUE`` beside it; they become ``model``.
    ``train_images`` keeps that many, evenly spaced. ``output`` is a folder for the score, by default the run's; a
    file's is named like it, without its suffix.
    """

    checkpoint: str = "???"
    model: PretrainConfig | None = None
    output: str | None = None
    weights: str = choice("trained", "untrained", "ema")
    pooling: str = choice("mean", "cls")
    train_images: int | None = number(None, least=1)
    neighbours: int = positive(20)
    temperature: float = positive(0.07)
    batch_size: int = positive(256)
    workers: int = number(8, least=0)
    device: str = choice("auto", "cpu", "cuda")
    data: DataConfig | None = None


@dataclass
class LinprobeConfig:
    """MAE's linear probe: affine-free BatchNorm and a linear layer on frozen features, trained with LARS.

    ``checkpoint``, ``model`` and ``output`` are as for kNN. ``augment`` draws a new crop and flip of every image in
    each epoch; without it features are computed once.
    """

    checkpoint: str = "???"
    model: PretrainConfig | None = None
    output: str | None = None
    weights: str = choice("trained", "untrained", "ema")
    pooling: str = choice("mean", "cls")
    train_images: int | None = number(None, least=1)
    epochs: int = positive(90)
    warmup_epochs: int = number(10, least=0)
    base_lr: float = positive(0.1)
    batch_size: int = positive(16384)
    augment: bool = True
    seed: int = number(0, least=0, below=2**32)
    workers: int = number(8, least=0)
    device: str = choice("auto", "cpu", "cuda")
    data: DataConfig | None = None


@dataclass
class ExportConfig:
    """An encoder as safetensors for timm. ``output`` is a file, by default ``RUN/export/encoder-....safetensors``.

    ``checkpoint`` and ``model`` are as for kNN. ``dtype`` is what its tensors are rounded to.
    """

    checkpoint: str = "???"
    model: PretrainConfig | None = None
    output: str | None = None
    weights: str = choice("trained", "untrained", "ema")
    dtype: str = choice("fp32", "bf16", "fp16")


@dataclass
class ConsolidateConfig:
    """A checkpoint in one safetensors file. ``output`` is a file, by default a part of the checkpoint itself."""

    checkpoint: str = "???"
    output: str | None = None


# Those of dmjd.interop.layouts, which needs torch; a typo need not wait for it.
_LAYOUTS = ("timm", "ours", "mae", "convmae", "dmjd", "simmim", "beit", "maskfeat", "mmpretrain")


@dataclass
class ConvertConfig:
    """A checkpoint of one code base for another. ``input`` is a file, or a run folder or checkpoint of ours.

    ``grid`` (h, w) in tokens: interpolate positions and relative position biases to it. ``source_grid`` is that of the
    input, where it is not square. ``bias_tables``: one for all blocks or one each; auto is what the target's models
    expect. ``unknown``: what to do with names that the source's layout does not have.
    """

    input: str = "???"
    output: str = "???"
    source: str = choice("auto", *_LAYOUTS)
    to: str = choice(*_LAYOUTS)  # "target" is a group of pre-training's, which Hydra would look into
    grid: list[int] | None = field(default=None, metadata={"bounds": {"least": 1}, "length": 2})
    source_grid: list[int] | None = field(default=None, metadata={"bounds": {"least": 1}, "length": 2})
    bias_tables: str = choice("auto", "shared", "per_block")
    unknown: str = choice("refuse", "drop")


def check_fields(config: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first value outside its field's choices or bounds."""
    for item in fields(config):
        value, key = getattr(config, item.name), prefix + item.name
        if is_dataclass(value):
            check_fields(value, key + ".")
        choices = item.metadata.get("choices")
        if choices and value not in choices:
            raise ConfigError(f"{key} must be one of {', '.join(sorted(choices))}, got {value!r}")
        length = item.metadata.get("length")
        if length is not None and value is not None and len(value) != length:
            raise ConfigError(f"{key} must hold {length} numbers, got {value}")
        if "bounds" in item.metadata and value is not None:
            for single in value if isinstance(value, list) else [value]:
                _check_bounds(key, single, item.metadata["bounds"])
    if isinstance(config, PretrainConfig) and not config.run.strip():
        raise ConfigError("run must name a folder, got nothing")
    if isinstance(config, PretrainConfig) and config.wandb is not None and not config.wandb.strip():
        raise ConfigError("wandb must name a project, or be null for none, got nothing")


_BOUNDS = {
    "above": (operator.gt, "above"),
    "least": (operator.ge, "at least"),
    "below": (operator.lt, "below"),
    "most": (operator.le, "at most"),
}


def _check_bounds(key: str, value: float, bounds: dict[str, float]) -> None:
    if not math.isfinite(value) or not all(_BOUNDS[name][0](value, bound) for name, bound in bounds.items()):
        allowed = " and ".join(f"{_BOUNDS[name][1]} {bound:g}" for name, bound in bounds.items()) or "a finite number"
        raise ConfigError(f"{key} must be {allowed}, got {value}")
