"""Configuration that pre-training and fine-tuning share."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.config.data import DataConfig
from dmjd.config.fields import choice, may_change, naming, number, path, positive, recorded
from dmjd.config.model import BackboneConfig
from dmjd.config.step import EngineConfig, GuardConfig, OptimConfig
from dmjd.errors import ConfigError


@dataclass
class TrainConfig:
    """A training.

    run: Run folder. If it holds checkpoints, the run is resumed, and keys that are not set on the command line keep the
        run's values.
    seed: Random seed.
    epochs: Passes over the training images.
    batch_size: Global batch size: images per optimizer step over all processes.
    workers: DataLoader workers per process.
    resume: auto: continue from the newest checkpoint in the run folder. never: stop with an error if there is one.
    init: Checkpoint or file of weights (any known code base) to initialise from. Ignored when resuming.
    log_every: Steps between log lines. null: about 200 lines in a run, and at least one in 100 steps.
    checkpoint_every: Steps between checkpoints.
    checkpoint_minutes: Also save a checkpoint this many minutes after the last one. 0: off. Does not affect results.
    keep_checkpoints: Number of newest checkpoints to keep.
    keep_every: Also keep every checkpoint whose step is a multiple of this. null: none.
    checkpoint_async: Write checkpoints in the background, from a copy in host memory.
    time_budget: Save a checkpoint and stop after this time, H:MM:SS or D-HH:MM:SS. auto: before the Slurm job's time
        limit. null: never.
    time_margin: (time_budget=auto) Seconds before the job's time limit at which to stop.
    lock_wait: Seconds that a Slurm job or an elastic launch waits for the lock of the run folder, for example while a
        process holds it on a node that lost its network.
    tensorboard: Write TensorBoard event files to the run folder.
    wandb: Weights & Biases project. null: off.
    profile: Steps to record with torch.profiler: steps:FIRST-LAST, such as steps:10-14. null: off.
    profile_ranks: Ranks to profile. main: rank 0. all: every rank.
    memory_history: Record allocation stack traces for the memory snapshot that a CUDA out-of-memory error writes.
    """

    run: str = may_change(path("runs/train", of="a folder"))
    seed: int = number(0, least=0, below=2**32)
    epochs: int = positive(100)
    batch_size: int = positive(1024)
    ema_decay: float | None = number(None, above=0, below=1)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = may_change(field(default_factory=EngineConfig))
    workers: int = may_change(number(8, least=0, most=1024))
    resume: str = may_change(choice("auto", "never"))
    init: str | None = path()
    log_every: int | None = may_change(number(None, least=1))
    checkpoint_every: int = may_change(positive(1000))
    checkpoint_minutes: float = may_change(number(15.0, least=0))
    keep_checkpoints: int = may_change(positive(2))
    keep_every: int | None = may_change(number(None, least=1))
    checkpoint_async: bool = may_change(True)
    guard: GuardConfig = may_change(field(default_factory=GuardConfig))
    time_budget: str | None = may_change("auto")
    time_margin: float = may_change(number(300.0, least=0))
    lock_wait: float = may_change(number(300.0, least=0))
    tensorboard: bool = may_change(False)
    wandb: str | None = may_change(naming(None, "a project, or be null for none"))
    profile: str | None = may_change(None)
    profile_ranks: str = may_change(choice("main", "all"))
    memory_history: bool = may_change(False)
    recipe: str = choice("none", "small_data")
    typed: list[str] | None = may_change(recorded())  # overrides: groups with their option, keys without their value
    command: str = recorded("")  # that made the run


def check_batch(batch_size: int, grad_accum_steps: int, processes: int) -> None:
    """Raise ConfigError unless every process has ``grad_accum_steps`` micro-batches of the same size in a step."""
    if batch_size % (grad_accum_steps * processes):
        raise ConfigError(
            f"batch_size={batch_size} is not divisible by engine.grad_accum_steps={grad_accum_steps} times {processes} "
            "process(es); change one of them"
        )
