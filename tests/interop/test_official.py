from __future__ import annotations

from typing import Any

import pytest
import torch

from dmjd.builders import build_objective
from dmjd.compose import compose
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.vit import ViTEncoder
from dmjd.positions import sincos_positions
from tests.interop.official_files import OFFICIAL, TABLES, from_official, to_official

Shapes = dict[str, tuple[int, ...]]


# What the authors' files hold


def layer(name: str, *shape: int) -> Shapes:
    """A weight and the bias of its outputs."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def vit_block(name: str, dim: int, hidden: int) -> Shapes:
    return {
        **layer(f"{name}.norm1", dim),
        **layer(f"{name}.attn.qkv", 3 * dim, dim),
        **layer(f"{name}.attn.proj", dim, dim),
        **layer(f"{name}.norm2", dim),
        **layer(f"{name}.mlp.fc1", hidden, dim),
        **layer(f"{name}.mlp.fc2", dim, hidden),
    }


def conv_block(name: str, dim: int, hidden: int) -> Shapes:
    return {
        **layer(f"{name}.norm1", dim),
        **layer(f"{name}.conv1", dim, dim, 1, 1),
        **layer(f"{name}.conv2", dim, dim, 1, 1),
        **layer(f"{name}.attn", dim, 1, 5, 5),
        **layer(f"{name}.norm2", dim),
        **layer(f"{name}.mlp.fc1", hidden, dim, 1, 1),
        **layer(f"{name}.mlp.fc2", dim, hidden, 1, 1),
    }


def decoder(tokens: int, dim: int, depth: int, hidden: int, target: int) -> Shapes:
    shapes = {
        "mask_token": (1, 1, 512),
        "decoder_pos_embed": (1, tokens, 512),
        **layer("decoder_embed", 512, dim),
        **layer("decoder_norm", 512),
        **layer("decoder_pred", target, 512),
    }
    for index in range(depth):
        shapes |= vit_block(f"decoder_blocks.{index}", 512, hidden)
    return shapes


def convvit(dims: tuple[int, int, int], hidden: tuple[int, int], depth: int) -> Shapes:
    first, second, third = dims
    shapes = {
        "pos_embed": (1, 196, third),
        **layer("patch_embed1.proj", first, 3, 4, 4),
        **layer("patch_embed1.norm", first),
        **layer("patch_embed2.proj", second, first, 2, 2),
        **layer("patch_embed2.norm", second),
        **layer("patch_embed3.proj", third, second, 2, 2),
        **layer("patch_embed3.norm", third),
        **layer("patch_embed4", third, third),
        **layer("stage1_output_decode", third, first, 4, 4),
        **layer("stage2_output_decode", third, second, 2, 2),
        **layer("norm", third),
    }
    for index in range(2):
        shapes |= conv_block(f"blocks1.{index}", first, hidden[0]) | conv_block(f"blocks2.{index}", second, hidden[1])
    for index in range(depth):
        shapes |= vit_block(f"blocks3.{index}", third, 4 * third)
    return shapes


def visible_branch(dim: int) -> Shapes:
    return {
        **layer("proj_embed.0", 512, dim),
        **layer("proj_embed.1", 512),
        **layer("proj_embed.3", 512, 512),
        **layer("proj_embed.4", 512),
        **layer("proj_embed.6", 512, 512),
        **layer("predictor.0", 108, 512),
    }


def mae() -> Shapes:
    shapes = {
        "cls_token": (1, 1, 768),
        "pos_embed": (1, 197, 768),
        **layer("patch_embed.proj", 768, 3, 16, 16),
        **layer("norm", 768),
    }
    for index in range(12):
        shapes |= vit_block(f"blocks.{index}", 768, 3072)
    return shapes | decoder(197, 768, 8, 2048, 768)


CONVMAE = convvit((256, 384, 768), (1024, 1536), 11) | decoder(196, 768, 8, 2048, 768)
DMJD_ENCODER = convvit((256, 384, 768), (2048, 3072), 11)
DMJD_LARGE = convvit((384, 768, 1024), (3072, 6144), 23) | decoder(196, 1024, 8, 4096, 108) | visible_branch(1024)


@pytest.mark.parametrize(
    ("words", "shapes", "tensors", "values"),
    [
        (("mae_vit_base",), mae(), 254, 111_907_840),
        (("convmae_base",), CONVMAE, 313, 115_041_408),
        (("convmae_dm_base",), CONVMAE, 313, 115_041_408),
        (
            ("dmjd_convvit_base_hog",),
            DMJD_ENCODER | decoder(196, 768, 8, 4096, 108) | visible_branch(768),
            325,
            135_885_912,
        ),
        (
            ("dmjd_convvit_base_hog", "method.decoder.depth=2"),
            DMJD_ENCODER | decoder(196, 768, 2, 4096, 108) | visible_branch(768),
            253,
            104_376_408,
        ),
        (("dmjd_convvit_large_hog",), DMJD_LARGE, 469, 375_193_944),
    ],
    ids=["mae", "convmae", "convmae-dm", "dmjd-base", "dmjd-base-dec2", "dmjd-large"],
)
def test_names_and_shapes_are_the_official_ones(
    words: tuple[str, ...], shapes: Shapes, tensors: int, values: int
) -> None:
    config = compose("pretrain", [f"experiment={words[0]}", *words[1:]])
    with torch.device("meta"):
        model: Any = build_objective(config, 108 if config.target.name == "hog" else 768).model
    official = to_official(model)
    assert {name: tuple(value.shape) for name, value in official.items()} == shapes
    assert len(official) == tensors
    assert sum(value.numel() for value in official.values()) == values
    back = from_official(official)
    ours = model.state_dict()
    assert {name: value.shape for name, value in back.items()} == {name: value.shape for name, value in ours.items()}


# Round trips


def make_model(kind: str) -> MaskedImageModel:
    torch.manual_seed(0)
    encoder: Encoder
    if kind == "mae":
        encoder = ViTEncoder(image_size=(32, 48), patch_size=16, in_chans=3, embed_dim=24, depth=2, num_heads=3)
    else:
        encoder = ConvViTEncoder(
            image_size=(32, 48),
            in_chans=3,
            embed_dims=(8, 12, 24),
            depths=(2, 1, 2),
            mlp_ratios=(8, 8, 4),
            num_heads=3,
        )
    mae_decoder = MAEDecoder(
        encoder_dim=24,
        grid=encoder.grid,
        prefix_tokens=encoder.num_prefix_tokens,
        dim=16,
        depth=2,
        num_heads=2,
        mlp_ratio=2,
    )
    branch = VisibleBranch(encoder_dim=24, width=20, target_dim=7) if kind == "dmjd" else None
    model = MaskedImageModel(encoder, mae_decoder, branch, 7)
    with torch.no_grad():
        for parameter in model.parameters():  # no two tensors alike, so a swap is seen
            parameter.copy_(torch.randn_like(parameter))
    return model


KINDS = pytest.mark.parametrize("kind", ["dmjd", "convmae", "mae"])


@KINDS
def test_ours_to_theirs_and_back_is_the_same_bits(kind: str) -> None:
    model = make_model(kind)
    state = model.state_dict()
    back = from_official(to_official(model))
    assert list(back) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in back.items())
    other = make_model(kind)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.load_state_dict(back, strict=True)


@KINDS
def test_theirs_to_ours_and_back_is_the_same_bits(kind: str) -> None:
    official = {name: torch.randn_like(value) for name, value in to_official(make_model(kind)).items()}
    weights = OFFICIAL.read(official)
    tables = {name: weights.pop(name) for name in TABLES}
    model = make_model(kind)
    model.load_state_dict(weights, strict=True)
    again = OFFICIAL.write(model.state_dict() | tables).state
    assert again.keys() == official.keys()
    assert all(torch.equal(value, official[name]) for name, value in again.items())


@KINDS
def test_positions_are_the_grids_with_a_row_of_zeros_for_a_cls_token(kind: str) -> None:
    official = to_official(make_model(kind))
    for name, dim in (("pos_embed", 24), ("decoder_pos_embed", 16)):
        expected = sincos_positions((2, 3), dim)
        if kind == "mae":
            expected = torch.cat((torch.zeros(1, dim), expected))
        assert torch.equal(official[name], expected[None]), name


@KINDS
def test_a_file_without_decoder_gives_the_encoder(kind: str) -> None:
    # As the public files of MAE and ConvMAE.
    model = make_model(kind)
    state = model.encoder.state_dict()
    released = {**state, "pos_embed": torch.zeros(1, 6, 24)}
    back = from_official(released)
    assert back.keys() == {f"encoder.{name}" for name in state}
    assert all(torch.equal(back[f"encoder.{name}"], value) for name, value in state.items())
    assert OFFICIAL.write(OFFICIAL.read(released)).state.keys() == released.keys()


def test_sources_are_left_as_they_were() -> None:
    model = make_model("dmjd")
    state, official = model.state_dict(), to_official(model)
    names, theirs = list(state), list(official)
    OFFICIAL.write(state)
    OFFICIAL.read(official)
    assert (list(state), list(official)) == (names, theirs)
