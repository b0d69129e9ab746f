"""From a configuration to the objects of a run, refusing combinations that cannot be before any data is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch

from dmjd.config import DataConfig, MaskConfig, PretrainConfig, TargetConfig
from dmjd.errors import ConfigError
from dmjd.masking import MaskSpec
from dmjd.models.convvit import PATCH_SIZE, ConViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.objective import Objective
from dmjd.models.vit import ViTEncoder
from dmjd.targets import HogTarget, PixelTarget, Tokenizer
from dmjd.train.schedules import adaptive_lr, classic_lr

TARGET_NORMS = {"hog": ("layernorm", "l2", "none"), "pixels": ("patch", "none")}


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
    """The target tokenizer ``tkn(.)``."""
    target, data, patch = config.target, config.data, config.backbone.patch_size
    check_data(data)
    if target.norm not in TARGET_NORMS[target.name]:
        allowed = ", ".join(TARGET_NORMS[target.name])
        raise ConfigError(f"target.norm must be one of {allowed} for target.name={target.name}, got {target.norm!r}")
    with _refusing("target"):
        return _pixels(target, config) if target.name == "pixels" else _hog(target, patch, data.channels)


def _pixels(target: TargetConfig, config: PretrainConfig) -> PixelTarget:
    data = config.data
    return PixelTarget(
        patch=config.backbone.patch_size,
        channels=data.channels,
        mean=tuple(data.mean),
        std=tuple(data.std),
        norm=target.norm,
        unbiased=target.unbiased,
    )


def _hog(target: TargetConfig, patch: int, channels: int) -> HogTarget:
    return HogTarget(
        patch=patch,
        channels=channels,
        cell=target.cell,
        bins=target.bins,
        flavour=target.flavour,
        norm=target.norm,
    )


def check_data(data: DataConfig) -> None:
    """Refuse statistics and crop ranges that cannot be."""
    for name, values in (("mean", data.mean), ("std", data.std)):
        if len(values) != data.channels:
            raise ConfigError(f"data.{name} needs one value for each of {data.channels} channels, got {list(values)}")
    for name, (least, greatest) in (("crop_scale", data.crop_scale), ("crop_ratio", data.crop_ratio)):
        if least > greatest:
            raise ConfigError(f"data.{name} must be [least, greatest], got [{least}, {greatest}]")


def build_encoder(config: PretrainConfig) -> Encoder:
    """The encoder, its weights drawn from torch's generator."""
    backbone, channels = config.backbone, config.data.channels
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
        )
    for key, value, needed in (
        ("patch_size", backbone.patch_size, PATCH_SIZE),
        ("class_token", backbone.class_token, False),
        ("hidden", backbone.hidden, "drop"),
    ):
        if value != needed:
            raise ConfigError(f"backbone.{key} must be {needed} for backbone.name=convvit, got {value}")
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


def build_objective(config: PretrainConfig, target_dim: int) -> Objective:
    """Model and losses, initialised from ``config.seed`` alone."""
    backbone, method = config.backbone, config.method
    for section, width, heads in (
        ("backbone.embed_dim", backbone.embed_dim, backbone.num_heads),
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
            width = method.visible_branch.width
            branch = VisibleBranch(encoder_dim=encoder.embed_dim, width=width, target_dim=target_dim)
        model = MaskedImageModel(encoder, decoder, branch, target_dim)
    return Objective(model, mim_loss=method.mim_loss, mim_weight=method.mim_weight)


def peak_lr(config: PretrainConfig, spec: MaskSpec, grid: tuple[int, int]) -> float:
    """The learning rate at the end of warm-up."""
    optim = config.optim
    if optim.lr_rule == "classic":
        return classic_lr(optim.base_lr, config.batch_size, spec.views)
    rates = spec.true_rates(grid) if optim.lr_rates == "exact" else spec.nominal_rates(grid)
    return adaptive_lr(optim.base_lr, config.batch_size, rates.m_corr, rates.m_pred)
