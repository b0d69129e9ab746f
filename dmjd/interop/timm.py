"""Our encoders in the layout of timm's models: which model to ask for, and under which names and shapes.

The names are the same (see :class:`dmjd.models.vit.ViTEncoder`). Positions are a buffer for us and a parameter for
timm's ViT, which also has a row for the cls token: zero, as in MAE's files. A mask token has no place in timm's model.
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
    """A plain ViT that timm knows by name; all of them have an MLP ratio of 4."""

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
    """The architecture nearest in width, depth and heads, and among those in the patch, all by their ratios."""

    def distance(known: Architecture) -> tuple[float, float]:
        ratios = (
            known.embed_dim / backbone.embed_dim,
            known.depth / backbone.depth,
            known.num_heads / backbone.num_heads,
        )
        return sum(abs(math.log(ratio)) for ratio in ratios), abs(math.log(known.patch_size / backbone.patch_size))

    return min(ARCHITECTURES, key=distance)


def timm_call(backbone: BackboneConfig, data: DataConfig) -> TimmCall:
    """The timm model that computes what the encoder of this configuration does.

    Every argument is spelled out, so a model that is no architecture's own shape is built as well, and no default of
    another timm version gets in between. ``forward_features`` gives the encoder's tokens; the model itself gives the
    mean of the patch tokens, as ``pooling=mean`` does. ``pretrained_cfg_overlay`` is what
    ``timm.data.resolve_model_data_config`` reads: images are normalised and cropped as in our evaluations.

    A ConViT is known to timm once ``dmjd.models.convit`` is imported, which registers it.

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
        "fc_norm": False,  # left to itself, the last norm moves behind the average
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
    """What timm's model of the same shape loads strictly.

    Args:
        encoder: the encoder's state dict.
        positions: ``[N, D]``, its fixed positions; None where the state dict has learned ones, or there are none.

    Returns:
        ``encoder`` without what only pre-training uses (mask token, multi-scale outputs), and for a ViT ``pos_embed``
        ``[1, prefix + N, D]``; a ConViT computes its positions.
    """
    state = {name: value for name, value in encoder.items() if not name.startswith(_OF_PRETRAINING)}
    if positions is not None and "patch_embed1.proj.weight" not in state:
        prefix = positions.new_zeros(int("cls_token" in encoder), positions.shape[1])
        state["pos_embed"] = torch.cat((prefix, positions)).unsqueeze(0)
    return state
