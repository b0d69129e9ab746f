from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dmjd.builders import build_objective
from dmjd.builders.model import build_classification
from dmjd.builders.weights import load_classifier
from dmjd.compose import compose
from dmjd.errors import CheckpointError
from dmjd.evaluate.convert import convert
from dmjd.evaluate.encoder import load_encoder
from dmjd.evaluate.features import encode
from dmjd.interop.layouts import detect
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.vit import ViTEncoder
from dmjd.ops.images import normalise
from dmjd.positions import sincos_positions
from tests.interop.official_files import OFFICIAL, TABLES, from_official, to_official

Shapes = dict[str, tuple[int, ...]]
OFFICIAL_FILES = Path(__file__).parent / "official"


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


# Files that the authors' own code wrote at a tiny width, with the features that it computed from them; fixture.json
# names repository, commit and what was done

FIXTURES = {path.parent.name: json.loads(path.read_text()) for path in sorted(OFFICIAL_FILES.glob("*/fixture.json"))}
CASES = [(name, case) for name, fixture in FIXTURES.items() for case in fixture["cases"]]
ALL_CASES = pytest.mark.parametrize(
    ("name", "case"), CASES, ids=["-".join((name, case["file"], case.get("weights", ""))) for name, case in CASES]
)


@ALL_CASES
def test_outputs_are_those_of_the_authors_code(
    name: str, case: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, expected = OFFICIAL_FILES / name, load_file(OFFICIAL_FILES / name / "expected.safetensors")
    model = [*FIXTURES[name]["backbone"], *case.get("backbone", [])]
    arguments = [*model, "data=folder", "data.root=images", "data.image_size=[32,32]"]
    weights = [f"weights={case['weights']}"] if "weights" in case else []
    if "logits" in case:
        config = compose("finetune", [f"init={folder / case['file']}", *arguments, *weights])
        classification = build_classification(config, expected[case["logits"]].shape[1])
        log = load_classifier(classification, folder / case["file"], config.weights)
        assert "with its head" in log
        images = normalise(expected["images"], config.data.mean, config.data.std)
        ours, theirs = classification.model.eval()(images), expected[case["logits"]]
    else:
        caplog.set_level("INFO", "dmjd")
        frozen = load_encoder(compose("knn", [f"checkpoint={folder / case['file']}", *arguments, *weights]))
        data, log, theirs = frozen.data, caplog.text, expected[case["features"]]
        ours = encode(frozen.encoder, expected["images"], mean=data.mean, std=data.std, pooling="tokens")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert case["layout"] in log.partition("in the layout of ")[2].partition(" (")[0].split(",")[0].split()
    assert case.get("note", "") in log


SYSTEMS = ["dino", "ibot", "mocov3"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_training_file_describes_its_encoder_but_for_the_heads(name: str) -> None:
    path, tiny = OFFICIAL_FILES / name / FIXTURES[name]["cases"][0]["file"], FIXTURES[name]["backbone"]
    found = load_encoder(compose("knn", [f"checkpoint={path}", "backbone.num_heads=2", "data.root=x"]))
    named = load_encoder(compose("knn", [f"checkpoint={path}", *tiny, "data.root=x", "data.image_size=[32,32]"]))
    assert (found.trained.backbone, found.size) == (named.trained.backbone, named.size)
    assert found.run.path == path.with_name("full")  # of scores, also for full.pth.tar


@pytest.mark.parametrize(
    ("name", "weights", "extracted", "container", "prefix"),
    [
        ("dino", "trained", "backbone.pth", None, ""),
        ("ibot", "trained", "backbone.pth", "state_dict", ""),
        ("ibot", "student", "backbone_student.pth", "state_dict", ""),
        ("mocov3", "trained", "backbone.pth", "state_dict", "module.base_encoder."),
    ],
)
def test_conversion_to_the_authors_layout_is_what_their_own_script_extracts(
    name: str, weights: str, extracted: str, container: str | None, prefix: str, tmp_path: Path
) -> None:
    full, output = OFFICIAL_FILES / name / FIXTURES[name]["cases"][0]["file"], tmp_path / "out.pth"
    convert(compose("convert", [f"input={full}", f"output={output}", f"to={name}", f"weights={weights}"]))
    written, theirs = torch.load(output), torch.load(OFFICIAL_FILES / name / extracted)
    written = written if container is None else written[container]
    theirs = next((theirs[key] for key in ("model", "state_dict") if key in theirs), theirs)
    assert written.keys() == {prefix + key for key in theirs}
    assert all(torch.equal(written[prefix + key], value) for key, value in theirs.items())


@pytest.mark.parametrize("name", ["dino", "ibot"])
def test_at_another_size_features_differ_from_theirs_by_the_interpolation_alone(name: str) -> None:
    expected = load_file(OFFICIAL_FILES / name / "expected.safetensors")
    path, tiny = OFFICIAL_FILES / name / "full.pth", FIXTURES[name]["backbone"]
    frozen = load_encoder(compose("knn", [f"checkpoint={path}", *tiny, "data.root=x", "data.image_size=[48,48]"]))
    images, theirs = normalise(expected["images_48"], frozen.data.mean, frozen.data.std), expected["teacher_48"]
    encoder: Any = frozen.encoder
    difference = (encoder(images) - theirs).square().mean().sqrt() / theirs.std()
    assert 1e-3 < difference < 0.03
    # 4 x 4 positions to 6 x 6, by vision_transformer.interpolate_pos_encoding
    with torch.serialization.safe_globals([argparse.Namespace]):
        table = torch.load(path)["teacher"]["backbone.pos_embed"]
    factor, maps = (6 + 0.1) / 4, table[:, 1:].transpose(1, 2).unflatten(2, (4, 4))
    maps = torch.nn.functional.interpolate(maps, scale_factor=(factor, factor), mode="bicubic")
    encoder.pos_embed.data = torch.cat((table[:, :1], maps.flatten(2).transpose(1, 2)), dim=1)
    torch.testing.assert_close(encoder(images), theirs, rtol=0, atol=1e-5)


def test_a_wrong_number_of_heads_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    width, state = 384, torch.load(OFFICIAL_FILES / "mocov3/backbone.pth")["model"]
    shapes = {
        key: [width // 24 * n if n % 24 == 0 else n for n in state[key].shape] for key in state if ".1." not in key
    }
    state = {key: torch.zeros(shape) for key, shape in shapes.items()}
    columns, rows = sincos_positions((4, 4), width).chunk(2, dim=1)
    state["pos_embed"] = torch.cat((torch.zeros(1, width), torch.cat((rows, columns), dim=1)))[None]
    torch.save({"state_dict": {f"module.base_encoder.{name}": value for name, value in state.items()}}, tmp_path / "m")
    model = ["backbone.patch_size=8", "backbone.depth=1", "backbone.mlp_ratio=2"]
    images = ["data.root=x", "data.image_size=[32,32]"]
    for backbone, warned in (("mocov3_vit_small", False), ("dino_vit_small", True)):
        load_encoder(compose("knn", [f"checkpoint={tmp_path / 'm'}", f"backbone={backbone}", *model, *images]))
        assert ("backbone.num_heads=6, but" in caplog.text and "have 12 heads" in caplog.text) == warned


def without(part: Any, ends: str) -> Any:
    """Nested dicts without the keys that end so."""
    if not isinstance(part, dict):
        return part
    return {key: without(inner, ends) for key, inner in part.items() if not str(key).endswith(ends)}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("lost", ["blocks.1.attn.qkv.weight", "cls_token", "pos_embed", ".norm.bias"])
def test_a_training_file_without_a_needed_weight_is_an_error_that_names_it(
    name: str, lost: str, tmp_path: Path
) -> None:
    with torch.serialization.safe_globals([argparse.Namespace]):
        file = torch.load(OFFICIAL_FILES / name / FIXTURES[name]["cases"][0]["file"])
    path = tmp_path / "full.pth"
    torch.save(without(file, lost), path)
    with pytest.raises(CheckpointError, match=lost.removeprefix(".").replace(".", r"\.")) as raised:
        load_encoder(compose("knn", [f"checkpoint={path}", *FIXTURES[name]["backbone"], "data=folder", "data.root=x"]))
    assert "\n" not in str(raised.value)


def test_a_stem_of_convolutions_is_an_error_of_one_line() -> None:
    # MoCo v3's vit_conv_small: 3 x 3 convolutions with BatchNorm, then a 1 x 1 convolution.
    state = torch.load(OFFICIAL_FILES / "mocov3/full.pth.tar")["state_dict"]
    state = {key.removeprefix("module."): value for key, value in state.items() if ".patch_embed." not in key}
    stem = "base_encoder.patch_embed.proj"
    state |= {f"{stem}.0.weight": torch.ones(3, 3, 3, 3), f"{stem}.1.running_mean": torch.ones(3)}
    with pytest.raises(CheckpointError, match=r"several convolutions \(patch_embed\.proj\.0\.weight\), as .* MoCo v3"):
        detect(state)


@pytest.mark.parametrize(
    ("backbone", "size"),
    [  # width, depth, heads of vit_small, vit_base and vit_large in their code
        ("dino_vit_small", (384, 12, 6)),
        ("dino_vit_base", (768, 12, 12)),
        ("ibot_vit_small", (384, 12, 6)),
        ("ibot_vit_base", (768, 12, 12)),
        ("ibot_vit_large", (1024, 24, 16)),
        ("mocov3_vit_small", (384, 12, 12)),
        ("mocov3_vit_base", (768, 12, 12)),
    ],
)
def test_backbones_are_those_of_the_authors_code(backbone: str, size: tuple[int, int, int]) -> None:
    # A preset's own keys rule over those of the default method, which has no class token.
    found = compose("knn", ["checkpoint=x.pth", f"backbone={backbone}"]).model.backbone
    assert (found.embed_dim, found.depth, found.num_heads) == size
    assert (found.positions, found.class_token, found.patch_size) == ("learned", True, 16)
    assert found == compose("finetune", ["init=x.pth", f"backbone={backbone}", "backbone.drop_path=0"]).backbone
