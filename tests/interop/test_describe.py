"""The model of a file from its tensors: sizes of published models, against timm's and the authors' own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from dmjd.builders import build_encoder
from dmjd.compose import compose
from dmjd.config import BackboneConfig, DataConfig
from dmjd.errors import CheckpointError
from dmjd.interop.describe import Noted, describe
from dmjd.interop.layouts import LAYOUTS
from tests.interop import layout_states as states
from tests.interop.layout_states import State, draw


def of_timm(name: str, **options: Any) -> State:
    """Shapes of a model of timm under our names, with random positions."""
    with torch.device("meta"):
        state = timm.create_model(name, num_classes=0, **options).state_dict()
    state = {key: torch.randn(value.shape) if "pos_embed" in key else value for key, value in state.items()}
    return LAYOUTS["timm"].read(state, keep_nonfinite=True)


PUBLISHED = {
    "vit_tiny_patch16_224": (16, 192, 12, 3, [224, 224]),
    "vit_small_patch16_384": (16, 384, 12, 6, [384, 384]),
    "vit_base_patch8_224": (8, 768, 12, 12, [224, 224]),
    "vit_base_patch32_224": (32, 768, 12, 12, [224, 224]),
    "vit_large_patch14_224": (14, 1024, 24, 16, [224, 224]),
    "vit_huge_patch14_224": (14, 1280, 32, 16, [224, 224]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_a_published_vit(name: str) -> None:
    described = describe(of_timm(name))
    backbone, data = described.backbone_config({}), described.data_config(None)
    found = (backbone.patch_size, backbone.embed_dim, backbone.depth, backbone.num_heads, data.image_size)
    assert found == PUBLISHED[name]
    assert (backbone.mlp_ratio, backbone.positions, backbone.class_token) == (4.0, "learned", True)


@pytest.mark.parametrize(
    ("name", "depths", "heads", "width", "window"),
    [
        ("swin_tiny_patch4_window7_224", [2, 2, 6, 2], [3, 6, 12, 24], 768, 7),
        ("swin_large_patch4_window12_384", [2, 2, 18, 2], [6, 12, 24, 48], 1536, 12),
    ],
)
def test_sizes_of_a_published_swin(name: str, depths: list[int], heads: list[int], width: int, window: int) -> None:
    described = describe(of_timm(name))
    backbone = described.backbone_config({})
    assert (backbone.windows.depths, backbone.windows.num_heads, backbone.windows.size) == (depths, heads, window)
    assert (backbone.embed_dim, described.data_config(None).image_size) == (width, [32 * window] * 2)


@pytest.mark.parametrize("backbone", ["convvit_small", "convvit_base", "convvit_large"])
def test_a_convvit_of_ours_is_described_as_its_configuration(backbone: str) -> None:
    config = compose("pretrain", [f"backbone={backbone}"])
    with torch.device("meta"):
        encoder = build_encoder(config)
    weights = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    assert describe(weights).backbone_config({}) == config.backbone


def moco_positions(width: int, grid: int) -> Tensor:
    """As ``build_2d_sincos_position_embedding`` of facebookresearch/moco-v3, in whose meshgrid rows come first."""
    rows, columns = torch.meshgrid(torch.arange(grid).float(), torch.arange(grid).float(), indexing="ij")
    omega = 1.0 / 10000 ** (torch.arange(width // 4).float() / (width // 4))
    first, second = torch.outer(rows.flatten(), omega), torch.outer(columns.flatten(), omega)
    table = torch.cat([first.sin(), first.cos(), second.sin(), second.cos()], dim=1)
    return torch.cat([torch.zeros(1, width), table])[None]


def test_small_models_of_moco_v3_have_twelve_heads() -> None:
    weights = of_timm("vit_small_patch16_224")
    assert describe(weights).backbone["num_heads"] == 6
    weights["encoder.pos_embed"] = moco_positions(384, 14)
    assert describe(weights).backbone["num_heads"] == 12


def read(kind: str) -> dict[str, Tensor]:
    layout, shapes = states.STATES[kind]
    return LAYOUTS[layout].read(draw(shapes()))


def test_values_that_are_noted_or_given_rule() -> None:
    weights = read("mae")
    with pytest.raises(
        CheckpointError, match=r"none is known for backbone\.embed_dim=24 \(known are 192: 3, .*num_heads="
    ):
        describe(weights).backbone_config({})
    noted = Noted(num_heads=2, image_size=(16, 64), mean=[0.5, 0.5, 0.5], std=[0.5])
    described = describe(weights, noted)
    assert described.backbone_config({}).num_heads == 2
    assert described.backbone_config({"num_heads": 4, "windows.size": 7}).num_heads == 4
    data = described.data_config(DataConfig(mean=[0.1, 0.1, 0.1], std=[0.2, 0.2, 0.2]))
    assert (data.image_size, data.mean, data.std) == ([16, 64], [0.5, 0.5, 0.5], [0.2, 0.2, 0.2])
    square = [states.GRID * states.PATCH] * 2
    assert describe(weights).data_config(None).image_size == square
    for size in ((16, 60), (64, 64)):  # of other tokens than the file has
        assert describe(weights, Noted(image_size=size)).data_config(None).image_size == square


def test_size_and_statistics_of_files_without_them_are_those_of_the_images() -> None:
    weights = read("mae")
    del weights["encoder.pos_embed"]  # as ours leaves fixed ones out
    weights["encoder.patch_embed.proj.weight"] = torch.zeros(24, 1, 12, 12)
    grey = DataConfig(image_size=[32, 50], channels=1, mean=[0.2], std=[0.3])
    data = describe(weights).data_config(grey)
    assert (data.image_size, data.channels, data.mean, data.std) == ([36, 48], 1, [0.2], [0.3])
    plain = describe(weights).data_config(None)
    assert (plain.image_size, plain.mean, plain.std) == ([228, 228], [0.5], [0.5])


@pytest.mark.parametrize("hidden", [1, 41, 48, 73, 97])
def test_the_ratio_of_an_mlp_gives_its_hidden_width(hidden: int) -> None:
    weights = read("mae") | {f"encoder.blocks.{index}.mlp.fc1.weight": torch.zeros(hidden, 24) for index in (0, 1)}
    config: BackboneConfig = describe(weights).backbone_config({"num_heads": 3})
    assert int(24 * config.mlp_ratio) == hidden


def test_shapes_of_other_models_are_an_error() -> None:
    weights = read("mae") | {"encoder.patch_embed.proj.weight": torch.zeros(24, 192)}
    with pytest.raises(CheckpointError, match=r"patch_embed\.proj\.weight is of shape \[24, 192\], not \[width, chan"):
        describe(weights)
    with pytest.raises(
        CheckpointError, match="its Swin has 2 stages, 2 with a table of relative biases, and dmjd's has 4"
    ):
        describe(read("simmim_swin"))


@pytest.mark.parametrize("kind", ["mae", "beit", "fixed positions"])
def test_a_header_with_another_grid_is_an_error_before_a_model_is_built(kind: str) -> None:
    weights = read("beit" if kind == "beit" else "mae")
    if kind == "fixed positions":
        del weights["encoder.pos_embed"]
    assert describe(weights, grid=(states.GRID, states.GRID)).image_size == (states.GRID * states.PATCH,) * 2
    with pytest.raises(CheckpointError, match=r"^its header states a token grid of 999999x9, which"):
        describe(weights, grid=(999_999, 9))


def test_what_differs_is_said_in_arguments() -> None:
    one, other = describe(read("mae")), describe(read("beit"))
    assert one.differing(other).text == ("backbone.masked_tokens=drop backbone.positions=learned backbone.block=plain")
    assert other.differing(one).text.endswith("backbone.bias_tables=shared backbone.layer_scale=0.1")
    assert "backbone.windows.depths=[2,2,6,2]" in describe(of_timm("swin_tiny_patch4_window7_224")).text
