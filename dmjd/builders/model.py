"""The model of a configuration, with its losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.random import fork_rng

from dmjd.builders.data import image_size
from dmjd.config import BackboneConfig, FinetuneConfig, PretrainConfig, TrainConfig
from dmjd.config.model import BACKBONES as NAMES
from dmjd.errors import ConfigError, config_section
from dmjd.models import convvit, swin
from dmjd.models.classifier import Classification, Classifier
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.objective import Objective, Trainable
from dmjd.models.swin import SwinEncoder
from dmjd.models.vit import ViTEncoder

T = TypeVar("T", bound=Trainable)


@dataclass(frozen=True)
class BackboneSpec:
    """All that the rest of the code knows about a backbone.

    build: from a configuration to an encoder, its weights drawn from torch's generator.
    blocks: how many residual blocks the encoder of a configuration has.
    needs: keys of ``BackboneConfig`` -> the value that they must have, since the encoder has no such option.
    one_grid: whether the outputs of its last blocks are tokens of one grid, which a teacher averages.
    """

    build: Callable[[TrainConfig], Encoder]
    blocks: Callable[[BackboneConfig], int] = lambda backbone: backbone.depth
    needs: Mapping[str, Any] = field(default_factory=dict)
    one_grid: bool = True


def _vit(config: TrainConfig) -> Encoder:
    backbone = config.backbone
    _check_heads("backbone.embed_dim", backbone.embed_dim, backbone.num_heads)
    return ViTEncoder(
        image_size=image_size(config),
        patch_size=backbone.patch_size,
        in_chans=config.data.channels,
        embed_dim=backbone.embed_dim,
        depth=backbone.depth,
        num_heads=backbone.num_heads,
        mlp_ratio=backbone.mlp_ratio,
        class_token=backbone.class_token,
        masked_tokens=backbone.masked_tokens,
        positions=backbone.positions,
        bias_tables=backbone.bias_tables,
        block=backbone.block,
        layer_scale=backbone.layer_scale,
    )


def _convvit(config: TrainConfig) -> Encoder:
    backbone, stages = config.backbone, config.backbone.conv_stages
    _check_heads("backbone.embed_dim", backbone.embed_dim, backbone.num_heads)
    return ConvViTEncoder(
        image_size=image_size(config),
        in_chans=config.data.channels,
        embed_dims=(*stages.embed_dims, backbone.embed_dim),
        depths=(*stages.depths, backbone.depth),
        mlp_ratios=(*stages.mlp_ratios, backbone.mlp_ratio),
        num_heads=backbone.num_heads,
        multi_scale=backbone.multi_scale,
    )


def _swin(config: TrainConfig) -> Encoder:
    backbone = config.backbone
    return SwinEncoder(
        image_size=image_size(config),
        in_chans=config.data.channels,
        embed_dim=backbone.embed_dim,
        depths=backbone.windows.depths,
        num_heads=backbone.windows.num_heads,
        window=backbone.windows.size,
        mlp_ratio=backbone.mlp_ratio,
    )


_PLAIN = {key: getattr(BackboneConfig(), key) for key in ("positions", "bias_tables", "block", "layer_scale")} | {
    "class_token": False
}

BACKBONES = {
    "vit": BackboneSpec(_vit),
    "convvit": BackboneSpec(
        _convvit,
        blocks=lambda backbone: backbone.depth + sum(backbone.conv_stages.depths),
        needs=_PLAIN | {"patch_size": convvit.PATCH_SIZE, "masked_tokens": "drop"},
    ),
    "swin": BackboneSpec(
        _swin,
        blocks=lambda backbone: sum(backbone.windows.depths),
        needs=_PLAIN | {"patch_size": swin.PATCH_SIZE, "masked_tokens": "mask_token"},
        one_grid=False,
    ),
}
"""``backbone.name`` -> its record."""


def register_backbone(name: str, spec: BackboneSpec) -> None:
    """Make ``backbone.name=NAME`` build ``spec``'s encoder."""
    BACKBONES[name] = spec
    if name not in NAMES:
        NAMES.append(name)


def build_encoder(config: TrainConfig) -> Encoder:
    """The encoder, its weights drawn from torch's generator; its tokens are uninitialised memory."""
    backbone = config.backbone
    spec = BACKBONES[backbone.name]
    for key, value in spec.needs.items():
        found = getattr(backbone, key)
        if found != value:
            raise ConfigError(f"backbone.{key} must be {value} for backbone.name={backbone.name}, got {found}")
    return spec.build(config)


def materialised(build: Callable[[], T]) -> T:
    """``build()``, with tensors on the default device and under the active mode: on "meta" or under FakeTensorMode they
    have shapes and take no memory. The state of torch's CPU generator stays as it is."""
    # Under a fake mode it is made on "meta" first: some initialisations, and timm's Swin, read numbers.
    with fork_rng(devices=()), unset_fake_temporarily() as fake, torch.device("meta") if fake else nullcontext():
        objective = build()
    if fake:
        objective._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype))
    return objective


def build_classification(config: FinetuneConfig, num_classes: int) -> Classification:
    """Classifier and loss, initialised from ``config.seed`` alone."""
    head = config.head
    torch.manual_seed(config.seed)
    with config_section("backbone, head"):
        encoder = build_encoder(config)
        return Classification(
            Classifier(
                encoder,
                num_classes,
                pooling=head.pooling,
                norm=head.norm,
                init_std=head.init_std,
                init_scale=head.init_scale,
            )
        )


def _check_heads(key: str, width: int, heads: int) -> None:
    if width % heads:
        raise ConfigError(f"{key}={width} is not divisible by its num_heads={heads}; change one of them")


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
        return Objective(model, mim_loss=method.mim_loss, mim_weight=method.mim_weight, beta=method.beta)
