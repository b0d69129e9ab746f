"""From a configuration to the objects of a run, refusing combinations that cannot be before any data is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial

import torch

from dmjd.config import BackboneConfig, DataConfig, MaskConfig, PretrainConfig
from dmjd.errors import ConfigError
from dmjd.masking import MaskSpec
from dmjd.models import convvit, swin
from dmjd.models.convvit import ConViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.objective import Objective
from dmjd.models.swin import SwinEncoder
from dmjd.models.vit import ViTEncoder
from dmjd.targets import ClipTarget, CodebookTarget, HogTarget, PixelTarget, TeacherTarget, Tokenizer
from dmjd.targets.clip import clip_patch, load_clip
from dmjd.targets.codebook import DVAE_PATCH, load_dvae, load_vqkd
from dmjd.train.schedules import adaptive_lr, classic_lr, cosine, multistep

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

OF_VIT_ALONE = ("positions", "block", "layer_scale")


@contextmanager
def _refusing(section: str) -> Iterator[None]:
    """A lower room's ValueError is about the section of the configuration that it was given."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{section}: {error}") from error


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


def build_mask_spec(config: MaskConfig, grid: tuple[int, int]) -> MaskSpec:
    """The mask specification, known to be possible on ``grid``."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    values["block"] = tuple(values["block"])
    with _refusing("mask"):
        spec = MaskSpec(**values)
        spec.plan(grid)
    return spec


def build_tokenizer(config: PretrainConfig) -> Tokenizer:
    """The target tokenizer ``tkn(.)``, with its weights where it has any.

    Raises:
        ConfigError: if the target does not fit the method or the data, or its weights are missing.
    """
    target, data, patch = config.target, config.data, config.backbone.patch_size
    check_target(config)
    mean, std = tuple(data.mean), tuple(data.std)
    with _refusing("target"):
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
        if config.engine.name not in ("single", "ddp"):
            raise ConfigError(
                f"target.name=teacher needs a whole average on every process: engine=single or ddp, got "
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


def check_data(data: DataConfig) -> None:
    """Refuse statistics and crop ranges that cannot be."""
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) != data.channels:
            raise ConfigError(f"data.{name} needs one value for each of {data.channels} channels, got {list(values)}")
    for name, (least, greatest) in (("crop_scale", data.crop_scale), ("crop_ratio", data.crop_ratio)):
        if least > greatest:
            raise ConfigError(f"data.{name} must be [least, greatest], got [{least}, {greatest}]")
    if data.jitter and data.channels != 3:
        raise ConfigError(f"data.jitter changes colours and needs data.channels=3, got {data.channels}")


def build_encoder(config: PretrainConfig) -> Encoder:
    """The encoder, its weights drawn from torch's generator."""
    backbone, channels = config.backbone, config.data.channels
    if backbone.name != "vit":
        _refuse_options(backbone)
    if backbone.name == "vit":
        return ViTEncoder(
            image_size=image_size(config),
            patch_size=backbone.patch_size,
            in_chans=channels,
            embed_dim=backbone.embed_dim,
            depth=backbone.depth,
            num_heads=backbone.num_heads,
            mlp_ratio=backbone.mlp_ratio,
            class_token=backbone.class_token,
            hidden=backbone.hidden,
            positions=backbone.positions,
            block=backbone.block,
            layer_scale=backbone.layer_scale,
        )
    if backbone.name == "swin":
        return SwinEncoder(
            image_size=image_size(config),
            in_chans=channels,
            embed_dim=backbone.embed_dim,
            depths=backbone.windows.depths,
            num_heads=backbone.windows.num_heads,
            window=backbone.windows.size,
            mlp_ratio=backbone.mlp_ratio,
        )
    stages = backbone.conv_stages
    return ConViTEncoder(
        image_size=image_size(config),
        in_chans=channels,
        embed_dims=(*stages.embed_dims, backbone.embed_dim),
        depths=(*stages.depths, backbone.depth),
        mlp_ratios=(*stages.mlp_ratios, backbone.mlp_ratio),
        num_heads=backbone.num_heads,
        multi_scale=backbone.multi_scale,
    )


def _refuse_options(backbone: BackboneConfig) -> None:
    """Options that a ConViT or a Swin does not have must be left as they are."""
    plain = BackboneConfig()
    needed = {key: getattr(plain, key) for key in OF_VIT_ALONE} | {"class_token": False}
    if backbone.name == "swin":
        needed |= {"patch_size": swin.PATCH_SIZE, "hidden": "mask_token", "drop_path": 0.0}
    else:
        needed |= {"patch_size": convvit.PATCH_SIZE, "hidden": "drop"}
    for key, value in needed.items():
        found = getattr(backbone, key)
        if found != value:
            raise ConfigError(f"backbone.{key} must be {value} for backbone.name={backbone.name}, got {found}")


def build_objective(config: PretrainConfig, target_dim: int) -> Objective:
    """Model and losses, initialised from ``config.seed`` alone."""
    backbone, method = config.backbone, config.method
    for section, width, heads in (
        ("backbone.embed_dim", backbone.embed_dim, backbone.num_heads if backbone.name != "swin" else 1),
        ("method.decoder.dim", method.decoder.dim, method.decoder.num_heads),
    ):
        if width % heads:
            raise ConfigError(f"{section}={width} is not divisible by its num_heads={heads}")
    torch.manual_seed(config.seed)
    with _refusing("backbone, method.decoder"):
        encoder = build_encoder(config)
        decoder = None
        if method.decoder.name == "mae":
            decoder = MAEDecoder(
                encoder_dim=encoder.embed_dim,
                grid=encoder.grid,
                prefix_tokens=encoder.num_prefix_tokens,
                dim=method.decoder.dim,
                depth=method.decoder.depth,
                num_heads=method.decoder.num_heads,
                mlp_ratio=method.decoder.mlp_ratio,
            )
        branch = None
        if method.visible_branch.enabled:
            branch = VisibleBranch(
                encoder_dim=encoder.embed_dim,
                width=method.visible_branch.width,
                target_dim=target_dim,
                projector=method.visible_branch.projector,
            )
        model = MaskedImageModel(encoder, decoder, branch, target_dim, method.initialisation)
        return Objective(model, mim_loss=method.mim_loss, mim_weight=method.mim_weight)


def peak_lr(config: PretrainConfig, spec: MaskSpec, grid: tuple[int, int]) -> float:
    """The learning rate at the end of warm-up."""
    optim = config.optim
    if optim.lr_rule == "classic":
        return classic_lr(optim.base_lr, config.batch_size, spec.views)
    rates = spec.true_rates(grid) if optim.lr_rates == "exact" else spec.nominal_rates(grid)
    return adaptive_lr(optim.base_lr, config.batch_size, rates.m_corr, rates.m_pred)


def build_schedule(
    config: PretrainConfig, spec: MaskSpec, grid: tuple[int, int], steps_per_epoch: int
) -> Callable[[int], float]:
    """Optimizer step -> learning rate.

    Raises:
        ConfigError: if milestones are missing, idle or not within the epochs of the run.
    """
    optim = config.optim
    peak, warmup = peak_lr(config, spec, grid), round(optim.warmup_epochs * steps_per_epoch)
    if optim.schedule == "cosine":
        if optim.milestones:
            raise ConfigError("optim.milestones belongs to optim.schedule=multistep, and the schedule is cosine")
        total = config.epochs * steps_per_epoch
        return partial(cosine, total=total, warmup=warmup, peak=peak, floor=optim.min_lr, start=optim.warmup_lr)
    if not optim.milestones or max(optim.milestones) >= config.epochs:
        raise ConfigError(
            f"optim.milestones of optim.schedule=multistep must be epochs below epochs={config.epochs}, got "
            f"{optim.milestones}"
        )
    milestones = [round(epoch * steps_per_epoch) for epoch in optim.milestones]
    return partial(multistep, milestones=milestones, warmup=warmup, peak=peak, start=optim.warmup_lr)
