"""The target of a configuration, refused where it fits neither method nor data before any weights are looked for."""

from __future__ import annotations

from dmjd.builders.data import check_data, image_size, token_grid
from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError, config_section
from dmjd.parallel.engines import ENGINES
from dmjd.targets import ClipTarget, CodebookTarget, HogTarget, PixelTarget, TeacherTarget, Tokenizer
from dmjd.targets.clip import clip_patch, load_clip
from dmjd.targets.codebook import DVAE_PATCH, load_dvae, load_vqkd

TARGET_NORMS = {
    "hog": ("layernorm", "l2", "none"),
    "pixels": ("patch", "none"),
    "clip": ("layernorm", "none"),
    "teacher": ("layernorm", "none"),
    "dvae": ("none",),
    "vqkd": ("none",),
}
CODES = ("dvae", "vqkd")
"""Targets that are codes, which cross-entropy learns."""


def build_tokenizer(config: PretrainConfig) -> Tokenizer:
    """The target tokenizer ``tkn(.)``, with its weights where it has any.

    Raises:
        ConfigError: if the target does not fit the method or the data, or its weights are missing.
    """
    target, data, patch = config.target, config.data, config.backbone.patch_size
    check_target(config)
    mean, std = tuple(data.mean), tuple(data.std)
    with config_section("target"):
        if target.name == "pixels":
            return PixelTarget(patch, data.channels, mean, std, norm=target.norm, unbiased=target.unbiased)
        if target.name == "hog":
            return HogTarget(patch, data.channels, target.cell, target.bins, target.flavour, target.norm)
        if target.name == "teacher":
            return TeacherTarget(config.backbone.embed_dim, patch, mean, std, target.norm)
        if target.name == "dvae":
            return CodebookTarget(load_dvae(target.weights, target.codes), target.codes, patch)
        height, width = image_size(config) if data.second_size is None else data.second_size
        if target.name == "vqkd":
            vqkd = load_vqkd(target.weights, target.codes, (height, width))
            _check_grid(config, vqkd.patch)
            return CodebookTarget(vqkd, target.codes, patch)
        tower = load_clip(target.model, target.weights, (height, width))
        _check_grid(config, clip_patch(tower))
        choices = (target.layer, target.ln_post, target.projected, target.norm)
        return ClipTarget(tower, patch, token_grid(config), target.dim, *choices)


def target_dim(config: PretrainConfig) -> int:
    """Width of the head's output: :attr:`~dmjd.targets.Tokenizer.dim`, without reading any weights."""
    if config.target.name in CODES:
        return config.target.codes
    if config.target.name == "clip":
        return config.target.dim
    return build_tokenizer(config).dim


def check_target(config: PretrainConfig) -> None:
    """Refuse a target that fits neither method nor data, before any weights are looked for."""
    target, data, method, backbone = config.target, config.data, config.method, config.backbone
    check_data(data)
    if target.norm not in TARGET_NORMS[target.name]:
        allowed = ", ".join(TARGET_NORMS[target.name])
        raise ConfigError(f"target.norm must be one of {allowed} for target.name={target.name}, got {target.norm!r}")
    if (method.mim_loss == "cross_entropy") != (target.name in CODES):
        what = "codes, so" if target.name in CODES else "vectors, so"
        allowed = "cross_entropy" if target.name in CODES else "mse, l1, smooth_l1 or cosine"
        raise ConfigError(
            f"target.name={target.name} gives {what} method.mim_loss must be {allowed}, got {method.mim_loss}"
        )
    if target.name in CODES and method.visible_branch.enabled:
        raise ConfigError(
            f"target.name={target.name} gives codes, and the visible branch regresses vectors; set "
            "method.visible_branch.enabled=false"
        )
    if target.name in ("clip", *CODES) and data.channels != 3:
        raise ConfigError(f"target.name={target.name} reads colour images, got data.channels={data.channels}")
    if target.name == "dvae":
        _check_grid(config, DVAE_PATCH)
    elif target.name not in ("clip", "vqkd") and data.second_size is not None:
        raise ConfigError(f"data.second_size must be null for target.name={target.name}, which reads the crop itself")
    if target.name == "teacher":
        if config.ema_decay is None:
            raise ConfigError("target.name=teacher needs ema_decay, of the average that teaches, such as .9998")
        if backbone.name == "swin":
            raise ConfigError("target.name=teacher needs backbone.name=vit or convvit, whose last blocks share a grid")
        if not ENGINES[config.engine.name].teacher:
            whole = " or ".join(name for name, spec in ENGINES.items() if spec.teacher)
            raise ConfigError(
                f"target.name=teacher needs a whole average on every process: engine={whole}, got "
                f"engine.name={config.engine.name}"
            )
        if target.layers > backbone.depth:
            raise ConfigError(f"target.layers={target.layers} exceeds backbone.depth={backbone.depth}")


def _check_grid(config: PretrainConfig, patch: int) -> None:
    """A target's tokens are the student's: as many, in the same places."""
    grid = token_grid(config)
    read = image_size(config) if config.data.second_size is None else tuple(config.data.second_size)
    needed = (grid[0] * patch, grid[1] * patch)
    if read != needed:
        cure = "null" if needed == image_size(config) else f"[{needed[0]},{needed[1]}]"
        raise ConfigError(
            f"target.name={config.target.name} has patches of {patch} pixels, so for the student's {grid[0]}x{grid[1]} "
            f"tokens it must read {needed[0]}x{needed[1]} pixels, not {read[0]}x{read[1]}; set data.second_size={cure}"
        )
