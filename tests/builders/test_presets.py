"""Presets of fine-tuning against the published settings."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from dmjd.builders.model import build_classification
from dmjd.compose import compose
from dmjd.config import FinetuneConfig
from dmjd.keys import groups_of

OWN = {"fashion_mnist", "own_photos"}
"""Presets whose settings are not published ones."""
PRESETS = sorted({*groups_of("finetune")["preset"]} - OWN)


class Published(NamedTuple):
    """rate: (learning rate, images that it is for), as the source has it. head: (std, factor) of its weights."""

    model: tuple[int, int, int, int]  # patch size, width, depth, heads
    epochs: int
    batch: int
    rate: tuple[float, int]
    warmup: float
    layer_decay: float
    drop_path: float
    head: tuple[float, float] = (2e-5, 1)
    clip: float | None = None
    start: float = 0  # of the warm-up, absolute
    norm: str = "pooled"


B, L, H = (16, 768, 12, 12), (16, 1024, 24, 16), (14, 1280, 32, 16)
CONV_B, CONV_L = (16, 768, 11, 12), (16, 1024, 23, 16)
SCALED = (0.02, 1e-3)

PUBLISHED = {
    "mae_vit_base": Published(B, 100, 1024, (5e-4, 256), 5, 0.65, 0.1),
    "mae_vit_large": Published(L, 50, 1024, (1e-3, 256), 5, 0.75, 0.2),
    "mae_vit_huge": Published(H, 50, 1024, (1e-3, 256), 5, 0.75, 0.3),
    "simmim_vit_base": Published(
        B, 100, 2048, (1.25e-3, 512), 20, 0.65, 0.1, SCALED, clip=5, start=2.5e-7 * 2048 / 512
    ),
    "simmim_swin_base": Published(
        (32, 1024, 12, 12), 100, 2048, (1.25e-3, 512), 20, 0.8, 0.1, (0.02, 1), 5, 2.5e-7 * 2048 / 512, "encoder"
    ),
    "beit_vit_base": Published(B, 100, 1024, (4e-3, 1024), 20, 0.65, 0.1, SCALED),
    "beit_vit_large": Published(L, 50, 1024, (1e-3, 1024), 5, 0.75, 0.2, SCALED),
    "maskfeat_vit_base": Published(B, 100, 2048, (2e-3, 512), 20, 0.65, 0.1, SCALED, start=1e-8),
    "maskfeat_vit_large": Published(L, 50, 1024, (1e-3, 256), 5, 0.75, 0.1, SCALED, start=1e-8),
    "convmae_base": Published(CONV_B, 100, 1024, (5e-4, 256), 5, 0.65, 0.1),
    "dmjd_convvit_base": Published(CONV_B, 100, 1024, (5e-4, 256), 5, 0.65, 0.1),
    "dmjd_convvit_large": Published(CONV_L, 50, 1024, (5e-4, 256), 5, 0.75, 0.2),
    "dmjd_vit_base": Published(B, 100, 1024, (5e-4, 256), 5, 0.65, 0.1),
}


SIZES = {
    "mae_vit_base": 86_567_656 - 197 * 768,
    "mae_vit_large": 304_326_632 - 197 * 1024,
    "mae_vit_huge": 632_045_800 - 257 * 1280,
    "simmim_vit_base": 86_530_984,
    "simmim_swin_base": 87_768_224,
    "beit_vit_base": 86_530_984,
    "maskfeat_vit_base": 86_567_656,
    "maskfeat_vit_large": 304_326_632,
    "convmae_base": 85_374_824 - 196 * 768,
    "dmjd_convvit_base": 88_787_816 - 196 * 768,
    "dmjd_convvit_large": 322_977_384 - 196 * 1024,
    "dmjd_vit_base": 86_567_656 - 197 * 768 - 768,
}
"""Parameters of the official classifiers of 1000 classes, without their fixed positions: measured on them, and of ViT
and Swin those of timm's models."""


@pytest.mark.parametrize("preset", SIZES)
def test_a_preset_is_the_published_model(preset: str) -> None:
    config: FinetuneConfig = compose("finetune", [f"preset={preset}", "init=weights.pth"])
    with torch.device("meta"):
        objective = build_classification(config, 1000)
    assert sum(parameter.numel() for parameter in objective.parameters()) == SIZES[preset]


def test_every_preset_has_its_row() -> None:
    assert sorted(PUBLISHED) == PRESETS


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_settings(preset: str) -> None:
    config: FinetuneConfig = compose("finetune", [f"preset={preset}", "init=weights.pth"])
    published = PUBLISHED[preset]
    backbone, optim, head, augment = config.backbone, config.optim, config.head, config.augment
    assert (backbone.patch_size, backbone.embed_dim, backbone.depth, backbone.num_heads) == published.model
    assert (config.epochs, config.batch_size) == (published.epochs, published.batch)
    rate, images = published.rate
    assert optim.base_lr * config.batch_size / 256 == pytest.approx(rate * config.batch_size / images, rel=1e-12)
    assert optim.warmup_epochs == published.warmup
    assert optim.warmup_lr == pytest.approx(published.start)
    assert (optim.layer_decay, backbone.drop_path) == (published.layer_decay, published.drop_path)
    assert (head.pooling, head.norm, head.init_std, head.init_scale) == ("mean", published.norm, *published.head)
    assert optim.clip_grad == published.clip
    # Common to all of them.
    assert (optim.schedule, optim.min_lr, optim.betas, optim.weight_decay) == ("cosine", 1e-6, [0.9, 0.999], 0.05)
    assert (augment.randaugment, augment.mixup, augment.cutmix) == ("rand-m9-mstd0.5-inc1", 0.8, 1.0)
    assert (augment.mix_prob, augment.mix_switch_prob, augment.smoothing) == (1.0, 0.5, 0.1)
    assert (augment.erase_prob, augment.erase_count, config.data.jitter) == (0.25, 1, 0)
    assert (config.data.image_size, config.data.crop_scale, config.data.crop_pct) == ([224, 224], [0.08, 1.0], 0.875)
    assert (config.data.interpolation, config.data.flip) == ("bicubic", True)


def test_models_of_one_shape_differ_as_published() -> None:
    composed = {name: compose("finetune", [f"preset={name}", "init=weights.pth"]) for name in PRESETS}
    ratios = {name: composed[name].backbone.conv_stages.mlp_ratios for name in PRESETS if "conv" in name}
    assert ratios == {"convmae_base": [4, 4], "dmjd_convvit_base": [8, 8], "dmjd_convvit_large": [8, 8]}
    assert composed["simmim_swin_base"].backbone.windows.size == 7
    positions = {name: composed[name].backbone.positions for name in PRESETS}
    assert {name for name in PRESETS if positions[name] == "relative"} == {
        "beit_vit_base",
        "beit_vit_large",
        "simmim_vit_base",
    }
    assert {name for name in PRESETS if positions[name] == "learned"} == {"maskfeat_vit_base", "maskfeat_vit_large"}
    assert [composed[f"beit_vit_{size}"].backbone.layer_scale for size in ("base", "large")] == [0.1, 1e-5]
    assert [composed[f"beit_vit_{size}"].data.mean for size in ("base", "large")] == [[0.5] * 3] * 2
    exempt = {name: config.optim.no_decay for name, config in composed.items()}
    assert exempt.pop("simmim_swin_base") == ["relative_position_bias_table"]
    assert [exempt.pop(f"maskfeat_vit_{size}") for size in ("base", "large")] == [[], []]
    assert all(names == ["cls_token", "pos_embed"] for names in exempt.values())
    assert all(config.run == f"runs/finetune_{name}" for name, config in composed.items())


@pytest.mark.parametrize("backbone", groups_of("finetune")["backbone"])
def test_every_backbone_is_fine_tuned_alone_and_keeps_its_decoder_in_pre_training(backbone: str) -> None:
    tuned = compose("finetune", [f"backbone={backbone}", "backbone.drop_path=0", "init=weights.pth"])
    trained = compose("pretrain", [f"backbone={backbone}", "method=mae"])
    assert tuned.backbone == trained.backbone
    decoder = trained.method.decoder
    small = {"vit_mini": (128, 2, 4), "vit_tiny": (128, 2, 4), "vit_small": (256, 4, 8)}
    assert (decoder.dim, decoder.depth, decoder.num_heads) == small.get(backbone, (512, 8, 16))
