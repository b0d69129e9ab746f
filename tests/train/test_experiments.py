"""Every row of the paper's tables: its size as built, and one step of a copy so small that all take a minute."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch

from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.masking import measured_rates
from dmjd.parallel.build import build_engine
from dmjd.resources import configs_dir
from dmjd.targets import TeacherTarget
from dmjd.targets.codebook import DVaeEncoder
from dmjd.train.build import (
    build_mask_spec,
    build_objective,
    build_schedule,
    build_tokenizer,
    check_target,
    target_dim,
    token_grid,
)
from dmjd.train.ema import EncoderEma
from dmjd.train.preparation import Preparation
from dmjd.train.teacher import EmaTeacher

EXPERIMENTS = sorted(path.stem for path in (configs_dir() / "experiment").glob("*.yaml"))

MAE_B, MAE_L = 111_655_680, 329_239_296
CONVMAE_B = 114_790_528
BEIT_B, BEIT_L = 91_965_776, 311_534_016
SIMMIM_B, SIMMIM_SWIN_B = 86_256_720, 89_874_104
MASKFEAT_B, MASKFEAT_L = 85_882_476, 303_413_356
DMJD_B, DMJD_L, DMJD_B_DEPTH2 = 135_635_032, 374_892_888, 104_376_408 - 196 * (768 + 512)
"""Trainable parameters of the official models, measured on them, without their frozen tables of positions."""

PIXELS, HOG, CLIP = 768, 108, 512

VDB = 768 * 512 + 512 + 2 * (512 * 512 + 512) + 2 * 2 * 512 + 512 * 108 + 108
LINEAR_VDB = 768 * 512 + 512 + 512 * 108 + 108


def head(width: int, new: int, old: int) -> int:
    """What another target adds to a head on ``width`` features."""
    return (width + 1) * (new - old)


SIZES = {
    "mae_vit_base": MAE_B,
    "mae_vit_base_1600": MAE_B,
    "mae_vit_large": MAE_L,
    "mae_dm_vit_base": MAE_B,
    "mae_dm_vit_base_uniform": MAE_B,
    "mae_dm_vit_base_lr_classic": MAE_B,
    "mae_dm_vit_base_lr_adaptive": MAE_B,
    "mae_dm_vit_base_pred80": MAE_B,
    "mae_dm_vit_base_pred90": MAE_B,
    "mae_dm_vit_base_pred95": MAE_B,
    "mae_dm_vit_large": MAE_L,
    "beit_vit_base": BEIT_B,
    "beit_vit_base_absolute": BEIT_B + 197 * 768 - 732 * 12 - 12 * 2 * 768,
    "beit_vit_large": BEIT_L,
    "beit_dm_vit_base": BEIT_B,
    "simmim_vit_base": SIMMIM_B,
    "simmim_dm_vit_base": SIMMIM_B,
    "simmim_swin_base": SIMMIM_SWIN_B,
    "simmim_dm_swin_base": SIMMIM_SWIN_B,
    "maskfeat_token_vit_base": MASKFEAT_B,
    "maskfeat_token_vit_large": MASKFEAT_L,
    "maskfeat_token_dm_vit_base": MASKFEAT_B,
    "maskfeat_vit_base": MAE_B + head(512, HOG, PIXELS),
    "maskfeat_dm_vit_base": MAE_B + head(512, HOG, PIXELS),
    "maskfeat_dm_vit_large": MAE_L + head(512, HOG, PIXELS),
    "convmae_base": CONVMAE_B,
    "convmae_dm_base": CONVMAE_B,
    "convmae_base_clip": CONVMAE_B + head(512, CLIP, PIXELS),
    "convmae_large": None,  # its code is not published
    "dmjd_convvit_base_hog": DMJD_B,
    "dmjd_convvit_base_hog_paper": DMJD_B,
    "dmjd_convvit_large_hog": DMJD_L,
    "dmjd_convvit_base_clip": DMJD_B + 2 * head(512, CLIP, HOG),
    "dmjd_convvit_large_clip": DMJD_L + 2 * head(512, CLIP, HOG),
    "dmjd_vit_base_hog": MAE_B - 768 + head(512, HOG, PIXELS) + VDB,
    "dmjd_vit_base_hog_800": MAE_B - 768 + head(512, HOG, PIXELS) + VDB,
    "dmjd_vit_base_teacher": MAE_B - 768 + VDB + head(512, 768, HOG),
    "mvp_vit_base": BEIT_B + head(768, CLIP, 8192),
    "data2vec_vit_base": BEIT_B + head(768, 768, 8192),
    "jd_target_rgb": DMJD_B + 2 * head(512, PIXELS, HOG),
    "jd_target_rgb_norm": DMJD_B + 2 * head(512, PIXELS, HOG),
    "jd_target_hog_l2": DMJD_B,
    "jd_target_hog": DMJD_B,
    "jd_target_clip": DMJD_B + 2 * head(512, CLIP, HOG),
    "jd_depth2_none": DMJD_B_DEPTH2 - VDB,
    "jd_depth2_linear": DMJD_B_DEPTH2 - VDB + LINEAR_VDB,
    "jd_depth2": DMJD_B_DEPTH2,
    "jd_depth4": DMJD_B_DEPTH2 + (DMJD_B - DMJD_B_DEPTH2) // 3,
    "components_none": DMJD_B - VDB,
    "components_dm": DMJD_B - VDB,
    "components_jd": DMJD_B,
    "demo": None,
}

EFFECTIVE_EPOCHS = {
    **dict.fromkeys(("mae_vit_base_1600", "mae_vit_large", "mae_dm_vit_base_uniform", "maskfeat_vit_base"), 1600),
    **dict.fromkeys(("maskfeat_token_vit_base", "maskfeat_token_vit_large", "convmae_base"), 1600),
    **dict.fromkeys(("dmjd_vit_base_hog_800",), 1600),
    **{name: 200 for name in EXPERIMENTS if name.startswith("mae_dm_vit_base_") and name[-7:] != "uniform"},
    **{name: 100 for name in EXPERIMENTS if name.startswith(("jd_", "components_"))},
    **dict.fromkeys(("convmae_base_clip", "dmjd_convvit_base_clip", "dmjd_convvit_large_clip"), 400),
    "beit_dm_vit_base": 600,
    "mvp_vit_base": 300,
    "demo": 2,
}
"""ETE by the paper; 800 for all others."""

PREDICTED = {"beit_dm_vit_base": 150 / 196}
"""m_pred of two views where it is not 1."""


def configure(experiment: str) -> PretrainConfig:
    config: PretrainConfig = compose("pretrain", [f"experiment={experiment}"])
    return config


def test_every_experiment_has_its_row() -> None:
    assert sorted(SIZES) == EXPERIMENTS


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_is_the_published_model(experiment: str) -> None:
    config = configure(experiment)
    grid = token_grid(config)
    spec = build_mask_spec(config.mask, grid)
    check_target(config)
    with torch.device("meta"):
        model = build_objective(config, target_dim(config)).model
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert SIZES[experiment] in (None, trainable)
    assert model.encoder.grid == grid
    assert config.run == f"runs/{experiment}"
    assert spec.effective_epochs(config.epochs) == EFFECTIVE_EPOCHS.get(experiment, 800)
    if config.mask.views == 2:
        rate = config.mask.pred_ratio
        expected = PREDICTED.get(experiment, 1.0) if rate is None else round(rate * 196) / 196
        assert spec.true_rates(grid).m_pred == pytest.approx(expected)
    schedule = build_schedule(config, spec, grid, steps_per_epoch=10)
    assert 0 <= schedule(0) <= schedule(round(10 * config.optim.warmup_epochs) + 1)


def test_learning_rates_are_the_published_ones() -> None:
    published = {
        "mae_vit_base": 2.4e-3,
        "beit_vit_base": 1.5e-3,
        "simmim_vit_base": 4e-4,
        "maskfeat_token_vit_base": 1.6e-3,
        "data2vec_vit_base": 2e-3,
        "dmjd_convvit_base_hog": 2.0e-3,
    }
    for experiment, rate in published.items():
        config = configure(experiment)
        grid = token_grid(config)
        schedule = build_schedule(config, build_mask_spec(config.mask, grid), grid, steps_per_epoch=10)
        assert schedule(round(10 * config.optim.warmup_epochs)) == pytest.approx(rate), experiment


TINY_CLIP = {
    "embed_dim": 20,
    "vision_cfg": {"image_size": 224, "layers": 2, "width": 64, "patch_size": 16, "head_width": 32},
    "text_cfg": {"context_length": 8, "vocab_size": 16, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Target name -> a file of weights for a network of the right kind, tiny and random."""
    folder: Path = tmp_path_factory.mktemp("weights")
    (folder / "tiny-clip.json").write_text(json.dumps(TINY_CLIP))
    open_clip.add_model_config(folder / "tiny-clip.json")
    torch.manual_seed(0)
    torch.save(open_clip.create_model("tiny-clip").state_dict(), folder / "clip.pt")
    dvae = DVaeEncoder(codes=32, width=8, blocks=1)
    for parameter in dvae.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.save(dvae.state_dict(), folder / "dvae.pt")
    return {"clip": str(folder / "clip.pt"), "dvae": str(folder / "dvae.pt")}


def shrink(config: PretrainConfig, weights: dict[str, str]) -> PretrainConfig:
    """The same experiment, narrow and shallow; images and with them masks stay as they are."""
    stages = replace(config.backbone.conv_stages, embed_dims=[4, 8], depths=[1, 1], mlp_ratios=[2.0, 2.0])
    windows = replace(config.backbone.windows, depths=[1, 1, 2, 1], num_heads=[1, 1, 2, 2])
    backbone = replace(config.backbone, embed_dim=32, depth=2, num_heads=2, conv_stages=stages, windows=windows)
    decoder = replace(config.method.decoder, dim=16, depth=1, num_heads=2)
    branch = replace(config.method.visible_branch, width=16)
    target = replace(
        config.target, weights=weights.get(config.target.name), model="tiny-clip", dim=20, codes=32, layers=2
    )
    engine = replace(config.engine, device="cpu")
    method = replace(config.method, decoder=decoder, visible_branch=branch)
    return replace(config, backbone=backbone, method=method, target=target, engine=engine)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_shrunken_copy_takes_a_step(experiment: str, weights: dict[str, str]) -> None:
    config = shrink(configure(experiment), weights)
    data, grid = config.data, token_grid(config)
    spec, tokenizer = build_mask_spec(config.mask, grid), build_tokenizer(config)
    engine = build_engine(build_objective(config, target_dim(config)), config.engine, config.optim)
    model = engine.objective.model
    if isinstance(tokenizer, TeacherTarget):
        assert config.ema_decay is not None
        ema = EncoderEma(engine.local_shards(), config.ema_decay)
        tokenizer.teacher = EmaTeacher(model.encoder, ema, config.target.layers)
    prepare = Preparation(
        spec,
        grid,
        tokenizer,
        tuple(data.mean),
        tuple(data.std),
        flip=data.flip,
        seed=0,
        depth=len(model.encoder.blocks),
        drop_path=config.backbone.drop_path,
        jitter=data.jitter,
    )
    generator = torch.Generator().manual_seed(0)

    def crops(size: list[int]) -> torch.Tensor:
        return torch.randint(0, 256, (2, *size, data.channels), dtype=torch.uint8, generator=generator)

    second = {} if data.second_size is None else {"second": crops(data.second_size)}
    batch = Batch(crops(data.image_size), torch.arange(2), torch.zeros(2, dtype=torch.int64), **second)
    prepared = prepare(batch, epoch=0)
    wide = 1 if tokenizer.codes else target_dim(config)
    assert prepared.targets.shape == (2, grid[0] * grid[1], wide)
    rates, expected = measured_rates(prepared.masked_views), spec.true_rates(grid)
    assert rates.tolist() == pytest.approx([expected.m_corr, expected.m_pred])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with engine.micro_batch(last=True):
        losses = engine.module(*prepared.inputs)
        engine.backward(losses.total)
    assert losses.total.isfinite()
    if tokenizer.codes:  # of small random weights, nearly uniform over the codes
        assert losses.masked.item() == pytest.approx(math.log(32), rel=0.2)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} takes no part"
    assert engine.step(1e-2, config.optim.weight_decay).applied == 1
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert all(moved)
