"""Presets of segmentation and detection against the published settings."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from dmjd.builders.schedules import build_schedule
from dmjd.completion import words_of
from dmjd.compose import compose
from dmjd.errors import ConfigError
from dmjd.keys import groups_of

ADE20K, COCO = 20_210, 117_266
"""Training images; of COCO those with objects."""


class Published(NamedTuple):
    """rate: at ``batch`` images. steps: of the run and of its warm-up. milestones: steps from which the rate is a
    tenth. windows: (side in tokens, global blocks)."""

    model: tuple[str, int, int]  # backbone, width, blocks of attention
    batch: int
    rate: float
    steps: tuple[int, int]
    weight_decay: float
    layer_decay: float
    drop_path: float
    milestones: tuple[int, ...] = ()
    windows: tuple[int, list[int]] | None = None
    channels: int = 256


B, L = ("vit", 768, 12), ("vit", 1024, 24)
CONV_B, CONV_L = ("convvit", 768, 11), ("convvit", 1024, 23)
SWIN = ("swin", 1024, 12)
HUNDRED, QUARTER = (163_889, 177_546), (40_972, 44_386)
CONVMAE = (16, [0, 3, 6, 10])

PUBLISHED = {
    "ade20k_mae_vit_base": Published(B, 16, 1e-4, (160_000, 1500), 0.05, 0.65, 0.1, channels=768),
    "ade20k_mae_vit_large": Published(L, 16, 1e-4, (160_000, 1500), 0.05, 0.75, 0.2, channels=1024),
    "ade20k_beit_vit_base": Published(B, 16, 7e-4, (160_000, 1500), 0.05, 0.65, 0.1, channels=768),
    "ade20k_beit_vit_large": Published(L, 16, 2e-5, (160_000, 1500), 0.05, 0.95, 0.2, channels=1024),
    "ade20k_simmim_swin_base": Published(SWIN, 16, 6e-5, (160_000, 1500), 0.01, 1, 0.3, channels=512),
    "ade20k_convmae_base": Published(CONV_B, 16, 1e-4, (160_000, 1500), 0.05, 0.75, 0.2, channels=768),
    "ade20k_dmjd_convvit_base": Published(CONV_B, 16, 1e-4, (160_000, 1500), 0.05, 0.75, 0.2, channels=768),
    "ade20k_dmjd_convvit_large": Published(CONV_L, 16, 1e-4, (160_000, 1500), 0.05, 0.75, 0.2, channels=1024),
    "coco_vitdet_base": Published(B, 64, 1e-4, (184_375, 250), 0.1, 0.7, 0.1, HUNDRED, (14, [2, 5, 8, 11])),
    "coco_vitdet_base_25": Published(B, 64, 1e-4, (46_094, 250), 0.1, 0.7, 0.1, QUARTER, (14, [2, 5, 8, 11])),
    "coco_vitdet_large": Published(L, 64, 1e-4, (184_375, 250), 0.1, 0.8, 0.4, HUNDRED, (14, [5, 11, 17, 23])),
    "coco_convmae_base": Published(CONV_B, 32, 8e-5, (92_187, 461), 0.1, 1, 0.1, (), CONVMAE),
    "coco_convmae_vitdet_base": Published(
        CONV_B, 16, 1e-4, (184_375, 250), 0.1, 0.8, 0.1, HUNDRED, (14, [1, 4, 7, 10])
    ),
    "coco_dmjd_convvit_base": Published(CONV_B, 32, 8e-5, (92_187, 461), 0.1, 1, 0.1, (), CONVMAE),
    "coco_dmjd_convvit_large": Published(CONV_L, 32, 8e-5, (92_187, 461), 0.1, 1, 0.1, (), (16, [0, 7, 15, 22])),
    "coco_simmim_swin_base": Published(SWIN, 16, 1e-4, (36 * 7393, 500), 0.05, 1, 0.3, (27 * 7393, 33 * 7393)),
}


def composed(preset: str) -> Any:
    return compose("segment" if preset.startswith("ade20k") else "detect", [f"preset={preset}", "init=weights.pth"])


def test_every_preset_has_its_row() -> None:
    assert sorted(PUBLISHED) == sorted([*groups_of("segment")["preset"], *groups_of("detect")["preset"]])


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_settings(preset: str) -> None:
    config, published = composed(preset), PUBLISHED[preset]
    backbone, optim, head = config.backbone, config.optim, config.head
    blocks = backbone.depth if backbone.name != "swin" else 12
    assert (backbone.name, backbone.embed_dim, blocks) == published.model
    assert (optim.weight_decay, optim.layer_decay) == (published.weight_decay, published.layer_decay)
    assert (optim.betas, optim.clip_grad, backbone.drop_path) == ([0.9, 0.999], None, published.drop_path)
    assert (config.batch_size, head.channels) == (published.batch, published.channels)
    windows = (config.attention.window, config.attention.global_blocks) if config.attention.window else None
    assert windows == published.windows
    # The learning rate by step: numbers of steps are those of whole epochs, within 1 % of the published ones.
    per_epoch = (ADE20K if preset.startswith("ade20k") else COCO) // config.batch_size
    total, warmup = published.steps
    assert config.epochs * per_epoch == pytest.approx(total, rel=0.01)
    total = config.epochs * per_epoch
    peak = optim.base_lr * config.batch_size / 256
    assert peak == pytest.approx(published.rate, rel=1e-12)
    rates = build_schedule(config, peak, per_epoch)
    rising = [step for step in range(2000) if rates(step + 1) > rates(step)]
    assert rising[-1] + 1 == pytest.approx(warmup, rel=0.01)
    if optim.schedule == "linear":
        assert rates(total // 2) == pytest.approx(peak * (1 - total // 2 / total))
    for number, step in enumerate(published.milestones, 1):
        place = step / published.steps[0] * total
        assert rates(int(place * 0.999)) == pytest.approx(peak * 0.1 ** (number - 1))
        assert rates(int(place * 1.001)) == pytest.approx(peak * 0.1**number)
    assert rates(total - 1) < 0.011 * peak


def test_every_model_can_be_built() -> None:
    """On the meta device, with the classes of ADE20K and COCO."""
    pytest.importorskip("transformers", reason="the extra dmjd[dense] is not installed")
    pytest.importorskip("torchvision", reason="the extra dmjd[dense] is not installed")
    from dmjd.builders.tasks import builders_of

    sizes = {}
    with torch.device("meta"):
        for name in PUBLISHED:
            config, classes = composed(name), 150 if name.startswith("ade20k") else 80
            encoder = builders_of(config).objective(config, classes).model.encoder
            sizes[name] = sum(each.numel() for each in encoder.parameters())
    for name, width, depth in (("coco_vitdet_base", 768, 12), ("coco_vitdet_large", 1024, 24)):
        blocks = depth * (12 * width**2 + 13 * width) + (16 * 16 * 3 + 1) * width
        tables = 2 * 64 * ((depth - 4) * (2 * 14 - 1) + 4 * (2 * 64 - 1))
        assert sizes[name] == blocks + tables, "ViTDet without a class token and a final norm"
    assert sizes["ade20k_simmim_swin_base"] == sizes["coco_simmim_swin_base"]
    assert sizes["ade20k_dmjd_convvit_base"] > sizes["ade20k_convmae_base"]


def test_presets_of_one_shape_differ_as_published() -> None:
    configs = {name: composed(name) for name in PUBLISHED}
    for name, config in configs.items():
        if config.backbone.name == "convvit":
            assert config.backbone.conv_stages.mlp_ratios == ([8, 8] if "dmjd" in name else [4, 4])
        own = config.backbone.positions == "relative" or config.backbone.name == "swin"
        assert config.attention.relative_positions == ("none" if own else "decomposed")
        assert config.run == f"runs/{config.command}_{name.partition('_')[2]}"
    assert [configs[f"ade20k_beit_vit_{size}"].backbone.layer_scale for size in ("base", "large")] == [0.1, 1e-5]
    swin = [config.backbone.windows.size for config in configs.values() if config.backbone.name == "swin"]
    assert swin == [7, 7]
    five = {name for name, config in configs.items() if config.command == "detect" and config.head.mask_convs == 5}
    assert five == {"coco_convmae_base", "coco_dmjd_convvit_base", "coco_dmjd_convvit_large"}
    assert configs["coco_convmae_vitdet_base"].head.pyramid == "simple"


def test_a_command_offers_its_own_presets() -> None:
    for command, other in (
        ("segment", "coco_vitdet_base"),
        ("detect", "ade20k_mae_vit_base"),
        ("segment", "own_photos"),
    ):
        assert f"preset={other}" not in words_of(command)
        with pytest.raises(ConfigError, match=rf"^preset={other} is of dmjd \w+; dmjd {command} has \w+") as error:
            compose(command, [f"preset={other}", "init=weights.pth"])
        assert "\n" not in str(error.value)
    assert "preset=coco_vitdet_base" in words_of("detect")
    with pytest.raises(ConfigError, match="preset=coco_vitdet_base is of dmjd detect"):
        compose("finetune", ["preset=coco_vitdet_base", "init=weights.pth"])
    with pytest.raises(ConfigError, match=r"did you mean ade20k_mae_vit_base\? choose from ade20k_beit"):
        compose("segment", ["preset=ade20k_mae", "init=weights.pth"])
