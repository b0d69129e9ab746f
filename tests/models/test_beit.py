"""BEiT's blocks, learned and relative positions, Swin, and where weights start; timm's models are the oracles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from timm.models.beit import Beit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from dmjd.masking import MaskedViews, MaskSpec
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.swin import SwinEncoder
from dmjd.models.vit import ViTEncoder

SIZE, GRID = (32, 48), (4, 6)


def vit(**options: Any) -> ViTEncoder:
    arguments: dict[str, Any] = {
        "masked_tokens": "mask_token",
        "block": "beit",
        "positions": "relative",
        "layer_scale": 0.1,
    }
    return ViTEncoder(
        image_size=SIZE, patch_size=8, in_chans=3, embed_dim=64, depth=2, num_heads=4, **(arguments | options)
    )


def swin() -> SwinEncoder:
    return SwinEncoder(
        image_size=(64, 96), in_chans=3, embed_dim=64, depths=(1, 2, 2, 1), num_heads=(1, 2, 2, 4), window=2
    )


def randomised(encoder: Encoder) -> Encoder:
    generator = torch.Generator().manual_seed(1)
    for parameter in encoder.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return encoder.eval()


def initialised(encoder: Encoder, kind: str, seed: int = 0) -> MaskedImageModel:
    torch.manual_seed(seed)
    return MaskedImageModel(encoder, None, None, 7, kind)


def images_for(encoder: Encoder, batch: int = 2) -> Tensor:
    size = tuple(side * encoder.patch_size for side in encoder.grid)
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(2))


def views_for(encoder: Encoder, batch: int = 2) -> MaskedViews:
    spec = MaskSpec(views=2, mask_ratio=0.5, pattern="uniform")
    return spec.draw(torch.arange(batch), encoder.grid, seed=0, epoch=0)


@pytest.mark.parametrize("layer_scale", [None, 0.1])
@pytest.mark.parametrize("positions", ["relative", "learned", "learned_relative"])
def test_the_encoder_is_timms_beit(positions: str, layer_scale: float | None) -> None:
    encoder = randomised(initialised(vit(positions=positions, layer_scale=layer_scale), "beit").encoder)
    oracle = Beit(
        img_size=SIZE,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=4,
        num_classes=0,
        global_pool="token",
        init_values=layer_scale,
        use_abs_pos_emb="learned" in positions,
        use_shared_rel_pos_bias="relative" in positions,
    ).eval()
    state = {name: value for name, value in encoder.state_dict().items() if name != "mask_token"}
    oracle.load_state_dict(state)
    images = images_for(encoder)
    with torch.no_grad():
        torch.testing.assert_close(encoder(images), oracle.forward_features(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("class_token", [True, False])
def test_learned_positions_are_timms_vits_at_any_size(class_token: bool) -> None:
    encoder = vit(positions="learned", block="plain", layer_scale=None, class_token=class_token)
    randomised(initialised(encoder, "maskfeat").encoder)
    oracle = VisionTransformer(
        img_size=SIZE,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=4,
        num_classes=0,
        class_token=class_token,
        global_pool="avg",
        fc_norm=False,
        dynamic_img_size=True,
    ).eval()
    oracle.load_state_dict({name: value for name, value in encoder.state_dict().items() if name != "mask_token"})
    for size in (SIZE, (48, 48)):
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            torch.testing.assert_close(encoder(images), oracle.forward_features(images), atol=1e-5, rtol=1e-5)


def test_dropping_hidden_tokens_leaves_learned_positions_where_they_were() -> None:
    encoder = randomised(initialised_dropping())
    images, (views, _) = images_for(encoder), views_for(encoder)
    everything = views._replace(
        visible=torch.arange(24).expand(2, 2, 24), mask=torch.zeros_like(views.mask), restore=views.restore
    )
    with torch.no_grad():
        torch.testing.assert_close(encoder(images, everything)[:2], encoder(images), atol=1e-5, rtol=1e-5)


def initialised_dropping() -> Encoder:
    encoder = vit(positions="learned", block="plain", layer_scale=None, masked_tokens="drop")
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.02)
    return encoder


def test_swin_is_timms() -> None:
    encoder = randomised(initialised(swin(), "simmim").encoder)
    oracle = SwinTransformer(
        img_size=(64, 96), embed_dim=8, depths=(1, 2, 2, 1), num_heads=(1, 2, 2, 4), window_size=2, num_classes=0
    ).eval()
    oracle.load_state_dict({name: value for name, value in encoder.state_dict().items() if name != "mask_token"})
    images = images_for(encoder)
    with torch.no_grad():
        features = oracle.forward_features(images)
        torch.testing.assert_close(encoder(images), features.flatten(1, 2), atol=1e-5, rtol=1e-5)
    assert encoder.grid == features.shape[1:3] == (2, 3)


@pytest.mark.parametrize("make", [vit, swin])
def test_hidden_pixels_change_nothing_and_visible_ones_do(make: Any) -> None:
    encoder = randomised(initialised(make(), "simmim").encoder)
    images, (views, _) = images_for(encoder), views_for(encoder)
    side = encoder.patch_size
    hidden = views.mask[0].unflatten(-1, encoder.grid).repeat_interleave(side, 1).repeat_interleave(side, 2)
    with torch.no_grad():
        first = encoder(images, views)[:2]
        behind = encoder(torch.where(hidden.unsqueeze(1), 9.0, images), views)[:2]
        beside = encoder(torch.where(hidden.unsqueeze(1), images, 9.0), views)[:2]
    assert torch.equal(first, behind)
    assert (first - beside).abs().amax(-1).min() > 1e-4, "every token has seen visible pixels"


def test_stochastic_depth_and_layer_scale_multiply() -> None:
    encoder = randomised(initialised(vit(), "beit").encoder)
    images = images_for(encoder)
    with torch.no_grad():
        ones = encoder(images, branch_scales=torch.ones(2, 2, 2))
        torch.testing.assert_close(ones, encoder(images), atol=1e-6, rtol=1e-5)
        blocks: Any = encoder.blocks
        halves = encoder(images, branch_scales=torch.full((2, 2, 2), 0.5))
        for block in blocks:
            block.gamma_1.mul_(0.5)
            block.gamma_2.mul_(0.5)
        torch.testing.assert_close(encoder(images), halves, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["beit", "simmim"])
def test_beits_weights_start_cut_at_one_deviation_and_scaled_by_depth(kind: str) -> None:
    model = initialised(vit(), kind)
    blocks: Any = model.encoder.blocks
    for depth, block in enumerate(blocks, 1):
        for layer in (block.attn.proj, block.mlp.fc2):
            assert 0.97 < layer.weight.abs().max().item() * math.sqrt(2 * depth) / 0.02 <= 1
        for layer in (block.attn.qkv, block.mlp.fc1):
            assert 0.97 < layer.weight.abs().max().item() / 0.02 <= 1
        assert torch.equal(block.gamma_1, torch.full((64,), 0.1))
        assert not block.attn.q_bias.any()
        assert not block.mlp.fc1.bias.any()
    encoder: Any = model.encoder
    assert 0.97 < encoder.patch_embed.proj.weight.abs().max().item() / 0.02 <= 1
    assert not encoder.rel_pos_bias.relative_position_bias_table.any()
    if kind == "beit":
        assert model.head.weight.abs().max().item() <= 0.02
        assert not model.head.bias.any()
    else:  # torch's initialisation of a layer on 64 features
        assert model.head.weight.abs().max().item() == pytest.approx(1 / 8, rel=0.02)
        assert model.head.bias.any()


def test_maskfeats_biases_start_at_002() -> None:
    model = initialised(vit(positions="learned", block="plain", layer_scale=None), "maskfeat")
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and name not in ("head.bias", "encoder.patch_embed.proj.bias"):
            assert torch.equal(parameter, torch.full_like(parameter, 0.02)), name
    assert not model.head.bias.any()
    qkv: Any = model.encoder.blocks[0]
    assert qkv.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"masked_tokens": "drop"}, "masked_tokens='mask_token'"),
        ({"block": "plain", "layer_scale": None}, "block='beit'"),
        ({"block": "plain", "positions": "learned"}, "layer_scale=0.1 needs block='beit'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        vit(**options)


def test_relative_positions_and_swin_serve_one_size() -> None:
    with pytest.raises(ValueError, match="relative positions are those of 4x6 tokens, got an image of 4x4"):
        vit()(torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match="built for images of 64x96, got 64x64"):
        swin()(torch.zeros(1, 3, 64, 64))
    with pytest.raises(ValueError, match="not divisible by the patch size 32"):
        SwinEncoder(image_size=(48, 64), in_chans=3, embed_dim=64, depths=(1,) * 4, num_heads=(1,) * 4, window=2)
    with pytest.raises(ValueError, match="divisible by num_heads"):
        SwinEncoder(image_size=(64, 64), in_chans=3, embed_dim=64, depths=(1,) * 4, num_heads=(3,) * 4, window=2)
