from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import dmjd
import dmjd.models.timm_models  # registers ConvViT with timm
from dmjd.compose import compose
from dmjd.config import BackboneConfig, DataConfig
from dmjd.errors import CheckpointError
from dmjd.evaluate.encoder import load_encoder
from dmjd.interop.timm import ARCHITECTURES, nearest_architecture, timm_call, timm_state
from dmjd.keys import groups
from dmjd.models.vit import ViTEncoder
from dmjd.positions import sincos_positions
from tests.interop.layout_states import State


def on_meta(architecture: str, **arguments: Any) -> Any:
    with torch.device("meta"):
        return timm.create_model(architecture, **arguments)


def own_shape(model: Any) -> tuple[int, int, int, int, float]:
    block = model.blocks[0]
    ratio = block.mlp.fc1.out_features / model.embed_dim
    return model.patch_embed.patch_size[0], model.embed_dim, len(model.blocks), block.attn.num_heads, ratio


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda known: known.name)
def test_architectures_are_as_timm_has_them(architecture: Any) -> None:
    assert own_shape(on_meta(architecture.name)) == (*architecture[1:], 4.0)


# timm has no ViT of the size of vit_mini, the small one of own_photos, or of vit_2b.
@pytest.mark.parametrize(
    "preset", sorted({name for name in groups()["backbone"] if name.startswith("vit_")} - {"vit_mini", "vit_2b"})
)
def test_shipped_vits_are_architectures(preset: str) -> None:
    config = compose("pretrain", [f"backbone={preset}"])
    backbone = config.backbone
    name, _ = timm_call(backbone, config.data)
    assert name == f"{preset}_patch{backbone.patch_size}_224"
    shape = (backbone.patch_size, backbone.embed_dim, backbone.depth, backbone.num_heads, backbone.mlp_ratio)
    assert {known.name: (*known[1:], 4.0) for known in ARCHITECTURES}[name] == shape  # which are as timm has them


@pytest.mark.parametrize("preset", ["convvit_base", "convvit_large"])
def test_shipped_convits_are_those_registered_with_timm(preset: str) -> None:
    config = compose("pretrain", [f"backbone={preset}"])
    call = timm_call(config.backbone, config.data)
    ours, registered = on_meta(call.architecture, **call.arguments), on_meta(f"{preset}_patch16", num_classes=0)
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in (ours, registered)]
    for model in shapes:  # which norm comes last is a matter of pooling
        assert (model.pop("norm.weight", None) or model.pop("fc_norm.weight")) == (config.backbone.embed_dim,)
        assert (model.pop("norm.bias", None) or model.pop("fc_norm.bias")) == (config.backbone.embed_dim,)
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((8, 384, 12, 6), "vit_small_patch8_224"),
        ((32, 768, 12, 12), "vit_base_patch32_224"),
        ((14, 768, 12, 12), "vit_base_patch16_224"),
        ((14, 1024, 24, 16), "vit_large_patch14_224"),
        ((16, 1280, 32, 16), "vit_huge_patch14_224"),
        ((4, 32, 1, 4), "vit_tiny_patch16_224"),
        ((16, 640, 12, 10), "vit_base_patch16_224"),
        ((16, 4096, 48, 64), "vit_huge_patch14_224"),
    ],
)
def test_other_shapes_take_the_nearest_name(shape: tuple[int, int, int, int], name: str) -> None:
    patch, width, depth, heads = shape
    backbone = BackboneConfig(patch_size=patch, embed_dim=width, depth=depth, num_heads=heads)
    assert nearest_architecture(backbone).name == name


@pytest.mark.parametrize("masked_tokens", ["drop", "mask_token"])
@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize(("sides", "channels", "ratio"), [([32, 48], 1, 2.3), ([64, 16], 5, 4.0)], ids=["wide", "tall"])
def test_state_has_the_names_and_shapes_of_the_model_that_is_called(
    masked_tokens: str, class_token: bool, sides: list[int], channels: int, ratio: float
) -> None:
    backbone = BackboneConfig(
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=3,
        mlp_ratio=ratio,
        class_token=class_token,
        masked_tokens=masked_tokens,
    )
    data = DataConfig(image_size=sides, channels=channels, mean=[0.1] * channels, std=[0.2] * channels)
    encoder = ViTEncoder(
        image_size=(sides[0], sides[1]),
        patch_size=8,
        in_chans=channels,
        embed_dim=24,
        depth=2,
        num_heads=3,
        mlp_ratio=ratio,
        class_token=class_token,
        masked_tokens=masked_tokens,
    )
    call = timm_call(backbone, data)
    wanted = on_meta(call.architecture, **json.loads(json.dumps(call.arguments))).state_dict()
    state = timm_state(encoder.state_dict(), encoder.positions)
    assert {name: value.shape for name, value in state.items()} == {name: value.shape for name, value in wanted.items()}


def test_the_cls_token_has_a_position_of_zero_and_patches_have_theirs() -> None:
    positions = sincos_positions((2, 3), 8)
    tokens = {"cls_token": torch.ones(1, 1, 8), "mask_token": torch.ones(1, 1, 8), "norm.bias": torch.arange(8.0)}
    state = timm_state(tokens, positions)
    assert state.keys() == {"cls_token", "norm.bias", "pos_embed"}
    assert state["norm.bias"] is tokens["norm.bias"]
    assert torch.equal(state["pos_embed"], torch.cat((torch.zeros(1, 1, 8), positions.unsqueeze(0)), dim=1))
    assert tokens.keys() == {"cls_token", "mask_token", "norm.bias"}, "the source is left as it was"
    del tokens["cls_token"]
    assert torch.equal(timm_state(tokens, positions)["pos_embed"], positions.unsqueeze(0))


def test_positions_keep_their_dtype() -> None:
    positions = sincos_positions((1, 2), 4).bfloat16()
    assert timm_state({"cls_token": torch.ones(1, 1, 4)}, positions)["pos_embed"].dtype == torch.bfloat16


def test_the_call_makes_timms_preprocessing_that_of_the_run() -> None:
    data = DataConfig(image_size=[32, 48], channels=2, mean=[0.1, 0.2], std=[0.3, 0.4], crop_pct=0.9)
    call = timm_call(BackboneConfig(patch_size=16, embed_dim=24, depth=1, num_heads=3), data)
    found = timm.data.resolve_model_data_config(on_meta(call.architecture, **call.arguments))
    assert {key: found[key] for key in ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation")} == {
        "input_size": [2, 32, 48],
        "mean": [0.1, 0.2],
        "std": [0.3, 0.4],
        "crop_pct": 0.9,
        "crop_mode": "center",
        "interpolation": "bicubic",
    }


@pytest.mark.long
def test_the_map_needs_no_model_and_no_timm() -> None:
    program = """
import sys, dmjd.interop.timm
assert "timm" not in sys.modules and not any(name.startswith("dmjd.models") for name in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(dmjd.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def of_dinov2(state: State) -> State:
    return state | {"mask_token": torch.zeros(1, 192)}


def in_training(state: State) -> dict[str, State]:
    """Blocks in chunks of two, and a head beside the teacher's backbone."""
    chunked = {
        re.sub(r"^blocks\.(\d)", lambda found: f"blocks.{int(found[1]) // 2}.{found[1]}", name): value
        for name, value in of_dinov2(state).items()
    }
    inside = {f"backbone.{name}": value for name, value in chunked.items()}
    return {"teacher": inside | {"dino_head.mlp.0.weight": torch.zeros(4, 192)}}


@torch.no_grad()
@pytest.mark.parametrize("written", [dict, of_dinov2, in_training])
@pytest.mark.parametrize("options", [{}, {"no_embed_class": True}], ids=["DINOv2", "DeiT III"])
def test_layer_scales_are_computed_as_by_timm(
    tmp_path: Path, options: dict[str, Any], written: Callable[[State], Any]
) -> None:
    sizes: dict[str, Any] = {
        "img_size": 28,
        "patch_size": 14,
        "embed_dim": 192,
        "depth": 4,
        "num_heads": 3,
        "num_classes": 0,
    }
    model = timm.models.VisionTransformer(**sizes, **options, init_values=1.0).eval()
    for value in model.parameters():
        value.add_(0.05 * torch.randn_like(value))
    torch.save(written(model.state_dict()), tmp_path / "file.pth")
    encoder = load_encoder(compose("knn", [f"checkpoint={tmp_path / 'file.pth'}", "device=cpu"])).encoder
    images = torch.randn(2, 3, 28, 28)
    torch.testing.assert_close(encoder(images), model.forward_features(images), rtol=1e-5, atol=1e-5)


def test_norms_of_queries_are_an_error_that_names_them(tmp_path: Path) -> None:
    model = timm.models.VisionTransformer(embed_dim=192, depth=1, num_heads=3, num_classes=0, qk_norm=True)
    torch.save(model.state_dict(), tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match=r"it has encoder\.blocks\.0\.attn\.k_norm\.bias, .* use the model's own"):
        load_encoder(compose("knn", [f"checkpoint={tmp_path / 'file.pth'}", "device=cpu"]))


@pytest.mark.parametrize("other", ["", "encoder.", "student.", "critic.trunk."])
def test_of_two_encoders_none_is_chosen(tmp_path: Path, other: str) -> None:
    state = timm.models.VisionTransformer(embed_dim=192, depth=1, num_heads=3, num_classes=0).state_dict()
    both = {prefix + name: value for prefix in ("backbone.", other) for name, value in state.items()}
    torch.save(both, tmp_path / "file.pth")
    with pytest.raises(CheckpointError) as caught:
        load_encoder(compose("knn", [f"checkpoint={tmp_path / 'file.pth'}", "device=cpu"]))
    assert "file.pth holds several encoders, one of them with " in str(caught.value)
    assert str(caught.value).endswith("patch_embed.proj.weight; save the weights of one to a file")
