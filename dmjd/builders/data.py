"""What a configuration says of images: their size, the tokens they are cut into, and what of it cannot be."""

from __future__ import annotations

from dmjd.config import DataConfig, PretrainConfig
from dmjd.data.build import training_crop
from dmjd.errors import ConfigError


def image_size(config: PretrainConfig) -> tuple[int, int]:
    """(height, width) in pixels."""
    size = config.data.image_size
    return size[0], size[1]


def token_grid(config: PretrainConfig) -> tuple[int, int]:
    """(h, w) tokens."""
    height, width = image_size(config)
    patch = config.backbone.patch_size
    if height % patch or width % patch:
        raise ConfigError(f"data.image_size {height}x{width} is not divisible by backbone.patch_size={patch}")
    return height // patch, width // patch


def check_data(data: DataConfig) -> None:
    """Refuse statistics and crop ranges that cannot be."""
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) != data.channels:
            raise ConfigError(f"data.{name} needs one value for each of {data.channels} channels, got {list(values)}")
    training_crop(data)
    if data.jitter and data.channels != 3:
        raise ConfigError(f"data.jitter changes colours and needs data.channels=3, got {data.channels}")


def check_data_timeout(config: PretrainConfig, processes: int) -> None:
    """Raise ConfigError where a rank that waits for data would be given up by the others first."""
    engine, minutes = config.engine, config.data.timeout
    for key in ("step_timeout", "start_timeout"):
        if processes > 1 and minutes >= getattr(engine, key):
            raise ConfigError(
                f"data.timeout={minutes:g} must be below engine.{key}={getattr(engine, key):g} with several processes, "
                "which end each other after that; lower the one or raise the other"
            )
