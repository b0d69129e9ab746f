"""One step of a configuration, assembled in one place: for the loop, and for preflight's warm-up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dmjd.builders import build_mask_spec, build_objective, build_tokenizer, token_grid
from dmjd.builders.average import EmaTeacher, EncoderEma
from dmjd.builders.preparation import Preparation
from dmjd.builders.weights import load_weights
from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError
from dmjd.parallel.build import build_engine
from dmjd.parallel.engine import Engine
from dmjd.parallel.world import World
from dmjd.targets import TeacherTarget, Tokenizer


@dataclass(frozen=True)
class Step:
    """``engine`` trains on the ``inputs`` of ``prepare(batch, epoch)``; ``ema`` follows, where the run keeps one.

    began_from: the initial weights that were read, and those that were not, in a few words; empty without any.
    """

    engine: Engine
    prepare: Preparation
    ema: EncoderEma | None
    began_from: str = ""


def build_preparation(config: PretrainConfig, tokenizer: Tokenizer, depth: int) -> Preparation:
    """From a batch to an objective's inputs, as ``config`` says; ``depth`` is the encoder's."""
    grid, data = token_grid(config), config.data
    return Preparation(
        build_mask_spec(config.mask, grid),
        grid,
        tokenizer,
        tuple(data.mean),
        tuple(data.std),
        flip=data.flip,
        seed=config.seed,
        depth=depth,
        drop_path=config.backbone.drop_path,
        jitter=data.jitter,
    )


def build_step(config: PretrainConfig, world: World, initial: Path | None = None) -> Step:
    """Model, engine, target and average. Collective where the engine is.

    Args:
        initial: weights to begin with, as :func:`~dmjd.builders.weights.load_weights` takes them.

    Raises:
        UserError: for what does not go together, and for weights that do not fit.
    """
    build_mask_spec(config.mask, token_grid(config))  # a wrong mask is found before weights of a target are read
    tokenizer, processes = build_tokenizer(config), config.engine.grad_accum_steps * world.size
    if config.batch_size % processes:
        raise ConfigError(
            f"batch_size={config.batch_size} is not divisible by "
            f"engine.grad_accum_steps={config.engine.grad_accum_steps} times {world.size} process(es)"
        )
    objective = build_objective(config, tokenizer.dim)
    began_from = "" if initial is None else world.all_or_none(lambda: load_weights(objective, initial))
    engine = build_engine(objective, config.engine, config.optim, world, config.batch_size // processes)
    encoder = engine.objective.model.encoder
    ema = None if config.ema_decay is None else EncoderEma(engine.local_shards(), config.ema_decay)
    if ema is not None and isinstance(tokenizer, TeacherTarget):
        tokenizer.teacher = EmaTeacher(encoder, ema, config.target.layers)
    return Step(engine, build_preparation(config, tokenizer, len(encoder.blocks)), ema, began_from)
