"""Layers, learning rates and weight decay of every parameter equal the official formulas, written out here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from dmjd.builders.layer_decay import group_table, set_layers
from dmjd.config import FinetuneOptimConfig
from dmjd.errors import ConfigError
from dmjd.models.classifier import Classification, Classifier
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.masked_image_model import Encoder
from dmjd.models.swin import SwinEncoder
from dmjd.models.timm_models import ConvViT
from dmjd.models.vit import ViTEncoder
from dmjd.parallel.single import build_optimizer

DECAY = 0.65
SWIN_DEPTHS = (2, 1, 3, 2)


def vit(**options: Any) -> Encoder:
    size: dict[str, Any] = {"image_size": (32, 32), "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
    return ViTEncoder(in_chans=3, **size, **options)


def beit(**options: Any) -> Encoder:
    tables = {"block": "beit", "masked_tokens": "mask_token", "layer_scale": 0.1, "positions": "relative"}
    return vit(**(tables | options))


def convvit() -> Encoder:
    return ConvViTEncoder(
        image_size=(32, 32), in_chans=3, embed_dims=(8, 8, 16), depths=(1, 2, 3), mlp_ratios=(2, 2, 2), num_heads=2
    )


def swin() -> Encoder:
    return SwinEncoder(
        image_size=(64, 64), in_chans=3, embed_dim=32, depths=SWIN_DEPTHS, num_heads=(1, 1, 2, 2), window=2
    )


def classification(encoder: Encoder, norm: str = "pooled") -> Classification:
    torch.manual_seed(0)
    return Classification(Classifier(encoder, 5, norm=norm))


def official_vit(name: str) -> int:
    """MAE's util/lr_decay.py, which SimMIM's get_vit_layer and BEiT's get_num_layer_for_vit agree with."""
    if name in ("cls_token", "mask_token", "pos_embed") or name.startswith("patch_embed"):
        return 0
    if name.startswith("rel_pos_bias"):
        return 4
    if name.startswith("blocks"):
        return int(name.split(".")[1]) + 1
    return 4


def official_convvit(name: str) -> int:
    """ConvMAE's: the whole convolution stages are 0."""
    if name == "pos_embed" or name.startswith(("patch_embed", "blocks1", "blocks2")):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks3") else 4


def official_swin(name: str) -> int:
    """SimMIM's get_swin_layer, in whose files a layer ends with its downsampling and not begins with it."""
    if name.startswith(("mask_token", "patch_embed")):
        return 0
    if name.startswith("layers"):
        layer, block = int(name.split(".")[1]), name.split(".")[3]
        if name.split(".")[2] == "downsample":
            layer, block = layer - 1, name.split(".")[3]
        if block in ("reduction", "norm"):
            return sum(SWIN_DEPTHS[: layer + 1])
        return sum(SWIN_DEPTHS[:layer]) + int(block) + 1
    return sum(SWIN_DEPTHS) + 1


CASES: dict[str, tuple[Callable[[], Encoder], str, Callable[[str], int], int, list[str]]] = {
    "mae": (vit, "pooled", official_vit, 3, ["pos_embed", "cls_token"]),
    "maskfeat": (lambda: vit(positions="learned", masked_tokens="mask_token"), "pooled", official_vit, 3, []),
    "beit": (beit, "pooled", official_vit, 3, ["pos_embed", "cls_token"]),
    "beit, per block": (lambda: beit(bias_tables="per_block"), "encoder", official_vit, 3, ["pos_embed", "cls_token"]),
    "convvit": (convvit, "pooled", official_convvit, 3, []),
    "swin": (swin, "encoder", official_swin, 8, ["relative_position_bias_table"]),
}


@pytest.mark.parametrize("case", CASES)
def test_learning_rates_and_weight_decay_are_the_official_ones(case: str) -> None:
    make, norm, official, depth, no_decay = CASES[case]
    objective = classification(make(), norm)
    set_layers(objective, DECAY)
    optim = FinetuneOptimConfig(no_decay=no_decay, layer_decay=DECAY)
    optimizer = build_optimizer(dict(objective.named_parameters()), optim, objective.lr_scales)
    found = {p: (g["lr_scale"], g["wd_scale"]) for g in optimizer.param_groups for p in g["params"]}
    scales = [DECAY**exponent for exponent in reversed(range(depth + 2))]
    for name, parameter in objective.named_parameters():
        plain = name.removeprefix("model.").removeprefix("encoder.")
        undecayed = parameter.ndim == 1 or any(plain.endswith(key) for key in no_decay)
        assert found[parameter] == (pytest.approx(scales[official(plain)]), float(not undecayed)), name
    assert len(found) == len(list(objective.parameters()))


def test_convvit_has_the_layers_of_its_timm_model() -> None:
    """timm's rule from the matcher of the timm model, for all but the head's norm, where timm differs from MAE."""
    model = ConvViT(
        img_size=32, num_classes=5, embed_dims=(8, 8, 16), depths=(1, 2, 3), mlp_ratios=(2, 2, 2), num_heads=2
    )
    groups = param_groups_layer_decay(model, 0.05, layer_decay=DECAY)
    theirs = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    objective = classification(convvit())
    set_layers(objective, DECAY)
    compared = 0
    for name, parameter in model.named_parameters():
        if not name.startswith("fc_norm"):
            ours = objective.lr_scales[f"model.{name}" if name.startswith("head") else f"model.encoder.{name}"]
            assert theirs[id(parameter)] == pytest.approx(ours), name
            compared += 1
    assert compared == len(objective.lr_scales) - 2


@pytest.mark.parametrize("freeze", [0, 1, 3, 4])
def test_frozen_layers_take_no_part_and_leave_the_others_alone(freeze: int) -> None:
    objective = classification(vit())
    set_layers(objective, DECAY)
    whole = dict(objective.lr_scales)
    set_layers(objective, DECAY, freeze)
    for name, parameter in objective.named_parameters():
        layer = official_vit(name.removeprefix("model.").removeprefix("encoder."))
        assert parameter.requires_grad == (layer >= freeze), name
    assert objective.lr_scales == whole
    optimizer = build_optimizer(dict(objective.named_parameters()), FinetuneOptimConfig(), objective.lr_scales)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(p.requires_grad for p in trained)
    assert len(trained) == sum(p.requires_grad for p in objective.parameters())


def test_freezing_more_layers_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="freeze=5 must be at most 4, the layers"):
        set_layers(classification(vit()), DECAY, 5)


def test_a_parameter_in_no_layer_is_an_error_with_its_name() -> None:
    encoder = vit()
    encoder.adapter = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"model\.encoder\.adapter\.weight belongs to no layer.*ViTEncoder"):
        set_layers(classification(encoder), DECAY)


def test_the_table_has_the_optimizers_groups() -> None:
    objective, optim = classification(vit()), FinetuneOptimConfig(weight_decay=0.1)
    set_layers(objective, DECAY, freeze=1)
    rows = group_table(objective, optim)
    assert [row.name for row in rows] == [
        "layer_0_frozen",
        *(f"layer_{layer}_{kind}" for layer in (1, 2, 3, 4) for kind in ("decay", "no_decay")),
    ]
    groups = build_optimizer(dict(objective.named_parameters()), optim, objective.lr_scales).param_groups
    assert [(row.lr_scale, row.weight_decay, row.tensors) for row in rows[1:]] == [
        (group["lr_scale"], 0.1 * group["wd_scale"], len(group["params"])) for group in groups
    ]
    assert sum(row.parameters for row in rows) == sum(p.numel() for p in objective.parameters())
    set_layers(objective, 1.0)
    assert [(row.name, row.layers) for row in group_table(objective, optim)] == [
        ("layer_0-4_decay", "0-4"),
        ("layer_0-4_no_decay", "0-4"),
    ]
