"""Feature maps of the encoders: against plain forward passes, of any size of image."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch
from timm.models import swin_transformer
from torch import Tensor

from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.dense.grid_attention import attend_on_grid
from dmjd.models.masked_image_model import Encoder
from dmjd.models.swin import SwinEncoder
from dmjd.models.vit import ViTEncoder

E = TypeVar("E", bound=Encoder)


def vit(size: tuple[int, int] = (64, 64), **options: Any) -> ViTEncoder:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"patch_size": 16, "embed_dim": 32, "depth": 4, "num_heads": 2}
    return _filled(ViTEncoder(image_size=size, in_chans=3, **(settings | options)))


def convvit() -> ConvViTEncoder:
    torch.manual_seed(0)
    return _filled(
        ConvViTEncoder(
            image_size=(64, 64), in_chans=3, embed_dims=(8, 16, 32), depths=(1, 1, 4), mlp_ratios=(2, 2, 2), num_heads=2
        )
    )


def swin(size: tuple[int, int] = (64, 64), window: int = 4) -> SwinEncoder:
    torch.manual_seed(0)
    return _filled(
        SwinEncoder(
            image_size=size, in_chans=3, embed_dim=64, depths=(2, 2, 2, 2), num_heads=(1, 1, 2, 2), window=window
        )
    )


def _filled(encoder: E) -> E:
    """Every parameter drawn, those that begin at 0 or in uninitialised memory too."""
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else 0.1)
    return encoder


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"class_token": False, "positions": "learned"}, {"positions": "learned"}])
def test_the_last_map_of_a_vit_is_its_tokens_before_the_norm(options: dict[str, Any]) -> None:
    encoder = vit(**options)
    pixels = images(96, 64)  # another size than pre-training's
    (last,) = encoder.feature_maps(pixels)
    assert last.shape == (2, encoder.map_widths[0], 6, 4)
    tokens = encoder(pixels)[:, encoder.num_prefix_tokens :]
    torch.testing.assert_close(encoder.norm(last.permute(0, 2, 3, 1)).flatten(1, 2), tokens)
    several = encoder.feature_maps(pixels, None, [0, 3])
    assert len(several) == 2
    assert torch.equal(several[1], last)


def test_a_map_of_a_vit_is_the_output_of_its_block() -> None:
    encoder = vit()
    kept: list[Tensor] = []
    encoder.blocks[1].register_forward_hook(lambda *arguments: kept.append(arguments[2]))
    (found,) = encoder.feature_maps(images(64, 64), None, [1])
    assert torch.equal(found.flatten(2).mT, kept[0][:, 1:])


def test_convvit_gives_its_stages_at_strides_4_8_and_16() -> None:
    encoder, pixels = convvit(), images(96, 64)
    maps = encoder.feature_maps(pixels)
    assert [tuple(each.shape[1:]) for each in maps] == [(8, 24, 16), (16, 12, 8), (32, 6, 4)]
    assert encoder.map_widths == (8, 16, 32)
    torch.testing.assert_close(encoder.norm(maps[2].flatten(2).mT), encoder(pixels))
    stage1, stage2, _ = encoder.forward_stages(pixels)
    assert torch.equal(maps[0], stage1.permute(0, 3, 1, 2))
    assert torch.equal(maps[1], stage2.permute(0, 3, 1, 2))


def test_branch_scales_reach_every_block() -> None:
    for encoder in (vit(), convvit(), swin()):
        pixels = images(64, 64)
        nothing = torch.zeros(len(encoder.blocks), 2, 2)
        dropped = encoder.feature_maps(pixels, nothing)[-1]
        assert not torch.equal(dropped, encoder.feature_maps(pixels)[-1])
        assert torch.equal(encoder.feature_maps(pixels, nothing + 1)[-1], encoder.feature_maps(pixels)[-1])


@pytest.mark.parametrize("encoder", [vit(), convvit()], ids=["vit", "convvit"])
def test_branch_scales_scale_images_on_a_grid_one_by_one(encoder: Encoder) -> None:
    attend_on_grid(encoder, 3, None, "decomposed", encoder.grid)
    pixels = images(64, 64)
    scales = torch.rand(len(encoder.blocks), 2, 2)
    together = encoder.feature_maps(pixels, scales)[-1]
    for image in range(2):
        alone = encoder.feature_maps(pixels[image : image + 1], scales[..., image : image + 1])[-1]
        torch.testing.assert_close(together[image : image + 1], alone, rtol=1e-4, atol=1e-5)


def test_swin_equals_timm_where_windows_need_no_padding() -> None:
    encoder, pixels = swin(), images(64, 64)
    before = encoder(pixels)
    maps = encoder.feature_maps(pixels)
    attend_on_grid(encoder, None, None, "none", encoder.grid)
    assert [tuple(each.shape[1:]) for each in maps] == [(8, 16, 16), (16, 8, 8), (32, 4, 4), (64, 2, 2)]
    assert encoder.map_widths == (8, 16, 32, 64)
    for one, other in zip(encoder.feature_maps(pixels), maps, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(encoder(pixels), before, rtol=1e-4, atol=1e-5)
    # timm's own mask, which is built with the model
    assert any(
        isinstance(block, swin_transformer.SwinTransformerBlock) and block.attn_mask is not None
        for block in encoder.blocks
    )


def test_swin_pads_maps_before_the_cyclic_shift_as_its_authors_do() -> None:
    """Against attention of each query over the keys of its window, written as a mask over the padded map."""
    encoder = swin((96, 96), window=7)
    attend_on_grid(encoder, None, None, "none", encoder.grid)
    block: Any = encoder.blocks[1]
    assert block.shift_size == (3, 3)
    x = torch.randn(2, 17, 12, 8)
    found = block._attn(x)
    side, shift, attn = 7, 3, block.attn
    padded = torch.zeros(2, 21, 14, 8)
    padded[:, :17, :12] = x
    qkv = attn.qkv(padded).unflatten(-1, (3, 1, 8))
    q, k, v = (part.squeeze(3) for part in qkv.unbind(3))
    table = attn.relative_position_bias_table
    expected = torch.zeros(2, 21, 14, 8)

    # After the shift by 3, place p is at (p - 3) % length, and the window is that over 7; the last window of the
    # shifted map holds two regions that were not neighbours.
    def key_of(place: int, length: int) -> tuple[int, int, int]:
        moved = (place - shift) % length
        return moved // side, int(place < shift), moved % side

    for i in range(17):
        for j in range(12):
            here = [key_of(i, 21), key_of(j, 14)]
            scores, values = [], []
            for a in range(21):
                for b in range(14):
                    there = [key_of(a, 21), key_of(b, 14)]
                    if all(one[:2] == other[:2] for one, other in zip(here, there, strict=True)):
                        row, column = (one[2] - other[2] + side - 1 for one, other in zip(here, there, strict=True))
                        bias = table[row * (2 * side - 1) + column, 0]
                        scores.append((q[:, i, j] * k[:, a, b]).sum(-1) * 8**-0.5 + bias)
                        values.append(v[:, a, b])
            weights = torch.stack(scores, 1).softmax(1)
            expected[:, i, j] = (weights.unsqueeze(-1) * torch.stack(values, 1)).sum(1)
    torch.testing.assert_close(found, attn.proj(expected[:, :17, :12]), rtol=1e-4, atol=1e-5)


def test_swin_maps_images_of_another_size_than_it_was_built_for() -> None:
    small, large = swin((64, 64), window=2), swin((96, 128), window=2)
    large.load_state_dict(small.state_dict())
    pixels = images(96, 128)
    with pytest.raises(ValueError, match="built for images of 64x64"):
        small.feature_maps(pixels)
    expected = large.feature_maps(pixels)
    attend_on_grid(small, None, None, "none", small.grid)
    for one, other in zip(small.feature_maps(pixels)[:3], expected[:3], strict=True):  # the last stage is one window
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_beit_with_tables_of_one_grid_maps_that_size_alone() -> None:
    encoder = vit(block="beit", masked_tokens="mask_token", positions="relative", bias_tables="per_block")
    assert encoder.feature_maps(images(64, 64))[0].shape == (2, 32, 4, 4)
    with pytest.raises(ValueError, match="relative positions are those of 4x4 tokens"):
        encoder.feature_maps(images(96, 64))
