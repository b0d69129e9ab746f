"""The target of a configuration; combinations that cannot work are rejected before any weights are read."""

from __future__ import annotations

from dmjd.builders.data import check_data, token_grid
from dmjd.builders.model import BACKBONES
from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError, config_section
from dmjd.parallel.engines import AUTO, ENGINES
from dmjd.targets import TARGETS, Tokenizer, check_grid


def build_tokenizer(config: PretrainConfig) -> Tokenizer:
    """The target tokenizer ``tkn(.)``, with its weights where it has any.

    Raises:
        ConfigError: if the target does not fit the method or the data, or its weights are missing.
    """
    check_target(config)
    with config_section("target"):
        return TARGETS[config.target.name].build(config)


def target_dim(config: PretrainConfig) -> int:
    """Width of the head's output: :attr:`~dmjd.targets.Tokenizer.dim`, without reading any weights."""
    dim = TARGETS[config.target.name].dim
    return build_tokenizer(config).dim if dim is None else dim(config)


def check_target(config: PretrainConfig) -> None:
    """Raise ConfigError for a target that does not fit method, data, backbone or engine."""
    target, data, method = config.target, config.data, config.method
    spec, name = TARGETS[target.name], f"target.name={target.name}"
    check_data(data)
    token_grid(config)
    if target.norm not in spec.norms:
        raise ConfigError(f"target.norm must be one of {', '.join(spec.norms)} for {name}, got {target.norm!r}")
    if (method.mim_loss == "cross_entropy") != spec.codes:
        what, losses = ("codes", "cross_entropy") if spec.codes else ("vectors", "mse, l1, smooth_l1 or cosine")
        raise ConfigError(f"{name} gives {what}, so method.mim_loss must be {losses}, got {method.mim_loss}")
    if spec.codes and method.visible_branch.enabled:
        raise ConfigError(
            f"{name} gives codes, and the visible branch regresses vectors; set method.visible_branch.enabled=false"
        )
    if spec.colour and data.channels != 3:
        raise ConfigError(f"{name} reads colour images, got data.channels={data.channels}")
    if not spec.second_size and data.second_size is not None:
        raise ConfigError(f"data.second_size must be null for {name}, which reads the crop itself")
    if spec.input_patch is not None:
        check_grid(config, spec.input_patch)
    if spec.average:
        _check_teacher(config, name)


def check_teacher_engine(config: PretrainConfig, engine: str) -> None:
    """Raise ConfigError if the target needs a whole average on every process and ``engine`` shards it."""
    if engine == AUTO:
        return
    name = f"target.name={config.target.name}"
    engines = " or ".join(key for key, spec in ENGINES.items() if spec.teacher)
    if TARGETS[config.target.name].average and not ENGINES[engine].teacher:
        raise ConfigError(
            f"{name} needs all EMA weights on every process; set engine={engines}, got engine.name={engine}"
        )


def _check_teacher(config: PretrainConfig, name: str) -> None:
    if config.ema_decay is None:
        raise ConfigError(f"{name} needs ema_decay, the decay of its EMA teacher, such as ema_decay=0.9998")
    backbones = " or ".join(key for key, spec in BACKBONES.items() if spec.one_grid)
    if not BACKBONES[config.backbone.name].one_grid:
        raise ConfigError(f"{name} needs backbone.name={backbones}, got backbone.name={config.backbone.name}")
    check_teacher_engine(config, config.engine.name)
    if config.target.layers > config.backbone.depth:
        raise ConfigError(
            f"target.layers={config.target.layers} must be at most backbone.depth={config.backbone.depth}"
        )
