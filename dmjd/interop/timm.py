"""Our encoders as timm models: architecture, arguments, names and shapes.

| encoder | timm's class |
|---|---|
| ViT, ``block=plain`` | ``VisionTransformer`` |
| ViT, ``block=beit`` with a class token | ``Beit`` |
| ViT, ``block=beit`` without one | ``VisionTransformerRelPos``, or ``VisionTransformer`` for absolute positions |
| Swin | ``SwinTransformer`` |
| ConvViT | :class:`dmjd.models.timm_models.ConvViT` |

Names are the same (see :class:`dmjd.models.vit.ViTEncoder`), except in BEiT's blocks without a class token. Positions
are a buffer here and a parameter in timm's ViT, which also has a row for the class token: zero, as in MAE's files.
timm's models have no mask token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmjd.config import BackboneConfig, DataConfig, HeadConfig
from dmjd.errors import ConfigError
from dmjd.interop.tensors import CLS_ROWS, join_qv_bias

REGISTERING = "dmjd.models.timm_models"
"""Importing this module registers the ConvViT with timm."""

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

    @property
    def imports(self) -> list[str]:
        """Modules to import before the call."""
        return ["timm", *[REGISTERING] * self.architecture.startswith("convvit")]

    def line(self, path: str) -> str:
        """One line of Python that builds the model from the file ``path``."""
        arguments = "".join(f", {key}={value!r}" for key, value in self.arguments.items())
        call = f"timm.create_model({self.architecture!r}, checkpoint_path={path!r}{arguments})"
        return f"import {', '.join(self.imports)}; model = {call}.eval()"


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


def timm_call(
    backbone: BackboneConfig, data: DataConfig, head: HeadConfig | None = None, num_classes: int = 0
) -> TimmCall:
    """The timm model that computes the same features as the encoder of this configuration, or with ``head`` the same
    logits as its classifier of ``num_classes``.

    Every argument is given, so that any shape can be built and defaults of timm's versions have no effect.
    ``forward_features`` gives the encoder's tokens (of Swin and ConvViT as a map ``[B, h, w, D]``); the model gives the
    mean of the patch tokens, as ``pooling=mean``: with ``global_pool="avg"`` timm would move the last norm behind the
    average, which ``fc_norm=False`` (of BEiT ``use_fc_norm=False``) prevents. With ``head.norm=pooled`` it is there.
    ``timm.data.resolve_model_data_config`` reads ``pretrained_cfg_overlay``: normalisation and crop of our evaluations.

    Raises:
        ConfigError: for a backbone that was registered from outside, and for a Swin that normalises after pooling.
    """
    if backbone.name not in _CALLS:
        raise ConfigError(
            f"backbone.name={backbone.name} has no timm model; {', '.join(_CALLS)} can be exported, and dmjd "
            "consolidate writes the weights of any"
        )
    image_size = list(data.image_size)
    pooled = head is not None and head.norm == "pooled"
    architecture, arguments = _CALLS[backbone.name](backbone, pooled)
    pool = "token" if head is not None and head.pooling == "cls" else "avg"
    common = {"img_size": image_size, "in_chans": data.channels, "global_pool": pool, "num_classes": num_classes}
    overlay = {
        "input_size": [data.channels, *image_size],
        "mean": list(data.mean),
        "std": list(data.std),
        "crop_pct": data.crop_pct,
        "num_classes": num_classes,
    }
    return TimmCall(architecture, common | arguments | {"pretrained_cfg_overlay": overlay})


def _vit(backbone: BackboneConfig, fc_norm: bool) -> TimmCall:
    nearest = nearest_architecture(backbone)
    arguments: dict[str, Any] = {
        "patch_size": backbone.patch_size,
        "embed_dim": backbone.embed_dim,
        "depth": backbone.depth,
        "num_heads": backbone.num_heads,
        "mlp_ratio": backbone.mlp_ratio,
    }
    relative, scale = backbone.positions.endswith("relative"), backbone.layer_scale or 0  # timm ignores None
    shared = backbone.bias_tables == "shared"
    if backbone.block == "beit" and backbone.class_token:
        arguments |= {
            "init_values": scale,
            "use_abs_pos_emb": backbone.positions != "relative",
            "use_rel_pos_bias": relative and not shared,
            "use_shared_rel_pos_bias": relative and shared,
            "use_fc_norm": fc_norm,
        }
        size = "large" if nearest.embed_dim > 768 else "base"
        return TimmCall(f"beit_{size}_patch16_224", arguments)
    arguments |= {"class_token": backbone.class_token, "fc_norm": fc_norm}
    if backbone.block == "plain":
        return TimmCall(nearest.name, arguments)
    arguments["init_values"] = scale
    if backbone.positions == "learned_relative":
        raise ConfigError(
            "backbone.positions=learned_relative without a class token is not a timm model; use format=onnx"
        )
    if relative:
        arguments |= {"qkv_bias": True, "rel_pos_type": "bias", "shared_rel_pos": shared}
        return TimmCall("vit_relpos_base_patch16_224", arguments)
    return TimmCall(nearest.name, arguments)


def _convvit(backbone: BackboneConfig, fc_norm: bool) -> TimmCall:
    stages = backbone.conv_stages
    arguments = {
        "num_heads": backbone.num_heads,
        "embed_dims": [*stages.embed_dims, backbone.embed_dim],
        "depths": [*stages.depths, backbone.depth],
        "mlp_ratios": [*stages.mlp_ratios, backbone.mlp_ratio],
        "fc_norm": fc_norm,
    }
    return TimmCall("convvit_base_patch16", arguments)


def _swin(backbone: BackboneConfig, fc_norm: bool) -> TimmCall:
    if fc_norm:
        raise ConfigError(
            "head.norm=pooled: timm's Swin normalises before pooling; use format=onnx, or fine-tune with "
            "head.norm=encoder"
        )
    windows = backbone.windows
    arguments = {
        "patch_size": 4,
        "embed_dim": backbone.embed_dim // 8,
        "depths": list(windows.depths),
        "num_heads": list(windows.num_heads),
        "window_size": windows.size,
        "mlp_ratio": backbone.mlp_ratio,
    }
    size = "large" if backbone.embed_dim > 1024 else "base"
    return TimmCall(f"swin_{size}_patch4_window7_224", arguments)


_CALLS = {"vit": _vit, "convvit": _convvit, "swin": _swin}


def timm_state(
    encoder: Mapping[str, Tensor], positions: Tensor | None, head: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The state dict that timm's model of the same shape loads with strict=True.

    Args:
        encoder: the encoder's state dict.
        positions: ``[N, D]``, its fixed positions; None if it has learned ones or none.
        head: of a classifier, the tensors of ``fc_norm`` and ``head`` by their names there.

    Returns:
        ``encoder`` without weights of pre-training (mask token, multi-scale outputs), and for a ViT with ``pos_embed``
        ``[1, prefix + N, D]``; a ConvViT computes its positions.
    """
    state = {name: value for name, value in encoder.items() if not name.startswith(_OF_PRETRAINING)}
    if positions is not None and "patch_embed1.proj.weight" not in state:
        prefix = positions.new_zeros(int("cls_token" in encoder), positions.shape[1])
        state["pos_embed"] = torch.cat((prefix, positions)).unsqueeze(0)
    if "cls_token" not in state and "blocks.0.attn.q_bias" in state:
        state = {_of_plain_block(name): value for name, value in join_qv_bias(state).items()}
        if _SHARED in state:
            state[_SHARED] = state[_SHARED][:-CLS_ROWS].clone()
        for name in [name for name in state if name.endswith(_OF_BLOCK)]:
            state[name] = state[name][:-CLS_ROWS].clone()
    if head is not None:
        of_swin = any(name.startswith("layers.") for name in state)
        state |= {name.replace("head.", "head.fc.", 1) if of_swin else name: value for name, value in head.items()}
    return state


_TABLE = "relative_position_bias_table"
_SHARED, _OF_BLOCK = f"shared_rel_pos.{_TABLE}", f".attn.rel_pos.{_TABLE}"


def _of_plain_block(name: str) -> str:
    """A name in BEiT's model as one in ``VisionTransformerRelPos``."""
    name = name.replace("rel_pos_bias.", "shared_rel_pos.").replace(f".attn.{_TABLE}", _OF_BLOCK)
    return re.sub(r"\.gamma_(\d)$", r".ls\1.gamma", name)
