"""Our ViT in the layout of timm's ``VisionTransformer``: which model to ask for, and under which names and shapes.

The names are the same (see :class:`dmjd.models.vit.ViTEncoder`). Positions are a buffer for us and a parameter for
timm, which also has a row for the cls token: zero, as in MAE's files. A mask token has no place in timm's model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmjd.config import BackboneConfig, DataConfig


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
    """
    image_size = list(data.image_size)
    arguments = {
        "img_size": image_size,
        "patch_size": backbone.patch_size,
        "in_chans": data.channels,
        "embed_dim": backbone.embed_dim,
        "depth": backbone.depth,
        "num_heads": backbone.num_heads,
        "mlp_ratio": backbone.mlp_ratio,
        "class_token": backbone.class_token,
        "global_pool": "avg",
        "fc_norm": False,  # left to itself, timm moves the last norm behind an average
        "num_classes": 0,
        "pretrained_cfg_overlay": {
            "input_size": [data.channels, *image_size],
            "mean": list(data.mean),
            "std": list(data.std),
            "crop_pct": 1.0,
            "num_classes": 0,
        },
    }
    return TimmCall(nearest_architecture(backbone).name, arguments)


def timm_state(encoder: Mapping[str, Tensor], positions: Tensor) -> dict[str, Tensor]:
    """What timm's model of the same shape loads strictly.

    Args:
        encoder: the encoder's state dict.
        positions: ``[N, D]``, its positions.

    Returns:
        ``encoder`` without ``mask_token``, and ``pos_embed`` ``[1, prefix + N, D]``.
    """
    state = {name: value for name, value in encoder.items() if name != "mask_token"}
    prefix = positions.new_zeros(int("cls_token" in encoder), positions.shape[1])
    state["pos_embed"] = torch.cat((prefix, positions)).unsqueeze(0)
    return state
