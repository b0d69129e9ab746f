"""Our encoders as timm models: architecture, arguments, names and shapes.

The names are the same (see :class:`dmjd.models.vit.ViTEncoder`). Positions are a buffer here and a parameter in timm's
ViT, which also has a row for the cls token: zero, as in MAE's files. timm's models have no mask token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmjd.config import BackboneConfig, DataConfig
from dmjd.errors import ConfigError

_OF_PRETRAINING = ("mask_token", "stage1_output_decode", "stage2_output_decode")


class Architecture(NamedTuple):
    """A plain ViT of timm; all have an MLP ratio of 4."""

    name: str
    patch_size: int
    embed_dim: int
    depth: int
    num_heads: int


ARCHITECTURES = (
    Architecture("vit_tiny_patch16_224", 16, 192, 12, 3),
    Architecture("vit_small_patch8_224", 8, 384, 12, 6),
    Architecture("vit_small_patch16_224", 16, 384, 12, 6),
    Architecture("vit_small_patch32_224", 32, 384, 12, 6),
    Architecture("vit_base_patch8_224", 8, 768, 12, 12),
    Architecture("vit_base_patch16_224", 16, 768, 12, 12),
    Architecture("vit_base_patch32_224", 32, 768, 12, 12),
    Architecture("vit_large_patch14_224", 14, 1024, 24, 16),
    Architecture("vit_large_patch16_224", 16, 1024, 24, 16),
    Architecture("vit_large_patch32_224", 32, 1024, 24, 16),
    Architecture("vit_huge_patch14_224", 14, 1280, 32, 16),
)


class TimmCall(NamedTuple):
    """``timm.create_model(architecture, **arguments)``; both are JSON."""

    architecture: str
    arguments: dict[str, Any]


def nearest_architecture(backbone: BackboneConfig) -> Architecture:
    """The architecture nearest in width, depth and heads, then in patch size, by ratios."""

    def distance(known: Architecture) -> tuple[float, float]:
        ratios = (
            known.embed_dim / backbone.embed_dim,
            known.depth / backbone.depth,
            known.num_heads / backbone.num_heads,
        )
        return sum(abs(math.log(ratio)) for ratio in ratios), abs(math.log(known.patch_size / backbone.patch_size))

    return min(ARCHITECTURES, key=distance)


def timm_call(backbone: BackboneConfig, data: DataConfig) -> TimmCall:
    """The timm model that computes the same features as the encoder of this configuration.

    Every argument is given, so that any shape can be built and defaults of timm's versions have no effect.
    ``forward_features`` gives the encoder's tokens; the model gives the mean of the patch tokens, as ``pooling=mean``.
    ``timm.data.resolve_model_data_config`` reads ``pretrained_cfg_overlay``: normalisation and crop of our evaluations.

    Importing ``dmjd.models.convit`` registers the ConvViT with timm.

    Raises:
        ConfigError: for BEiT's blocks and for Swin, whose timm models have another last norm or another output.
    """
    if backbone.name not in ("vit", "convvit") or backbone.block != "plain":
        raise ConfigError(
            "an encoder is exported with backbone.block=plain and backbone.name=vit or convvit, got "
            f"backbone.block={backbone.block} and backbone.name={backbone.name}"
        )
    image_size = list(data.image_size)
    arguments = {
        "img_size": image_size,
        "in_chans": data.channels,
        "num_heads": backbone.num_heads,
        "global_pool": "avg",
        "fc_norm": False,  # the default moves the last norm behind the average
        "num_classes": 0,
        "pretrained_cfg_overlay": {
            "input_size": [data.channels, *image_size],
            "mean": list(data.mean),
            "std": list(data.std),
            "crop_pct": data.crop_pct,
            "num_classes": 0,
        },
    }
    if backbone.name == "convvit":
        stages = backbone.conv_stages
        arguments |= {
            "embed_dims": [*stages.embed_dims, backbone.embed_dim],
            "depths": [*stages.depths, backbone.depth],
            "mlp_ratios": [*stages.mlp_ratios, backbone.mlp_ratio],
        }
        return TimmCall("convvit_base_patch16", arguments)
    arguments |= {
        "patch_size": backbone.patch_size,
        "embed_dim": backbone.embed_dim,
        "depth": backbone.depth,
        "mlp_ratio": backbone.mlp_ratio,
        "class_token": backbone.class_token,
    }
    return TimmCall(nearest_architecture(backbone).name, arguments)


def timm_state(encoder: Mapping[str, Tensor], positions: Tensor | None) -> dict[str, Tensor]:
    """The state dict that timm's model of the same shape loads with strict=True.

    Args:
        encoder: the encoder's state dict.
        positions: ``[N, D]``, its fixed positions; None if it has learned ones or none.

    Returns:
        ``encoder`` without weights of pre-training (mask token, multi-scale outputs), and for a ViT with ``pos_embed``
        ``[1, prefix + N, D]``; a ConvViT computes its positions.
    """
    state = {name: value for name, value in encoder.items() if not name.startswith(_OF_PRETRAINING)}
    if positions is not None and "patch_embed1.proj.weight" not in state:
        prefix = positions.new_zeros(int("cls_token" in encoder), positions.shape[1])
        state["pos_embed"] = torch.cat((prefix, positions)).unsqueeze(0)
    return state
