"""The model of a configuration, with its losses."""

from __future__ import annotations

import torch

from dmjd.builders.data import image_size
from dmjd.config import BackboneConfig, PretrainConfig
from dmjd.errors import ConfigError, config_section
from dmjd.models import convvit, swin
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.objective import Objective
from dmjd.models.swin import SwinEncoder
from dmjd.models.vit import ViTEncoder

OF_VIT_ALONE = ("positions", "block", "layer_scale")


def build_encoder(config: PretrainConfig) -> Encoder:
    """The encoder, its weights drawn from torch's generator, and its tokens those that memory held."""
    backbone, channels = config.backbone, config.data.channels
    if backbone.name != "swin":
        _check_heads("backbone.embed_dim", backbone.embed_dim, backbone.num_heads)
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
            masked_tokens=backbone.masked_tokens,
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
    return ConvViTEncoder(
        image_size=image_size(config),
        in_chans=channels,
        embed_dims=(*stages.embed_dims, backbone.embed_dim),
        depths=(*stages.depths, backbone.depth),
        mlp_ratios=(*stages.mlp_ratios, backbone.mlp_ratio),
        num_heads=backbone.num_heads,
        multi_scale=backbone.multi_scale,
    )


def _check_heads(key: str, width: int, heads: int) -> None:
    if width % heads:
        raise ConfigError(f"{key}={width} is not divisible by its num_heads={heads}")


def _refuse_options(backbone: BackboneConfig) -> None:
    """Options that a ConViT or a Swin does not have must be left as they are."""
    plain = BackboneConfig()
    needed = {key: getattr(plain, key) for key in OF_VIT_ALONE} | {"class_token": False}
    if backbone.name == "swin":
        needed |= {"patch_size": swin.PATCH_SIZE, "masked_tokens": "mask_token", "drop_path": 0.0}
    else:
        needed |= {"patch_size": convvit.PATCH_SIZE, "masked_tokens": "drop"}
    for key, value in needed.items():
        found = getattr(backbone, key)
        if found != value:
            raise ConfigError(f"backbone.{key} must be {value} for backbone.name={backbone.name}, got {found}")


def build_objective(config: PretrainConfig, target_dim: int) -> Objective:
    """Model and losses, initialised from ``config.seed`` alone."""
    method = config.method
    _check_heads("method.decoder.dim", method.decoder.dim, method.decoder.num_heads)
    torch.manual_seed(config.seed)
    with config_section("backbone, method.decoder"):
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
