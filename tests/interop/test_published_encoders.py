"""Files of CAE, mc-BEiT, data2vec and SdAE that their own code wrote (``official/*/fixture.json``): commands beyond the
plain evaluation, which ``test_official.py`` tests for all systems."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

from dmjd.builders import build_encoder
from dmjd.compose import compose
from dmjd.errors import CheckpointError
from dmjd.evaluate.convert import convert
from dmjd.evaluate.encoder import load_encoder
from dmjd.evaluate.export import export, sidecar
from dmjd.evaluate.features import encode
from dmjd.ops.images import normalise

OFFICIAL = Path(__file__).parent / "official"
TINY = ("backbone.patch_size=8", "backbone.embed_dim=24", "backbone.depth=2", "backbone.num_heads=2")
HEADS = "backbone.num_heads=2"
"""The only key of these models that tensors do not show."""


def file_of(system: str) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(OFFICIAL / system / "full.pth")


def check_features(path: Path, system: str, key: str, *words: str) -> None:
    expected = load_file(OFFICIAL / system / "expected.safetensors")
    frozen = load_encoder(compose("knn", [f"checkpoint={path}", "data=folder", "device=cpu", *words]))
    mean, std, pooling = frozen.data.mean, frozen.data.std, "mean" if key == "pooled" else "tokens"
    found = encode(frozen.encoder, expected["images"], mean=mean, std=std, pooling=pooling)
    torch.testing.assert_close(found, expected[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("system", ["cae", "cae_atten4vis", "mcbeit", "data2vec", "sdae"])
def test_a_file_describes_its_own_encoder(system: str) -> None:
    check_features(OFFICIAL / system / "full.pth", system, "encoder", HEADS)


@pytest.mark.parametrize("system", ["cae", "data2vec"])
def test_a_fine_tuned_file_is_evaluated_by_the_features_that_its_head_reads(system: str) -> None:
    check_features(OFFICIAL / system / "finetuned.pth", system, "pooled", HEADS)


def test_caes_relative_biases_begin_at_zero_beside_its_positions() -> None:
    both = ("positions=learned_relative", "bias_tables=per_block", "masked_tokens=mask_token")
    words = [f"backbone.{word}" for word in both]
    size = "data.image_size=[32,32]"
    check_features(OFFICIAL / "cae/full.pth", "cae", "encoder", "backbone=cae_vit_base", *TINY, size, *words)


@pytest.mark.parametrize("system", ["cae", "cae_atten4vis"])
def test_caes_encoder_is_converted_without_regressor_and_decoder(system: str, tmp_path: Path) -> None:
    output = tmp_path / "cae.pth"
    convert(compose("convert", [f"input={OFFICIAL / system / 'full.pth'}", f"output={output}", "to=cae"]))
    whole, written = file_of(system)["model"], torch.load(output)["model"]
    assert written.keys() == {name for name in whole if name.startswith("encoder.")}
    assert all(torch.equal(value, whole[name]) for name, value in written.items())
    check_features(output, system, "encoder", HEADS)


def test_caes_encoder_is_read_beside_the_neck_of_mmpretrain(tmp_path: Path) -> None:
    path = tmp_path / "mmpretrain.pth"
    convert(compose("convert", [f"input={OFFICIAL / 'cae/full.pth'}", f"output={path}", "to=mmpretrain"]))
    state, neck = torch.load(path)["state_dict"], ("mask_token", "regressors.0.gamma_1_cross", "decoders.0.gamma_1")
    layers = ("norm_regressor", "norm_decoder", "head", "regressors.0.cross_attn.proj")
    names = [*neck, *(f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias"))]
    torch.save({"state_dict": state | {f"neck.{name}": torch.ones(24) for name in names}}, path)
    check_features(path, "cae", "encoder", HEADS)


@pytest.mark.parametrize(
    ("system", "name", "message"),
    [
        ("cae", "encoder.blocks.1.gamma_2", r"1 missing \(encoder.blocks.1.gamma_2\)"),
        ("cae", "encoder.pos_embed", "pos_embed"),
        ("mcbeit", "rel_pos_bias.relative_position_bias_table", "1 missing"),
        ("data2vec", "blocks.0.attn.q_bias", "features depend on blocks.0.attn.v_bias"),
        ("sdae", "blocks.1.mlp.fc2.bias", r"1 missing \(blocks.1.mlp.fc2.bias\)"),
    ],
)
def test_a_weight_that_features_depend_on_is_missed(system: str, name: str, message: str, tmp_path: Path) -> None:
    file = file_of(system)
    del file["model"][name]
    torch.save(file, tmp_path / "full.pth")
    with pytest.raises(CheckpointError, match=message):
        load_encoder(compose("knn", [f"checkpoint={tmp_path / 'full.pth'}", "data=folder", "device=cpu", HEADS]))


@pytest.mark.parametrize(
    ("backbone", "values"),
    [  # of their code, with fixed positions and the mask token, without heads
        ("cae_vit_base", 85_807_872),
        ("mcbeit_vit_base", 85_666_128),
        ("data2vec_vit_base", 85_666_128),
        ("sdae_vit_base", 85_798_656),
    ],
)
def test_backbones_have_as_many_parameters_as_in_their_code(backbone: str, values: int) -> None:
    model = compose("knn", ["checkpoint=x.pth", f"backbone={backbone}"]).model
    with torch.device("meta"):
        encoder = build_encoder(model)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == values


def test_the_export_of_a_fine_tuned_file_gives_the_features_that_its_head_reads(tmp_path: Path) -> None:
    expected, path = load_file(OFFICIAL / "cae/expected.safetensors"), tmp_path / "exported.safetensors"
    export(compose("export", [f"checkpoint={OFFICIAL / 'cae/finetuned.pth'}", f"output={path}", HEADS]))
    card = json.loads(sidecar(path).read_text())
    model = timm.create_model(card["architecture"], checkpoint_path=str(path), **card["arguments"]).eval()
    with torch.no_grad():
        found = model(normalise(expected["images"], card["mean"], card["std"]))
    torch.testing.assert_close(found, expected["pooled"], atol=1e-5, rtol=0)
