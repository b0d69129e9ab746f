from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import dmjd.train.loop as loop
from dmjd.builders import build_mask_spec, build_objective, build_schedule, peak_lr, token_grid
from dmjd.builders.step import build_step
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError
from tests.compare import rows

BACKBONE = ("backbone.patch_size=4", "backbone.embed_dim=32", "backbone.depth=1", "backbone.num_heads=4")
DECODER = ("method.decoder.dim=32", "method.decoder.depth=1", "method.decoder.num_heads=2")
SMALL = ("experiment=demo", "data=digits", "engine.device=cpu", *BACKBONE, *DECODER)
CONVVIT = (  # after SMALL
    "backbone.name=convvit",
    "backbone.patch_size=16",
    "backbone.class_token=false",
    "backbone.conv_stages={embed_dims:[8,12],depths:[1,2]}",
    "data.image_size=[64,96]",
)


def configure(*words: str) -> PretrainConfig:
    config: PretrainConfig = compose("pretrain", words)
    return config


def build(config: PretrainConfig) -> None:
    """Everything that :mod:`dmjd.builders` makes of a configuration."""
    step = build_step(config)
    spec, grid = step.prepare.mask_spec, step.prepare.grid
    assert build_schedule(config, peak_lr(config, spec, grid), steps_per_epoch=10)(5) > 0
    assert step.engine.objective.model.encoder.grid == grid


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large"])
def test_backbones_are_the_vits_of_that_name(size: str) -> None:
    config = configure("method=mae", f"backbone=vit_{size}")
    with torch.device("meta"):
        ours: Any = build_objective(config, 768).model.encoder
        theirs: Any = timm.create_model(f"vit_{size}_patch16_224", num_classes=0)
    shapes = {name: value.shape for name, value in theirs.state_dict().items() if name != "pos_embed"}
    assert {name: value.shape for name, value in ours.state_dict().items()} == shapes
    assert ours.blocks[0].attn.num_heads == theirs.blocks[0].attn.num_heads


def test_the_decoder_is_maes() -> None:
    with torch.device("meta"):
        model = build_objective(configure("experiment=mae_vit_base"), 768).model
    # MAE ViT-B is published with 111,907,840 parameters, of which both tables of positions were frozen parameters.
    positions = 197 * 768 + 197 * 512
    assert sum(parameter.numel() for parameter in model.parameters()) == 111_907_840 - positions


@pytest.mark.parametrize("words", [(), ("method=mae",), ("target=pixels", "method.visible_branch.enabled=false")])
@pytest.mark.parametrize("backbone", [(), CONVVIT], ids=["vit", "convvit"])
def test_methods_can_be_built(words: tuple[str, ...], backbone: tuple[str, ...]) -> None:
    build(configure(*SMALL, *words, *backbone))


def test_a_convvit_has_the_stages_that_the_configuration_names() -> None:
    words = ("backbone.mlp_ratio=3", "backbone.conv_stages.mlp_ratios=[2,5]", "backbone.multi_scale=false")
    encoder: Any = build_objective(configure(*SMALL, *CONVVIT, *words), 36).model.encoder
    assert encoder.embed_dims == (8, 12, 32)
    assert [len(blocks) for blocks in (encoder.blocks1, encoder.blocks2, encoder.blocks3)] == [1, 2, 1]
    widths = [blocks[0].mlp.fc1.weight.shape[0] for blocks in (encoder.blocks1, encoder.blocks2, encoder.blocks3)]
    assert widths == [16, 60, 96]
    assert encoder.blocks3[0].attn.num_heads == 4
    assert encoder.stage1_output_decode is None
    assert encoder.grid == (4, 6)


def test_a_linear_head_reads_mask_tokens() -> None:
    config = configure(*SMALL, "method.decoder.name=linear", "backbone.masked_tokens=mask_token")
    build(config)
    model = build_objective(config, 36).model
    assert model.decoder is None
    assert model.head.in_features == model.encoder.embed_dim


def test_initialisation_depends_on_the_seed_alone() -> None:
    torch.manual_seed(123)
    first, again, other = (build_objective(configure(*SMALL, f"seed={seed}"), 36).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.head.weight"], other["model.head.weight"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("optim.base_lr=6e-4",), 2.0e-3),
        (("optim.base_lr=6e-4", "optim.lr_rates=exact"), 1.96e-3),
        (("optim.base_lr=6e-4", "optim.lr_rule=classic"), 2.4e-3),
        (("optim.base_lr=6e-4", "optim.lr_rule=classic", "optim.lr_rates=exact"), 2.4e-3),
        (("optim.base_lr=6e-4", "engine.grad_accum_steps=4"), 2.0e-3),
        # 40 of the 49 blocks supervised: Eq. 4 with m_pred = 40/49, asked for as .81.
        (("optim.base_lr=6e-4", "mask.pred_ratio=.81"), 6e-4 * 512 * 0.81 / 0.6 / 256),
        (("optim.base_lr=6e-4", "mask.pred_ratio=.81", "optim.lr_rates=exact"), 6e-4 * 2 * 40 / 30),
        (("experiment=mae_vit_base",), 2.4e-3),
        (("experiment=mae_vit_base", "optim.lr_rule=classic"), 2.4e-3),
        (("experiment=mae_dm_vit_base",), 1.5e-4 * 2 / 0.6),
    ],
)
def test_the_learning_rate_is_the_rules(words: tuple[str, ...], expected: float) -> None:
    config = configure("experiment=dmjd_vit_base_hog", *words)
    grid = token_grid(config)
    assert peak_lr(config, build_mask_spec(config.mask, grid), grid) == pytest.approx(expected, rel=1e-12)


IMPOSSIBLE = {
    "backbone.patch_size=5": ["data.image_size", "32x32", "backbone.patch_size=5"],
    "data.image_size=[32,30]": ["data.image_size", "32x30", "backbone.patch_size=4"],
    "data.image_size=[32,32,3]": ["data.image_size", "2 integers", "[32,32,3]"],
    "data.image_size=[0,32]": ["data.image_size", "at least 1"],
    "mask.block=[3,3]": ["mask", "block 3x3", "8x8"],
    "mask.block=[2,2,2]": ["mask.block", "2 integers", "[2,2,2]"],
    "mask.block=[0,2]": ["mask.block", "at least 1"],
    "mask.mask_ratio=1.5": ["mask.mask_ratio", "above 0 and below 1", "1.5"],
    "mask.mask_ratio=nan": ["mask", "mask_ratio", "nan"],
    "mask.mask_ratio=0.99": ["mask", "mask_ratio=0.99", "16 of 16", "between 0.0625 and 0.9375"],
    "mask.pred_ratio=0.1": ["mask", "pred_ratio=0.1", "between 0.6875 and 1"],
    "mask.pred_ratio=2": ["mask", "pred_ratio", "at most 1"],
    "mask.count=16": ["mask", "count=16", "between 1 and 15"],
    "mask.loss_ratio=0.3": ["mask", "loss_ratio", "views=1"],
    "mask.regulation=complementary mask.views=3": ["mask", "2 <= views <= 2", "views=3"],
    "mask=beit mask.views=2 mask.regulation=complementary": ["mask", "pattern='beit'", "'disjoint' or 'none'"],
    "mask.regulation=none mask.pred_ratio=.8": ["mask", "pred_ratio", "disjoint"],
    "target.norm=patch": ["target.norm", "layernorm, l2, none", "target.name=hog", "'patch'"],
    "target=pixels target.norm=l2": ["target.norm", "patch, none", "target.name=pixels", "'l2'"],
    "target.cell=3": ["target", "cell", "divisor of patch 4", "3"],
    "target=pixels backbone.patch_size=1 mask=uniform": ["target", "unbiased"],
    "data.mean=[0.1,0.2]": ["data.mean", "1 channels", "[0.1, 0.2]"],
    "data.std=[]": ["data.std", "1 channels", "[]"],
    "data.std=[0]": ["data.std", "above 0", "got 0"],
    "data.channels=3": ["data.mean", "3 channels", "[0.219]"],
    "backbone.num_heads=5": ["backbone.embed_dim=32", "num_heads=5"],
    "backbone.embed_dim=34 backbone.num_heads=2": ["backbone", "multiple of 4", "34"],
    "method.decoder.num_heads=5": ["method.decoder.dim=32", "num_heads=5"],
    "method.decoder.dim=30": ["method.decoder", "multiple of 4", "30"],
    "backbone.masked_tokens=mask_token": ["backbone", "method.decoder", "masked_tokens='drop'"],
    "method.decoder.name=linear": ["backbone", "method.decoder", "masked_tokens='mask_token'"],
    "backbone.positions=relative": ["backbone", "positions='relative'", "block='beit'", "masked_tokens='mask_token'"],
    "backbone.layer_scale=.1": ["backbone", "layer_scale=0.1", "block='beit'"],
    "method.mim_loss=cross_entropy": ["target.name=hog", "vectors", "method.mim_loss", "cosine", "cross_entropy"],
    "target=dvae": ["target.name=dvae", "codes", "method.mim_loss must be cross_entropy", "mse"],
    "target=dvae method.mim_loss=cross_entropy": ["target.name=dvae", "method.visible_branch.enabled=false"],
    "method=beit target.norm=l2 mask.count=null data.jitter=0": ["target.norm", "none", "target.name=dvae", "'l2'"],
    "method=beit data.jitter=0 mask.count=null": ["target.name=dvae", "colour images", "data.channels=1"],
    "target=clip": ["target.name=clip", "colour images", "data.channels=1"],
    "target=teacher": ["target.name=teacher", "ema_decay"],
    "target=teacher ema_decay=.9": ["target.layers=6", "backbone.depth=1"],
    "target=teacher ema_decay=.9 target.layers=1 engine=fsdp": ["target.name=teacher", "engine=single or ddp", "fsdp"],
    "data.second_size=[8,8]": ["data.second_size", "null", "target.name=hog"],
    "data.second_size=[8,8,8]": ["data.second_size", "2 integers"],
    "data.jitter=.4": ["data.jitter", "data.channels=3", "1"],
    "optim.schedule=multistep": ["optim.milestones", "epochs=1", "[]"],
    "optim.schedule=multistep optim.milestones=[3]": ["optim.milestones", "epochs=1", "[3.0]"],
    "optim.milestones=[3]": ["optim.milestones", "optim.schedule=multistep", "cosine"],
}

COLOUR = ("data.channels=3", "data.mean=[.5,.5,.5]", "data.std=[.2,.2,.2]")
IMPOSSIBLE_IN_COLOUR = {
    "method=beit mask.count=null": [
        "target.name=dvae",
        "8x8 tokens",
        "64x64 pixels, not 112x112",
        "data.second_size=[64,64]",
    ],
    "method=beit data.second_size=[64,64] mask.count=null": ["target.weights must name a file", "DALL-E", "torch.save"],
    "target=vqkd method.mim_loss=cross_entropy method.visible_branch.enabled=false": ["target.weights", "VQ-KD"],
    "target=clip": ["target.weights must name a file", "open_clip"],
    "target=clip target.weights=/nowhere/clip.pt": ["target.weights=/nowhere/clip.pt is not a file", "open_clip"],
    "target=clip target.model=ViT-Z": ["target.model=ViT-Z", "open_clip.list_models()"],
    "backbone=swin_base backbone.patch_size=32 target=teacher ema_decay=.9 mask.block=[1,1] data.image_size=[64,64]": [
        "target.name=teacher",
        "backbone.name=vit or convvit",
    ],
    "backbone=swin_base backbone.patch_size=32": ["mask", "block 2x2", "1x1"],
}


IMPOSSIBLE_FOR_CONVVIT = {
    "backbone.patch_size=8": ["backbone.patch_size must be 16", "backbone.name=convvit", "8"],
    "backbone.class_token=true": ["backbone.class_token must be False", "backbone.name=convvit", "True"],
    "backbone.masked_tokens=mask_token": ["backbone.masked_tokens must be drop", "backbone.name=convvit", "mask_token"],
    "data.image_size=[64,72]": ["data.image_size", "64x72", "backbone.patch_size=16"],
    "data.image_size=[64,48]": ["mask", "block 2x2", "4x3"],
    "data.image_size=[32,32] mask.mask_ratio=.5": ["mask", "grid", "at least 2 units", "(2, 2) in units of (2, 2)"],
    "mask.mask_ratio=.99": ["mask", "mask_ratio=0.99", "6 of 6"],
    "backbone.conv_stages.embed_dims=[8]": ["backbone.conv_stages.embed_dims", "2 integers", "[8]"],
    "backbone.conv_stages.depths=[1,2,3]": ["backbone.conv_stages.depths", "2 integers", "[1,2,3]"],
    "backbone.conv_stages.depths=[-1,2]": ["backbone.conv_stages.depths", "at least 0", "-1"],
    "backbone.conv_stages.mlp_ratios=[4,0]": ["backbone.conv_stages.mlp_ratios", "above 0", "0"],
    "backbone.conv_stages.embed_dims=[8,0]": ["backbone.conv_stages.embed_dims", "above 0", "0"],
    "method.decoder.name=linear": ["backbone", "method.decoder", "masked_tokens='mask_token'"],
    "backbone.positions=learned": ["backbone.positions must be sincos", "backbone.name=convvit", "learned"],
    "backbone.block=beit": ["backbone.block must be plain", "backbone.name=convvit", "beit"],
}


@pytest.mark.parametrize(("words", "parts"), IMPOSSIBLE.items(), ids=list(IMPOSSIBLE))
def test_an_impossible_combination_is_answered_by_one_sentence(words: str, parts: list[str]) -> None:
    assert_refused((*SMALL, *words.split()), parts)


@pytest.mark.parametrize(("words", "parts"), IMPOSSIBLE_IN_COLOUR.items(), ids=list(IMPOSSIBLE_IN_COLOUR))
def test_an_impossible_target_is_answered_by_one_sentence(words: str, parts: list[str]) -> None:
    assert_refused((*SMALL, *COLOUR, *words.split()), parts)


@pytest.mark.parametrize(("words", "parts"), IMPOSSIBLE_FOR_CONVVIT.items(), ids=list(IMPOSSIBLE_FOR_CONVVIT))
def test_an_impossible_convvit_is_answered_by_one_sentence(words: str, parts: list[str]) -> None:
    assert_refused((*SMALL, *CONVVIT, *words.split()), parts)


def assert_refused(words: tuple[str, ...], parts: list[str]) -> None:
    # A value wrong on its own is refused while composing, a combination while building.
    with pytest.raises(ConfigError) as caught:
        build(configure(*words))
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence, f"{sentence!r} lacks {part!r}"


@pytest.mark.parametrize("experiment", ["dmjd_convvit_base_hog", "convmae_base"])
def test_a_tiny_convvit_learns(
    tmp_path: Path,
    tiny: Callable[..., list[str]],
    dmjd: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    experiment: str,
) -> None:
    monkeypatch.setattr(loop, "write_pictures", lambda *arguments: None)  # they take longer than the run
    words = ("data.image_size=[64,64]", "batch_size=64", "log_every=7", "optim.base_lr=3e-2", "backbone.drop_path=0.1")
    code, _, errors = dmjd("pretrain", *tiny(tmp_path / "run", f"experiment={experiment}", *CONVVIT, *words))
    assert code == 0, errors
    log = rows(tmp_path / "run")
    assert len(log) > 2
    assert log[-1]["loss"] < 0.9 * log[0]["loss"]
