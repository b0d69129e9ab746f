"""``recipe=small_data``: sizes that follow the images and the device, and typed keys that stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmjd.builders import build_mask_spec, recipe, token_grid
from dmjd.builders.model import build_encoder
from dmjd.compose import compose
from dmjd.config import DataConfig, FinetuneConfig, PretrainConfig
from dmjd.data.dataset import ArrayDataset, EvenSubset
from dmjd.errors import ConfigError, DataError, NoSplit

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
Resolve = Callable[..., PretrainConfig]


@pytest.fixture(scope="module")
def preset() -> PretrainConfig:
    config: PretrainConfig = compose("pretrain", ["experiment=own_photos"])
    return config


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch, preset: PretrainConfig) -> Resolve:
    """``resolve(images, side, *overrides)``: the configuration for so many square images, in ``classes`` classes."""

    def run(
        images: int,
        side: int,
        *overrides: str,
        device: torch.device = CPU,
        classes: int = 3,
        free_gib: float | None = None,
    ) -> PretrainConfig:
        pixels = np.zeros((1, side, side, 3), dtype=np.uint8)
        one = ArrayDataset(pixels, np.zeros(1, dtype=np.int64), classes, "test")

        class Repeated(EvenSubset):
            def __init__(self) -> None:
                self._dataset, self._indices = one, np.zeros(images, dtype=np.int64)

            def open(self, index: int) -> Any:
                return one.open(0)

        def build(data: DataConfig, split: str) -> Any:
            if split == "test" and not classes:
                raise DataError("val_percent=10 holds out 0") if data.val_percent else NoSplit("no test split")
            return Repeated()

        monkeypatch.setattr(recipe, "build_dataset", build)
        if free_gib is None:
            monkeypatch.setattr(recipe, "_fit_memory", lambda rules, device: None)
        else:
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 0))
            monkeypatch.setattr(recipe, "select_precision", lambda precision, device: torch.bfloat16)
        config = compose("pretrain", ["experiment=own_photos", *overrides]) if overrides else preset
        return recipe.apply_recipe(config, device)

    return run


def test_the_preset_holds_the_values_of_its_rules(resolve: Resolve, preset: PretrainConfig) -> None:
    """For 300 photos on a CPU, so that the docs show what a run does; all but the workers and the warm-up."""
    resolved = resolve(300, 480, classes=0)
    assert resolved.optim.base_lr == preset.optim.base_lr
    assert resolved.data.image_size == preset.data.image_size
    assert resolved.data.crop_scale == preset.data.crop_scale
    resolved.workers, resolved.optim, resolved.data = preset.workers, preset.optim, preset.data
    assert resolved == preset


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("side", [16, 28, 32, 50, 64, 100, 150, 480, 4000])
def test_every_size_gives_a_model_whose_masks_exist(resolve: Resolve, side: int, device: torch.device) -> None:
    config = resolve(300, side, device=device)
    grid = token_grid(config)
    assert max(config.data.image_size) <= side
    assert 4 <= grid[0] == grid[1] <= 16
    assert config.data.crop_scale[0] >= 0.2
    plan = build_mask_spec(config.mask, grid).plan(grid)
    assert 0.5 < plan.m_corr <= 0.75
    with torch.device("meta"):
        encoder = build_encoder(config)
    assert encoder.num_prefix_tokens == 1, "files for others need the class token"


def test_epochs_and_batch_follow_the_number_of_images(resolve: Resolve) -> None:
    runs = {images: resolve(images, 480) for images in (1, 27, 300, 3000, 30000)}
    assert [config.batch_size for config in runs.values()] == [1, 27, 32, 32, 32]
    epochs = [config.epochs for config in runs.values()]
    assert epochs == sorted(epochs, reverse=True)
    assert epochs[2] == 100
    seen = [images * config.epochs for images, config in runs.items()]
    assert seen == sorted(seen)
    assert resolve(3000, 480).epochs == round(100 / 10**0.5)
    assert [resolve(n, 480, device=CUDA).backbone.embed_dim for n in (300, 3000)] == [192, 384]


@pytest.mark.long  # seconds of tracing
def test_a_batch_fits_the_memory_of_the_gpu(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, estimate = dict[int, float](), recipe.step_bytes

    def spy(config: PretrainConfig, images: int, device: torch.device) -> float:
        return sizes.setdefault(images, estimate(config, images, device))

    monkeypatch.setattr(recipe, "step_bytes", spy)
    small = resolve(300, 480, device=CUDA, free_gib=2.5)
    assert resolve(300, 480, device=CUDA).batch_size == 128
    assert 2 <= small.batch_size < 128
    assert sizes[small.batch_size] <= 0.8 * 2.5 * 2**30 < sizes[2 * small.batch_size]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("epochs=3", "batch_size=8"), {"epochs": 3, "batch_size": 8, "online_knn.every_epochs": 1}),
        (("data.image_size=[64,64]",), {"data.image_size": [64, 64], "backbone.patch_size": 8}),
        (
            ("backbone=vit_small",),
            {"backbone.embed_dim": 384, "backbone.patch_size": 16, "data.image_size": [128, 128]},
        ),
        (("backbone.patch_size=8",), {"backbone.patch_size": 8, "data.image_size": [96, 96], "backbone.depth": 6}),
        (("method.decoder.dim=64", "workers=0"), {"method.decoder.dim": 64, "method.decoder.depth": 2, "workers": 0}),
        (("method=mae",), {"backbone.class_token": True, "method.visible_branch.enabled": False, "mask.views": 1}),
        (("optim.base_lr=1e-3", "optim.warmup_percent=2"), {"optim.base_lr": 1e-3, "optim.warmup_percent": 2}),
        (("backbone=convvit_base",), {"backbone.class_token": False, "data.image_size": [128, 128]}),
        (("recipe=none",), {"epochs": 100}),
    ],
)
def test_typed_keys_stay_and_other_rules_follow_them(
    resolve: Resolve, typed: tuple[str, ...], expected: dict[str, Any]
) -> None:
    config = resolve(300, 480, *typed)
    for key, value in expected.items():
        found: Any = config
        for name in key.split("."):
            found = getattr(found, name)
        assert found == value, key


def test_images_that_are_too_small_are_an_error_with_the_cure(resolve: Resolve) -> None:
    with pytest.raises(
        ConfigError, match=r"at least 16 pixels per side.*remove the small ones, or set data.image_size"
    ):
        resolve(300, 15)


@pytest.mark.parametrize(
    ("paths", "percent", "line"),
    [
        ([f"{kind}/{number}.png" for kind in "ab" for number in range(30)], 10, "data.val_percent=10"),
        (
            [f"{kind}/{number}.png" for kind in "ab" for number in range(2)],
            0,
            "no images are held out for evaluation: there are too few",
        ),
        (["0.png"], 0, "no images are held out for evaluation"),
        ([f"{number}.png" for number in range(30)], 0, "scores need at least two class folders"),
        ([f"a/{number}.png" for number in range(30)], 0, "scores need at least two class folders"),
    ],
)
def test_images_are_held_out_only_where_they_give_scores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, paths: list[str], percent: float, line: str
) -> None:
    photo = Image.new("RGB", (32, 32))
    for path in paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        photo.save(tmp_path / path)
    with caplog.at_level("INFO", logger="dmjd"):
        config = recipe.apply_recipe(compose("pretrain", ["experiment=own_photos", f"data.root={tmp_path}"]), CPU)
    assert config.data.val_percent == percent
    assert (config.online_knn.every_epochs > 0) == (percent > 0)
    assert f"data.val_percent={percent}" in caplog.text
    assert line in caplog.text


def test_a_stream_has_no_sizes_for_the_recipe() -> None:
    config = compose("pretrain", ["experiment=own_photos", "data=stream", "data.root=x.tar", "data.samples=9"])
    with pytest.raises(ConfigError, match=r"stream has no list .* or recipe=none"):
        recipe.apply_recipe(config, CPU)


def test_a_test_split_that_cannot_be_used_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config: FinetuneConfig = compose(
        "finetune", ["init=run", "preset=own_photos", f"data.root={tmp_path}/gone", "data.val_percent=10"]
    )
    with caplog.at_level("INFO", logger="dmjd"), pytest.raises(DataError, match="gone is not a folder"):
        recipe.apply_recipe(replace(config, typed=[]), CPU)  # as if the run that init names held images out
    assert not caplog.text
    for path in ("train/a/0.png", "val/b/0.png"):
        (tmp_path / path).parent.mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / path)
    with pytest.raises(DataError, match="b has no images in the training split; add some or remove it"):
        recipe.apply_recipe(compose("pretrain", ["experiment=own_photos", f"data.root={tmp_path}"]), CPU)


@pytest.fixture
def finetune(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FinetuneConfig]:
    """As ``resolve``, of preset=own_photos with the backbone and image size of a run of experiment=own_photos."""

    fit_memory = recipe._fit_memory

    @cache
    def composed(typed: tuple[str, ...]) -> FinetuneConfig:
        config: FinetuneConfig = compose("finetune", list(typed))
        return config

    def run(
        images: int, *overrides: str, device: torch.device = CPU, processes: int = 1, free_gib: float | None = None
    ) -> FinetuneConfig:
        model = ["backbone.patch_size=12", "backbone.embed_dim=192", "backbone.depth=6", "backbone.num_heads=3"]
        typed = ["init=run", "preset=own_photos", "data.image_size=96", *model, *overrides]
        resolve(images, 200)  # the images
        if free_gib is not None:
            monkeypatch.setattr(recipe, "_fit_memory", fit_memory)
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 0))
            monkeypatch.setattr(recipe, "select_precision", lambda precision, device: torch.bfloat16)
        return recipe.apply_recipe(composed(tuple(typed)), device, processes)

    return run


def test_a_classifier_follows_the_images_by_the_rules_of_pretraining(
    finetune: Callable[..., FinetuneConfig], resolve: Resolve
) -> None:
    preset = compose("finetune", ["init=run", "preset=own_photos"])
    found = finetune(300)
    assert found.data.crop_scale == resolve(300, 200).data.crop_scale
    for key in ("epochs", "batch_size", "val_every", "augment", "optim"):
        assert getattr(found, key) == getattr(preset, key), "the docs show what a run does"
    assert found.backbone.drop_path == preset.backbone.drop_path
    for images in (5, 27, 300, 3000):
        assert finetune(images).epochs / resolve(images, 200).epochs == pytest.approx(found.epochs / 100, rel=0.05)
    for images, processes in ((2, 1), (5, 1), (27, 1), (27, 2), (300, 3)):
        size = finetune(images, processes=processes).batch_size
        assert size % (2 * processes) == 0, "pairs are mixed"
        assert size <= max(images, 2 * processes)
    typed = finetune(300, "epochs=7", "augment.mixup=.8", "optim.layer_decay=.9", "batch_size=10")
    assert (typed.epochs, typed.augment.mixup, typed.optim.layer_decay, typed.batch_size) == (7, 0.8, 0.9, 10)
    assert typed.val_every == 1
    few, as_many = finetune(300, "few_shot=10"), finetune(30)
    assert (few.epochs, few.batch_size) == (as_many.epochs, as_many.batch_size) != (found.epochs, found.batch_size)


@pytest.mark.long  # seconds of tracing
def test_a_batch_of_fine_tuning_fits_the_memory_of_the_gpu(finetune: Callable[..., FinetuneConfig]) -> None:
    small, large = (finetune(300, device=CUDA, free_gib=free) for free in (0.2, 8.0))
    assert large.batch_size == 64
    assert 2 <= small.batch_size < 64
    assert small.batch_size % 2 == 0
    assert recipe.step_bytes(small, small.batch_size, CUDA) <= 0.8 * 0.2 * 2**30
