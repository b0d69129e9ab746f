"""A pre-training run, and the plan of one."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.accelerators import ACCELERATORS
from dmjd.config.data import DataConfig
from dmjd.config.fields import choice, naming, number, path, positive
from dmjd.config.model import BackboneConfig, MaskConfig, MethodConfig, TargetConfig
from dmjd.config.step import EngineConfig, GuardConfig, OptimConfig


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
class PretrainConfig:
    """A pre-training run.

    ``batch_size`` counts unique images a step over all processes, each of which gives K views. ``ema_decay`` keeps an
    average of the encoder. ``init`` is a checkpoint, or a file of weights of any known code base, to begin from where
    the run folder has no checkpoint of its own.
    The newest ``keep_checkpoints`` are kept, and for ever those of every ``keep_every``-th step.
    ``checkpoint_async`` writes them while training goes on, from a copy in the host's memory.
    ``wandb`` names a Weights & Biases project. After ``time_budget``, H:MM:SS or D-HH:MM:SS, a launch saves and stops;
    auto: ``time_margin`` seconds before its Slurm job ends; null: never. A Slurm job waits ``lock_wait`` seconds for
    another process that holds the run folder, such as one on a node that was cut off.
    ``profile=steps:10-14`` has torch's profiler watch these steps, on rank 0 or on all ``profile_ranks``.
    ``memory_history`` keeps the stacks of allocations for the snapshot that running out of memory on CUDA leaves.
    """

    run: str = path("runs/pretrain", of="a folder")
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
    init: str | None = path()
    log_every: int = positive(20)
    checkpoint_every: int = positive(1000)
    keep_checkpoints: int = positive(2)
    keep_every: int | None = number(None, least=1)
    checkpoint_async: bool = True
    guard: GuardConfig = field(default_factory=GuardConfig)
    time_budget: str | None = "auto"
    time_margin: float = number(300.0, least=0)
    lock_wait: float = number(300.0, least=0)
    online_knn: OnlineKnnConfig = field(default_factory=OnlineKnnConfig)
    tensorboard: bool = False
    wandb: str | None = naming(None, "a project, or be null for none")
    profile: str | None = None
    profile_ranks: str = choice("main", "all")
    memory_history: bool = False


SCIENCE = ("seed", "epochs", "batch_size", "ema_decay", "init", "mask", "backbone", "method", "target", "data", "optim")
"""Keys of :class:`PretrainConfig` that decide a result; a run folder holds one value of each for ever."""


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
