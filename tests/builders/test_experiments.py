"""Every row of the paper's tables: its size as built, and one step of a copy so small that all take a minute."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from dmjd.builders import (
    build_mask_spec,
    build_objective,
    build_schedule,
    check_target,
    peak_lr,
    target_dim,
    token_grid,
)
from dmjd.builders.schedules import warmup_steps
from dmjd.builders.step import build_step
from dmjd.compose import compose
from dmjd.config import PretrainConfig
from dmjd.resources import configs_dir
from tests.train.shrunken import CODES, configure, gradient, shrink, smooth_batch, write_clip, write_dvae

DOCS = Path(__file__).parents[2] / "docs"
EXPERIMENTS = sorted(path.stem for path in (configs_dir() / "experiment").glob("*.yaml"))

MAE_B, MAE_L = 111_655_680, 329_239_296
MAE_H = 657_074_508 - (16 * 16 + 1) * (1280 + 512)
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
    "mae_vit_huge": MAE_H,
    "mae_vit_base_100": MAE_B,
    "fig1_a": MAE_B,
    "fig1_b": MAE_B,
    "fig1_c": MAE_B,
    "mae_dm_vit_base_100": MAE_B,
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
    "maskfeat_vit_large": MAE_L + head(512, HOG, PIXELS),
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
    "demo_digits": None,
    "fashion_mnist": None,
    "own_photos": None,
}

EFFECTIVE_EPOCHS = {
    **dict.fromkeys(("mae_vit_base_1600", "mae_vit_large", "mae_dm_vit_base_uniform", "maskfeat_vit_base"), 1600),
    **dict.fromkeys(("mae_vit_huge", "maskfeat_vit_large"), 1600),
    **dict.fromkeys(("mae_vit_base_100", "fig1_a", "fig1_b", "fig1_c"), 100),
    **dict.fromkeys(("maskfeat_token_vit_base", "maskfeat_token_vit_large", "convmae_base"), 1600),
    **dict.fromkeys(("dmjd_vit_base_hog_800",), 1600),
    **{name: 200 for name in EXPERIMENTS if name.startswith("mae_dm_vit_base_") and name[-7:] != "uniform"},
    **{name: 100 for name in EXPERIMENTS if name.startswith(("jd_", "components_"))},
    **dict.fromkeys(("convmae_base_clip", "dmjd_convvit_base_clip", "dmjd_convvit_large_clip"), 400),
    "beit_dm_vit_base": 600,
    "mvp_vit_base": 300,
    "demo": 2,
    "demo_digits": 48,
    "fashion_mnist": 40,
    "own_photos": 200,
}
"""ETE by the paper; 800 for all others."""

PREDICTED = {"beit_dm_vit_base": 150 / 196}
"""m_pred of two views where it is not 1."""


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
    assert config.run == f"runs/{experiment.removesuffix('_digits')}"  # one demo, whichever its data
    assert spec.effective_epochs(config.epochs) == EFFECTIVE_EPOCHS.get(experiment, 800)
    if config.mask.views == 2:
        rate = config.mask.pred_ratio
        expected = PREDICTED.get(experiment, 1.0) if rate is None else round(rate * 196) / 196
        assert spec.true_rates(grid).m_pred == pytest.approx(expected)
    schedule = build_schedule(config, peak_lr(config, spec, grid), steps_per_epoch=10)
    assert 0 <= schedule(0) <= schedule(warmup_steps(config, steps_per_epoch=10) + 1)


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
        schedule = build_schedule(config, peak_lr(config, build_mask_spec(config.mask, grid), grid), steps_per_epoch=10)
        assert schedule(warmup_steps(config, steps_per_epoch=10)) == pytest.approx(rate), experiment


VIEWS_A_STEP = {
    ("mae_dm_vit_base_uniform", "mae_dm_vit_base", "mae_dm_vit_large"): (1024, 20),
    ("mae_dm_vit_base_lr_classic", "mae_dm_vit_base_lr_adaptive", "mae_dm_vit_base_pred80"): (1024, 20),
    ("mae_vit_base_100", "fig1_a", "fig1_b", "fig1_c", "mae_dm_vit_base_100"): (1024, 20),
    ("maskfeat_vit_base", "maskfeat_vit_large", "maskfeat_dm_vit_base", "maskfeat_dm_vit_large"): (1024, 20),
    ("dmjd_vit_base_hog_800", "dmjd_convvit_base_hog_paper", "dmjd_convvit_large_hog"): (1024, 20),
    ("jd_target_rgb", "jd_target_rgb_norm", "jd_target_hog_l2", "jd_target_hog", "jd_target_clip"): (1024, 10),
    ("jd_depth2_none", "jd_depth2_linear", "jd_depth2", "jd_depth4"): (1024, 10),
    ("components_none", "components_dm", "components_jd"): (1024, 10),
    ("mae_vit_base_1600", "mae_vit_large", "mae_vit_huge"): (4096, 40),
    ("beit_vit_base", "beit_dm_vit_base", "simmim_vit_base", "simmim_dm_vit_base"): (2048, 10),
    ("convmae_base", "convmae_large", "convmae_base_clip"): (3072, 40),
}
"""Rows of one table or figure that one recipe trained -> masked views in a step and epochs of warm-up."""


@pytest.mark.parametrize("rows", VIEWS_A_STEP)
def test_rows_of_one_table_have_one_batch_and_one_warm_up(rows: tuple[str, ...]) -> None:
    for config in map(configure, rows):
        assert (config.batch_size * config.mask.views, config.optim.warmup_epochs) == VIEWS_A_STEP[rows], config.run


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        (["experiment=fig1_a", "mask.mask_ratio=0.9"], (177 / 196, 177 / 196)),
        (["experiment=fig1_b", "mask.loss_ratio=0.25"], (147 / 196, 49 / 196)),
        (["experiment=fig1_c", "mask.mask_ratio=0.9"], (177 / 196, 147 / 196)),
        (["experiment=mae_dm_vit_base_100", "mask=uniform", "mask.mask_ratio=0.7"], (138 / 196, 1)),
        (["experiment=mae_dm_vit_base_100", "mask=block", "mask.mask_ratio=0.7"], (35 / 49, 1)),
        (["experiment=mae_dm_vit_base_100", "mask=beit", "mask.mask_ratio=0.7"], (138 / 196, 1)),
    ],
)
def test_sweeps_of_the_rates_vary_one_key(words: list[str], rates: tuple[float, float]) -> None:
    config: PretrainConfig = compose("pretrain", words)
    assert config.epochs == 100
    assert build_mask_spec(config.mask, (14, 14)).true_rates((14, 14)) == pytest.approx(rates)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Target name -> a file of weights for a network of the right kind, tiny and random."""
    folder: Path = tmp_path_factory.mktemp("weights")
    return {"clip": write_clip(folder), "dvae": write_dvae(folder / "dvae.pt")}


SAME_STEP = {
    *("mae_vit_base_100", "fig1_a", "fig1_b", "mae_dm_vit_base_100", "maskfeat_vit_large", "fashion_mnist"),
    *("mae_vit_base_1600", "mae_vit_large", "mae_dm_vit_large", "mae_dm_vit_base_lr_classic", "convmae_large"),
    *("mae_dm_vit_base_lr_adaptive", "mae_dm_vit_base_pred90", "mae_dm_vit_base_pred95", "beit_vit_large"),
    *("maskfeat_token_vit_large", "maskfeat_dm_vit_large", "dmjd_vit_base_hog_800", "jd_depth4", "jd_target_hog"),
    *("dmjd_convvit_large_hog", "dmjd_convvit_large_clip", "dmjd_convvit_base_hog_paper", "components_jd"),
}
"""Experiments whose shrunken copy differs from another one's in numbers alone."""


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name not in SAME_STEP])
def test_a_shrunken_copy_takes_a_step(experiment: str, weights: dict[str, str]) -> None:
    config = shrink(configure(experiment), weights)
    step, grid = build_step(config), token_grid(config)
    codes, batch = step.prepare.tokenizer.codes, smooth_batch(step, 2)
    assert step.prepare(batch, epoch=0).targets.shape == (2, grid[0] * grid[1], 1 if codes else target_dim(config))
    model = step.engine.objective.model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    losses, rates = step.forward_backward(batch, epoch=0)
    assert rates.tolist() == pytest.approx(step.prepare.mask_spec.true_rates(grid))
    assert losses.total.isfinite()
    if codes:  # of small random weights, nearly uniform over the codes
        assert losses.masked.item() == pytest.approx(math.log(CODES), rel=0.2)
    assert gradient(step).isfinite().all()
    assert step.update(1e-2).applied == 1
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert all(moved)


def test_the_page_of_methods_is_what_the_presets_say() -> None:
    # In this file, since a process keeps what it has composed.
    spec = importlib.util.spec_from_file_location("make_methods", DOCS / "make_methods.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "methods.md").read_text() == module.page(), "run python docs/make_methods.py"
