from __future__ import annotations

import re
from typing import Any

import pytest
import timm
import torch
from timm.models.swin_transformer import checkpoint_filter_fn
from torch import Tensor
from torch.nn import functional as F
from transformers import BeitConfig, BeitModel, ViTMAEConfig, ViTMAEModel

from dmjd.config import ConvertConfig
from dmjd.errors import CheckpointError
from dmjd.interop.layouts import LAYOUTS, detect, peel
from dmjd.interop.names import VOCABULARY, missing, summary
from dmjd.interop.tensors import expand_bias_table
from dmjd.models.vit import ViTEncoder
from tests.interop import layout_states as states
from tests.interop.layout_states import DEPTH, DIM, GRID, HEADS, HIDDEN, PATCH, STATES, State, draw

EACH = pytest.mark.parametrize("kind", STATES)


def read(kind: str, seed: int = 0) -> tuple[State, dict[str, Tensor]]:
    layout, shapes = STATES[kind]
    state = draw(shapes(), seed)
    return state, LAYOUTS[layout].read(state)


def same_bits(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# Names


@EACH
def test_a_layout_is_told_by_its_names(kind: str) -> None:
    layout, shapes = STATES[kind]
    found, _ = detect(draw(shapes()))
    assert found.name == layout


def test_timms_vit_is_named_as_maes_encoder_is() -> None:
    _, fitting = detect(draw(states.timm_vit()))
    assert {"mae", "timm"} <= set(fitting)


@EACH
def test_there_and_back_is_the_same_bits(kind: str) -> None:
    state, weights = read(kind)
    written, left_out = LAYOUTS[STATES[kind][0]].write(weights)
    same_bits(written, state)
    assert not left_out


@EACH
def test_through_our_own_file_is_the_same_bits(kind: str) -> None:
    layout = LAYOUTS[STATES[kind][0]]
    state, weights = read(kind)
    ours = LAYOUTS["ours"].write(weights).state
    assert detect(ours)[0].name == "ours"
    same_bits(layout.write(LAYOUTS["ours"].read(ours)).state, state)


def test_our_names_are_those_of_the_configuration() -> None:
    offered = {
        item.name: item.metadata["choices"]
        for item in ConvertConfig.__dataclass_fields__.values()
        if "choices" in item.metadata
    }
    assert set(offered["to"]) == set(LAYOUTS)
    assert set(offered["source"]) == {"auto", *LAYOUTS}


@pytest.mark.parametrize("name", [name for name in VOCABULARY if "*" not in name])
def test_no_layout_gives_one_name_two_meanings(name: str) -> None:
    for layout in LAYOUTS.values():
        theirs = layout.names.theirs(name)
        assert theirs is None or layout.names.ours(theirs) == name


def test_buffers_are_no_weights() -> None:
    state = draw(states.maskfeat())
    more = {
        "hogs.0.weight_x": torch.ones(3, 1, 3, 3),
        "hogs.0.weight_y": torch.ones(3, 1, 3, 3),
    }
    same_bits(LAYOUTS["maskfeat"].read(state | more), LAYOUTS["maskfeat"].read(state))
    state = draw(states.simmim())
    more = {"encoder.rel_pos_bias.relative_position_index": torch.ones(17, 17, dtype=torch.int64)}
    same_bits(LAYOUTS["simmim"].read(state | more), LAYOUTS["simmim"].read(state))


# What is wrong with a file


def test_every_unknown_and_missing_name_is_in_one_sentence() -> None:
    state = draw(states.mae())
    for name in ("blocks.1.mlp.fc2.bias", "norm.weight", "decoder_blocks.0.norm1.weight"):
        del state[name]
    state |= {"teacher.weight": torch.ones(1), "blocks.0.attn.rope": torch.ones(1)}
    with pytest.raises(CheckpointError) as caught:
        LAYOUTS["mae"].read(state)
    words = str(caught.value)
    assert "2 unknown" in words
    assert "3 missing" in words
    for name in (
        "blocks.1.mlp.fc2.bias",
        "norm.weight",
        "decoder_blocks.0.norm1.weight",
        "teacher.weight",
        "attn.rope",
    ):
        assert name in words
    assert "\n" not in words


def test_unknown_names_are_dropped_on_demand_and_missing_ones_never() -> None:
    state = draw(states.mae())
    weights = LAYOUTS["mae"].read(state | {"teacher.weight": torch.ones(1)}, drop_unknown=True)
    same_bits(weights, LAYOUTS["mae"].read(state))
    del state["patch_embed.proj.bias"]
    with pytest.raises(CheckpointError, match=r"1 missing \(patch_embed.proj.bias\)"):
        LAYOUTS["mae"].read(state, drop_unknown=True)


def test_a_block_that_is_gone_is_missed() -> None:
    state = {name: value for name, value in draw(states.mae()).items() if not name.startswith("blocks.0.")}
    with pytest.raises(CheckpointError, match="12 missing"):
        LAYOUTS["mae"].read(state)


@EACH
def test_half_an_attention_bias_or_one_table_fewer_is_missed(kind: str) -> None:
    layout, shapes = STATES[kind]
    for name in shapes():
        if name.endswith(("q_bias", "qkv.bias", "fc1.weight")) or ("blocks" in name and name.endswith("gamma_1")):
            state = draw(shapes())
            del state[name]
            with pytest.raises(CheckpointError, match=r"missing|unknown"):
                LAYOUTS[layout].read(state)


def test_biases_of_q_and_v_of_two_shapes_are_named() -> None:
    state = draw(states.beit())
    state["blocks.0.attn.q_bias"] = state["blocks.0.attn.q_bias"][None]
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attn\.q_bias and .*v_bias are of shapes \[1, 24\] and"):
        detect(state)


@pytest.mark.parametrize("name", ["blocks.².norm.weight", "blocks.²0.x", "²"])
def test_digits_that_are_no_numbers_are_part_of_a_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"the nearest is mae, which lacks 2 of \d+: .*{re.escape(name)}"):
        detect(draw(states.mae()) | {name: torch.ones(1), "blocks.1.y": torch.ones(1)})


def test_no_layout_fits_and_the_nearest_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"nearest is beit, .* 1 of \d+: odd; dmjd convert with source=beit unknown=drop"
    ):
        detect(draw(states.beit()) | {"odd": torch.ones(1)})


@pytest.mark.parametrize(
    "name",
    ["register_tokens", "blocks.0.attn.rope", "rope.freqs", "storage_tokens", "blocks.1.ls1.gamma", "pos_embed_x"],
)
def test_a_name_on_which_features_depend_is_never_to_be_dropped(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"features depend on {re.escape(name)}") as caught:
        detect(draw(states.mae()) | {name: torch.ones(1)})
    assert "drop" not in str(caught.value)
    with pytest.raises(CheckpointError, match=f"features depend on {re.escape(name)}") as caught:
        LAYOUTS["mae"].read(draw(states.mae()) | {name: torch.ones(1)})
    assert "drop" not in str(caught.value)


@pytest.mark.parametrize(
    "prefix", ["backbone.", "encoder.model.", "encoder.encoder.", "visual.", "model.net.vit.", "trunk.f.", "encoder_q."]
)
def test_prefixes_that_no_layout_has_are_peeled(prefix: str) -> None:
    state = draw(states.timm_vit())
    beside = {"head.mlp.0.weight": torch.ones(1), "predictor.weight": torch.ones(1)}
    found, left_out = peel({prefix + name: value for name, value in state.items()} | beside)
    same_bits(LAYOUTS["ours" if "encoder" in prefix[8:] else "timm"].read(found), LAYOUTS["timm"].read(state))
    assert sorted(left_out) == sorted(beside)


def test_of_two_encoders_under_unknown_prefixes_none_is_chosen() -> None:
    state = draw(states.timm_vit())
    two = {f"{part}.{name}": value for part in ("one", "two") for name, value in state.items()}
    found, left_out = peel(two)
    same_bits(found, two)
    assert not left_out


@EACH
def test_a_state_that_a_layout_has_is_not_peeled(kind: str) -> None:
    state = draw(STATES[kind][1]())
    found, left_out = peel(state)
    same_bits(found, state)
    assert not left_out


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
def test_weights_that_are_not_finite_in_float32_are_named(value: float) -> None:
    state = draw(states.mae())
    state["blocks.1.norm1.bias"] = state["blocks.1.norm1.bias"].double()
    state["blocks.1.norm1.bias"][3] = value
    with pytest.raises(CheckpointError, match=r"NaN or infinity in blocks\.1\.norm1\.bias, .*nonfinite=keep"):
        LAYOUTS["mae"].read(state)
    kept = LAYOUTS["mae"].read(state, keep_nonfinite=True)["encoder.blocks.1.norm1.bias"]
    assert torch.equal(kept, state["blocks.1.norm1.bias"]) or value != value


def test_a_fine_tuned_swin_of_its_authors_is_read_and_written() -> None:
    """Its patch merging ends a layer, as in pre-training, and its names have no prefix."""
    pretrained = draw(states.simmim_swin())
    state = {name.removeprefix("encoder."): value for name, value in pretrained.items() if "encoder." in name}
    del state["mask_token"]
    state |= draw(states.layer("head", 5, 16))
    found, fitting = detect(state)
    assert fitting == ["simmim"]
    weights = found.read(state)
    expected = LAYOUTS["simmim"].read(pretrained)
    of_encoder = {name: value for name, value in weights.items() if name.startswith("encoder.")}
    same_bits(of_encoder, {name: expected[name] for name in of_encoder})
    assert weights.keys() - of_encoder.keys() == {"classifier.weight", "classifier.bias"}
    same_bits(LAYOUTS["simmim"].write(weights).state, state)


def test_what_the_encoder_needs_is_not_left_out() -> None:
    _, weights = read("beit")
    with pytest.raises(CheckpointError, match=r"layout of mae has no place for .*gamma_1 \(2\)"):
        LAYOUTS["mae"].write(weights)
    _, weights = read("dmjd")
    with pytest.raises(CheckpointError, match=r"layout of maskfeat has no place for encoder.blocks1"):
        LAYOUTS["maskfeat"].write(weights)


def test_what_only_pretraining_needs_is_left_out_and_named() -> None:
    _, weights = read("mae")
    written, left_out = LAYOUTS["timm"].write(weights)
    assert written.keys() == states.timm_vit().keys()
    assert set(left_out) == {name for name in weights if name.startswith(("decoder.", "head."))}


@pytest.mark.parametrize("target", ["simmim", "beit", "maskfeat"])
def test_a_head_goes_with_the_decoder_that_it_stands_on(target: str) -> None:
    """Else the file has a head of the decoder's width, which their models cannot load."""
    state, weights = read("mae")
    written, left_out = LAYOUTS[target].write(weights)
    assert {name for name in weights if name.startswith(("decoder.", "head."))} <= set(left_out)
    assert not [name for name, value in written.items() if torch.equal(value, state["decoder_pred.bias"])]


def test_simmims_head_is_of_pixels_and_another_is_left_out() -> None:
    _, weights = read("beit")
    written, left_out = LAYOUTS["simmim"].write(weights)
    assert set(left_out) == {"head.weight", "head.bias"}
    assert not [name for name in written if name.startswith("decoder.")]
    weights |= draw(states.layer("head", 3 * PATCH**2, DIM))
    written, left_out = LAYOUTS["simmim"].write(weights)
    assert not left_out
    assert written["decoder.0.weight"].shape == (3 * PATCH**2, DIM, 1, 1)


def test_a_summary_counts_what_differs_in_numbers_alone() -> None:
    names = [f"blocks.{index}.norm1.weight" for index in range(12)] + ["norm.weight"]
    assert summary(names) == "blocks.*.norm1.weight (12), norm.weight"


def test_a_summary_is_one_short_line() -> None:
    assert summary(["a\nb.weight", "\u202ec.\x1b[31m"]) == "\\u202ec.\\x1b[31m, a\\nb.weight"
    assert len(summary([f"{letter * 100_000}.weight" for letter in "abcdefgh"])) < 2000


def test_a_mask_token_without_a_head_is_the_encoders() -> None:
    plain = draw(states.vit(mask_token=True) | states.layer("norm", DIM))
    layout, _ = detect(plain)
    assert torch.equal(layout.read(plain)["encoder.mask_token"], plain["mask_token"])


# What models compute


IMAGES = torch.randn(2, 3, GRID * PATCH, GRID * PATCH, generator=torch.Generator().manual_seed(1))


def encoder_of(weights: State, **options: Any) -> ViTEncoder:
    encoder = ViTEncoder(
        image_size=(GRID * PATCH, GRID * PATCH),
        patch_size=PATCH,
        in_chans=3,
        embed_dim=DIM,
        depth=DEPTH,
        num_heads=HEADS,
        mlp_ratio=HIDDEN / DIM,
        **options,
    )
    ours = {name.removeprefix("encoder."): value for name, value in weights.items() if name.startswith("encoder.")}
    encoder.positions = ours.pop("pos_embed")[0, 1:]
    encoder.load_state_dict(ours, strict=True)
    return encoder.eval()


def with_free_cls(state: State) -> State:
    """Ours adds no position to the class token."""
    state["pos_embed"][:, :1] = 0
    return state


def timm_model(name: str, state: State, **options: Any) -> Any:
    model = timm.create_model(
        name,
        img_size=GRID * PATCH,
        patch_size=PATCH,
        embed_dim=DIM,
        depth=DEPTH,
        num_heads=HEADS,
        mlp_ratio=HIDDEN / DIM,
        num_classes=0,
        **options,
    )
    model.load_state_dict(state, strict=True)
    return model.eval()


def separate(name: str, value: Tensor) -> dict[str, Tensor]:
    """A fused projection as transformers keeps it."""
    leaf = name.rpartition(".")[2]
    stem = name.removesuffix(f"qkv.{leaf}")
    return {f"{stem}{letter}_proj.{leaf}": part for letter, part in zip("qkv", value.chunk(3), strict=True)}


def for_transformers(state: State) -> State:
    """Official names of MAE and BEiT, encoder alone, in transformers'; written here apart from the layouts."""
    renamed = (
        ("patch_embed.proj.", "embeddings.patch_embeddings.projection."),
        ("pos_embed", "embeddings.position_embeddings"),
        ("cls_token", "embeddings.cls_token"),
        ("mask_token", "embeddings.mask_token"),
        ("rel_pos_bias.", "shared_position_bias."),
        ("blocks.", "layers."),
        (".gamma_", ".lambda_"),
        (".attn.proj.", ".attention.o_proj."),
        (".attn.qkv.", ".attention.qkv."),
        (".attn.relative_position_bias_table", ".relative_position_bias.relative_position_bias_table"),
        (".attn.q_bias", ".attention.q_proj.bias"),
        (".attn.v_bias", ".attention.v_proj.bias"),
        (".norm1.", ".layernorm_before."),
        (".norm2.", ".layernorm_after."),
    )
    theirs: State = {}
    for name, value in state.items():
        for old, new in renamed:
            name = name.replace(old, new)
        theirs |= separate(name, value) if ".qkv." in name else {name: value}
    return theirs


SIZES: dict[str, Any] = {
    "hidden_size": DIM,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "image_size": GRID * PATCH,
    "patch_size": PATCH,
    "hidden_dropout_prob": 0.0,
    "layer_norm_eps": 1e-6,
}


def beit_of_transformers(state: State) -> Tensor:
    """What comes before the last norm, which BeitModel has no place for."""
    shared = "rel_pos_bias.relative_position_bias_table" in state
    relative = any(name.endswith("attn.relative_position_bias_table") for name in state)
    config = BeitConfig(
        **SIZES,
        use_mask_token="mask_token" in state,
        use_absolute_position_embeddings="pos_embed" in state,
        use_shared_relative_position_bias=shared,
        use_relative_position_bias=relative,
        layer_scale_init_value=0.1 if "blocks.0.gamma_1" in state else 0.0,
    )
    model = BeitModel(config, add_pooling_layer=False).eval()
    kept = {
        name: value for name, value in state.items() if not name.startswith(("norm.", "fc_norm.", "head.", "lm_head."))
    }
    model.load_state_dict(for_transformers(kept), strict=True)
    with torch.no_grad():
        return model(IMAGES).last_hidden_state


def agree(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mae", "mmpretrain_mae"])
def test_mae_is_computed_alike_by_transformers_timm_and_us(kind: str) -> None:
    _, weights = read(kind)
    weights["encoder.pos_embed"][:, :1] = 0
    official = LAYOUTS["mae"].write(weights).state
    encoder = {name: value for name, value in official.items() if "decoder" not in name and name != "mask_token"}
    oracle = ViTMAEModel(ViTMAEConfig(**SIZES, mask_ratio=0.0)).eval()
    theirs = {
        name.replace("norm.", "layernorm.") if name.startswith("norm.") else name: value
        for name, value in encoder.items()
    }
    oracle.load_state_dict(for_transformers(theirs), strict=True)
    noise = torch.arange(GRID * GRID).float().expand(2, -1)  # tokens stay in their order
    expected = oracle(IMAGES, noise=noise).last_hidden_state
    agree(encoder_of(weights)(IMAGES), expected)
    agree(timm_model("vit_base_patch16_224", LAYOUTS["timm"].write(weights).state).forward_features(IMAGES), expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["beit", "mmpretrain_beit", "simmim"])
def test_beit_is_computed_alike_by_transformers_and_timm(kind: str) -> None:
    _, weights = read(kind)
    last = {
        name.removeprefix("encoder.norm."): weights.pop(name)
        for name in list(weights)
        if name.startswith("encoder.norm.")
    }
    expected = beit_of_transformers(LAYOUTS["beit"].write(weights).state)
    per_block = expand_bias_table(weights)
    normed = per_block | {f"encoder.norm.{leaf}": value for leaf, value in last.items()}
    model = timm_model(
        "beit_base_patch16_224", LAYOUTS["timm"].write(normed).state, global_pool="token", init_values=0.1
    )
    agree(model.forward_features(IMAGES), F.layer_norm(expected, (DIM,), last["weight"], last["bias"], 1e-6))


@torch.no_grad()
def test_beits_public_variant_has_positions_alone_and_fits_a_plain_vit() -> None:
    state, weights = read("beit_absolute")
    with_free_cls(state)
    weights = LAYOUTS["beit"].read(state)
    expected = F.layer_norm(beit_of_transformers(state), (DIM,), state["norm.weight"], state["norm.bias"], 1e-6)
    agree(encoder_of(weights, masked_tokens="mask_token")(IMAGES), expected)
    agree(timm_model("vit_base_patch16_224", LAYOUTS["timm"].write(weights).state).forward_features(IMAGES), expected)


@torch.no_grad()
def test_a_bias_of_keys_is_dropped_without_a_change_and_said() -> None:
    _, weights = read("mae")
    plain = LAYOUTS["timm"].write(weights).state
    written, left_out = LAYOUTS["beit"].write(weights)
    assert sum("of k" in name for name in left_out) == DEPTH
    back = LAYOUTS["timm"].write(LAYOUTS["beit"].read(written)).state
    assert not torch.equal(back["blocks.0.attn.qkv.bias"], plain["blocks.0.attn.qkv.bias"])
    agree(
        timm_model("vit_base_patch16_224", back).forward_features(IMAGES),
        timm_model("vit_base_patch16_224", plain).forward_features(IMAGES),
    )


@torch.no_grad()
def test_simmims_swin_is_timms() -> None:
    state, weights = read("simmim_swin")
    model: Any = timm.create_model(
        "swin_base_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=8,
        depths=(1, 1),
        num_heads=(1, 2),
        num_classes=0,
    ).eval()
    model.load_state_dict(LAYOUTS["timm"].write(weights).state, strict=True)
    # timm itself reads the files of Swin's authors, whose merging ends a layer as SimMIM's does.
    other: Any = timm.create_model(
        "swin_base_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=8,
        depths=(1, 1),
        num_heads=(1, 2),
        num_classes=0,
    ).eval()
    theirs = {name.removeprefix("encoder."): value for name, value in state.items() if name.startswith("encoder.")}
    del theirs["mask_token"]
    filtered: State = checkpoint_filter_fn(theirs, other)
    other.load_state_dict(filtered, strict=True)
    assert torch.equal(model.forward_features(IMAGES), other.forward_features(IMAGES))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["simmim", "simmim_swin"])
def test_simmims_head_predicts_pixels_in_our_order(kind: str) -> None:
    state, weights = read(kind)
    width = state["decoder.0.weight"].shape[1]
    tokens = torch.randn(2, 9, width)
    stride = 8
    convolved = F.conv2d(
        tokens.transpose(1, 2).unflatten(2, (3, 3)), state["decoder.0.weight"], state["decoder.0.bias"]
    )
    image = F.pixel_shuffle(convolved, stride)  # [2, 3, 24, 24]
    expected = (
        image.unflatten(2, (3, stride)).unflatten(4, (3, stride)).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    )
    agree(F.linear(tokens, weights["head.weight"], weights["head.bias"]), expected)


@pytest.mark.parametrize("number", ["999999999", "9" * 5000])
def test_a_block_of_a_huge_number_makes_no_list_of_those_before_it(number: str) -> None:
    names = [f"encoder.blocks.{number}.norm1.weight", "encoder.patch_embed.proj.weight"]
    assert 0 < len(missing(names)) < 100
