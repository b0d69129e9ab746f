"""Our ViTs as models of Hugging Face's transformers: configuration, names and preprocessing; and names of its files.

Names are those of transformers 4, which 5 reads too. A ViT with a class token and plain blocks is a ``ViTModel``; with
MAE's decoder and pixels as the target the whole model is a ``ViTMAEForPreTraining``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from dmjd.config import BackboneConfig, DataConfig, HeadConfig, PretrainConfig, TrainConfig
from dmjd.errors import ConfigError

_BICUBIC = 3  # Pillow's number
_NORM_EPS = 1e-6

_IN_BLOCK = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
_AROUND_BLOCKS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}


def check_vit(backbone: BackboneConfig) -> None:
    """Raise ConfigError unless ``ViTModel`` computes the features of this backbone."""
    for key, found, wanted in (
        ("backbone.name", backbone.name, "vit"),
        ("backbone.block", backbone.block, "plain"),
        ("backbone.class_token", str(backbone.class_token).lower(), "true"),
    ):
        if found != wanted:
            raise ConfigError(
                f"{key}={found}, and Hugging Face's ViT needs {key}={wanted}: use format=timm or onnx, or train a ViT "
                "with a class token (experiment=own_photos does)"
            )


def check_classifier(head: HeadConfig) -> None:
    """Raise ConfigError unless ``ViTForImageClassification``, which reads the class token, computes these logits."""
    if head.pooling != "cls":
        raise ConfigError(
            f"head.pooling={head.pooling}, and Hugging Face's ViTForImageClassification needs cls: use format=timm or "
            "onnx"
        )


def check_mae(trained: TrainConfig) -> None:
    """Raise ConfigError unless ``ViTMAEForPreTraining`` computes the predictions of this model."""
    if not isinstance(trained, PretrainConfig):
        raise ConfigError("format=huggingface_mae is for pre-training, and this run is a fine-tuning; use format=timm")
    check_vit(trained.backbone)
    height, width = trained.data.image_size
    for key, found, wanted in (
        ("method.decoder.name", trained.method.decoder.name, "mae"),
        ("target.name", trained.target.name, "pixels"),
    ):
        if found != wanted:
            raise ConfigError(f"{key}={found}, and ViTMAEForPreTraining needs {wanted}; use format=huggingface")
    if height != width:
        raise ConfigError(
            f"data.image_size={height}x{width}, and ViTMAEForPreTraining needs square images; use format=huggingface"
        )


def vit_config(backbone: BackboneConfig, data: DataConfig) -> dict[str, Any]:
    """``config.json`` of a ``ViTModel``. Its pooler is the identity: ``pooler_output`` is the class token."""
    height, width = data.image_size
    return {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "hidden_size": backbone.embed_dim,
        "num_hidden_layers": backbone.depth,
        "num_attention_heads": backbone.num_heads,
        "intermediate_size": int(backbone.embed_dim * backbone.mlp_ratio),
        "hidden_act": "gelu",
        "layer_norm_eps": _NORM_EPS,
        "image_size": height if height == width else [height, width],
        "patch_size": backbone.patch_size,
        "num_channels": data.channels,
        "qkv_bias": True,
        "pooler_act": "linear",
        "pooler_output_size": backbone.embed_dim,
    }


def classifier_config(backbone: BackboneConfig, data: DataConfig, classes: Sequence[str]) -> dict[str, Any]:
    """``config.json`` of a ``ViTForImageClassification``; ``classes``: a name for each logit."""
    config = vit_config(backbone, data)
    del config["pooler_act"], config["pooler_output_size"]
    return config | {
        "architectures": ["ViTForImageClassification"],
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def mae_config(trained: PretrainConfig) -> dict[str, Any]:
    """``config.json`` of a ``ViTMAEForPreTraining``."""
    decoder = trained.method.decoder
    config = vit_config(trained.backbone, trained.data)
    del config["pooler_act"], config["pooler_output_size"]
    return config | {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        "decoder_hidden_size": decoder.dim,
        "decoder_num_hidden_layers": decoder.depth,
        "decoder_num_attention_heads": decoder.num_heads,
        "decoder_intermediate_size": int(decoder.dim * decoder.mlp_ratio),
        "mask_ratio": trained.mask.mask_ratio,
        "norm_pix_loss": trained.target.norm == "patch",
    }


def vit_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of ``ViTModel`` from that of timm's ViT, as :func:`dmjd.interop.timm.timm_state` gives it."""
    width = state["norm.bias"].shape[0]
    eye = torch.eye(width, dtype=state["norm.bias"].dtype)
    pooler = {"pooler.dense.weight": eye, "pooler.dense.bias": torch.zeros_like(state["norm.bias"])}
    return _encoder_state(state) | pooler


def classifier_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of ``ViTForImageClassification`` from that of timm's ViT with a head, which pools the class token.

    A norm of that token alone is the final norm of the encoder there: both are per token.
    """
    head = {f"classifier.{leaf}": state[f"head.{leaf}"] for leaf in ("weight", "bias")}
    rest = {name.removeprefix("fc_"): value for name, value in state.items() if not name.startswith("head.")}
    return {f"vit.{name}": value for name, value in _encoder_state(rest).items()} | head


def mae_state(state: Mapping[str, Tensor], model: Mapping[str, Tensor], decoder_positions: Tensor) -> dict[str, Tensor]:
    """The state of ``ViTMAEForPreTraining``.

    Args:
        state: of timm's ViT, as for :func:`vit_state`.
        model: of our whole model, for decoder and head.
        decoder_positions: ``[N, D]``; the class token's row is zero.
    """
    encoder = {f"vit.{name}": value for name, value in _encoder_state(state).items()}
    positions = torch.cat((decoder_positions.new_zeros(1, decoder_positions.shape[1]), decoder_positions))
    decoder = {"decoder.decoder_pos_embed": positions.unsqueeze(0)}
    for name, value in model.items():
        if name.startswith("decoder.blocks."):
            _, _, index, leaf = name.split(".", 3)
            decoder |= _block(f"decoder.decoder_layers.{index}", leaf, value)
        elif name.startswith(("decoder.embed.", "decoder.norm.")):
            decoder[name.replace("decoder.", "decoder.decoder_", 1)] = value
        elif name == "decoder.mask_token":
            decoder[name] = value
        elif name.startswith("head."):
            decoder[name.replace("head.", "decoder.decoder_pred.", 1)] = value
    return encoder | decoder


def _encoder_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for name, value in state.items():
        found = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        named |= _block(f"encoder.layer.{found[1]}", found[2], value) if found else {_AROUND_BLOCKS[name]: value}
    return named


def _block(stem: str, leaf: str, value: Tensor) -> dict[str, Tensor]:
    module, _, kind = leaf.rpartition(".")
    if module == "attn.qkv":
        parts = zip(("query", "key", "value"), value.chunk(3), strict=True)
        return {f"{stem}.attention.attention.{part}.{kind}": rows.clone() for part, rows in parts}
    return {f"{stem}.{_IN_BLOCK[module]}.{kind}": value}


def preprocessor_config(data: DataConfig) -> dict[str, Any]:
    """``preprocessor_config.json``: resize of the shorter side, central crop and normalisation of our evaluations.

    Images that are not square are resized to the size of the model instead, which changes their aspect ratio.
    """
    height, width = data.image_size
    square = height == width
    shorter = math.ceil(height / Fraction(str(data.crop_pct)))
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": data.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": shorter} if square else {"height": height, "width": width},
        "resample": _BICUBIC,
        "do_center_crop": square,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(data.mean),
        "image_std": list(data.std),
    }


_OFFICIAL = (
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.(cls_token|mask_token)$", r"\1"),
    (r"^(?:encoder\.)?layers?\.(\d+)\.", r"blocks.\1."),
    (r"^decoder\.decoder_(?:encoder\.layer|layers)\.(\d+)\.", r"decoder_blocks.\1."),
    (r"^decoder\.(?=decoder_|mask_token)", ""),
    (r"^encoder\.relative_position_bias\.", "rel_pos_bias."),
    (r"^(blocks\.\d+)\..*relative_position_bias\.(relative_position_bias_\w+)$", r"\1.attn.\2"),
    (r"(blocks\.\d+)\.attention\.(?:attention\.)?(?:(q)uery|(k)ey|(v)alue)\.", r"\1.attn.\2\3\4."),
    (r"(blocks\.\d+)\.attention\.([qkv])_proj\.", r"\1.attn.\2."),
    (r"(blocks\.\d+)\.attention\.(?:output\.dense|o_proj)\.", r"\1.attn.proj."),
    (r"(blocks\.\d+)\.layernorm_before\.", r"\1.norm1."),
    (r"(blocks\.\d+)\.layernorm_after\.", r"\1.norm2."),
    (r"(blocks\.\d+)\.intermediate\.dense\.", r"\1.mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"(blocks\.\d+)\.lambda_([12])$", r"\1.gamma_\2"),
    (r"^layernorm\.", "norm."),
    (r"^pooler\.layernorm\.", "fc_norm."),
    (r"^classifier\.", "head."),
)
"""Names of transformers 4 and 5 -> those of MAE and BEiT, by rules applied one after the other."""
_EMBEDDING = "embeddings.patch_embeddings.projection.weight"
_POOLER = "pooler.dense."
"""A layer on the class token that was not trained with the encoder."""


def official_names(state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The state of a ViT, ViTMAE, BEiT or data2vec of transformers under the names of MAE's and BEiT's files; None for
    a state of other names. Names without a counterpart stay.

    Separate weights of q, k and v become one; so do their biases, or ``q_bias`` and ``v_bias`` where k has none.
    """
    prefix = next((name.removesuffix(_EMBEDDING) for name in state if name.endswith(_EMBEDDING)), None)
    if prefix is None:
        return None
    named: dict[str, Tensor] = {}
    for name, value in state.items():
        official = name.removeprefix(prefix)
        for pattern, replacement in _OFFICIAL:
            official = re.sub(pattern, replacement, official)
        if not official.startswith(_POOLER):
            named[official] = value
    for name in [name for name in named if re.search(r"\.attn\.q\.(weight|bias)$", name)]:
        stem, _, leaf = name.rpartition("q.")
        parts = [f"{stem}{letter}.{leaf}" for letter in "qkv"]
        if all(part in named for part in parts):
            named[f"{stem}qkv.{leaf}"] = torch.cat([named.pop(part) for part in parts])
        elif leaf == "bias" and parts[2] in named:
            named |= {f"{stem}q_bias": named.pop(parts[0]), f"{stem}v_bias": named.pop(parts[2])}
    return named
