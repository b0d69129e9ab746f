"""Images of a configuration: their size, the token grid, the masks on it, and checks of ``data``."""

from __future__ import annotations

from dmjd.config import DataConfig, MaskConfig, TrainConfig
from dmjd.data.build import training_crop
from dmjd.errors import ConfigError, config_section
from dmjd.masking import MaskSpec


def image_size(config: TrainConfig) -> tuple[int, int]:
    """(height, width) in pixels."""
    size = config.data.image_size
    return size[0], size[1]


def token_grid(config: TrainConfig) -> tuple[int, int]:
    """(h, w) tokens."""
    height, width = image_size(config)
    patch = config.backbone.patch_size
    if height % patch or width % patch:
        near = [max(round(side / patch), 1) * patch for side in (height, width)]
        nearest = f"{near[0]}" if near[0] == near[1] else f"[{near[0]},{near[1]}]"
        raise ConfigError(
            f"data.image_size {height}x{width} is not divisible by backbone.patch_size={patch}; the nearest size is "
            f"data.image_size={nearest}"
        )
    return height // patch, width // patch


def build_mask_spec(config: MaskConfig, grid: tuple[int, int]) -> MaskSpec:
    """The mask specification. Raises ConfigError if ``grid`` does not allow it."""
    with config_section("mask"):
        spec = MaskSpec(**vars(config) | {"block": tuple(config.block)})
        spec.plan(grid)
    return spec


def check_data(data: DataConfig) -> None:
    """Raise ConfigError for statistics, crop ranges and jitter that do not fit the channels."""
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) != data.channels:
            raise ConfigError(f"data.{name} needs one value for each of {data.channels} channels, got {list(values)}")
    training_crop(data)
    if data.jitter and data.channels != 3:
        raise ConfigError(f"data.jitter changes colours and needs data.channels=3, got {data.channels}")


def check_data_timeout(config: TrainConfig, processes: int) -> None:
    """Raise ConfigError if the time-outs of the other ranks end before ``data.timeout``."""
    engine, minutes = config.engine, config.data.timeout
    for key in ("step_timeout", "start_timeout"):
        if processes > 1 and minutes >= getattr(engine, key):
            raise ConfigError(
                f"data.timeout={minutes:g} must be below engine.{key}={getattr(engine, key):g} with several processes, "
                "where collectives time out after it; lower the first or raise the second"
            )
