"""A pre-training run, and the plan of one."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.accelerators import ACCELERATORS
from dmjd.config.data import DataConfig
from dmjd.config.fields import choice, may_change, naming, number, path, positive
from dmjd.config.model import BackboneConfig, MaskConfig, MethodConfig, TargetConfig
from dmjd.config.step import EngineConfig, GuardConfig, OptimConfig


@dataclass
class OnlineKnnConfig:
    """Weighted kNN while a run is under way.

    ``every_epochs``: how often; 0 for never.
    ``train_images``: use at most that many, evenly spaced.
    ``neighbours``: how many vote. ``temperature``: of their votes.
    ``pooling``: the patch tokens' mean, or the cls token.
    ``warn_drop``: how many points below the best score so far are worth a warning.
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

    ``run``: the folder of the run, which is continued where there is one.
    ``seed``: of all that is random.
    ``epochs``: how often each image is read.
    ``batch_size``: unique images a step over all processes, each of which gives K views.
    ``ema_decay``: keep an average of the encoder.
    ``workers``: processes that load images, for each process of the run.
    ``resume``: auto continues from the newest checkpoint of ``run``; never refuses a folder that has one.
    ``init``: a checkpoint, or a file of weights of any known code base, to begin from where the run folder has no
    checkpoint of its own.
    ``log_every``: steps between lines of the log.
    ``checkpoint_every``: steps between checkpoints.
    ``keep_checkpoints``: how many of the newest are kept.
    ``keep_every``: keep those of every such step for ever.
    ``checkpoint_async``: write them while training goes on, from a copy in the host's memory.
    ``time_budget``: after this, H:MM:SS or D-HH:MM:SS, a launch saves and stops; auto, before its Slurm job ends; null,
    never.
    ``time_margin``: how many seconds before the end of the job, for auto.
    ``lock_wait``: seconds a Slurm job waits for another process that holds the run folder, such as one on a node that
    was cut off.
    ``tensorboard``: write its files into the run folder.
    ``wandb``: a Weights & Biases project.
    ``profile``: steps:10-14 has torch's profiler watch these steps.
    ``profile_ranks``: on rank 0 or on all.
    ``memory_history``: keep the stacks of allocations for the snapshot that running out of memory on CUDA leaves.
    """

    run: str = may_change(path("runs/pretrain", of="a folder"))
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
    engine: EngineConfig = may_change(field(default_factory=EngineConfig))
    workers: int = may_change(number(8, least=0))
    resume: str = may_change(choice("auto", "never"))
    init: str | None = path()
    log_every: int = may_change(positive(20))
    checkpoint_every: int = may_change(positive(1000))
    keep_checkpoints: int = may_change(positive(2))
    keep_every: int | None = may_change(number(None, least=1))
    checkpoint_async: bool = may_change(True)
    guard: GuardConfig = may_change(field(default_factory=GuardConfig))
    time_budget: str | None = may_change("auto")
    time_margin: float = may_change(number(300.0, least=0))
    lock_wait: float = may_change(number(300.0, least=0))
    online_knn: OnlineKnnConfig = may_change(field(default_factory=OnlineKnnConfig))
    tensorboard: bool = may_change(False)
    wandb: str | None = may_change(naming(None, "a project, or be null for none"))
    profile: str | None = may_change(None)
    profile_ranks: str = may_change(choice("main", "all"))
    memory_history: bool = may_change(False)


@dataclass
class PlanConfig(PretrainConfig):
    """What a pre-training run would take.

    ``gpus``: how many. ``gpu``: of which kind. ``gpus_per_node``: how many to a host.
    ``images``: the size of the training set, by default ImageNet-1k's.
    ``mfu``: per cent of the GPU's peak.
    """

    gpus: int = positive(1)
    gpu: str = choice("h100", *(name for name in ACCELERATORS if name != "h100"))
    gpus_per_node: int = positive(8)
    images: int = positive(1_281_167)
    mfu: float = number(30.0, above=0, most=100)
