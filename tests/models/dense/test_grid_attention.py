"""Windows and decomposed relative positions: against detectron2's formula with the whole bias, and plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.models.dense.grid_attention import attend_on_grid, attention_on_map, into_windows, out_of_windows
from dmjd.models.masked_image_model import Encoder
from tests.models.dense.test_features import convvit, images, swin, vit


def relative(table: Tensor, size: int) -> Tensor:
    """detectron2's ``get_rel_pos(size, size, table)``: ``[size, size, d]``."""
    if len(table) != 2 * size - 1:
        resized = F.interpolate(table.reshape(1, len(table), -1).permute(0, 2, 1), size=2 * size - 1, mode="linear")
        table = resized.reshape(-1, 2 * size - 1).permute(1, 0)
    places = torch.arange(size)
    return table[places[:, None] - places[None, :] + size - 1]


def with_whole_bias(qkv: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """detectron2's attention with ``add_decomposed_rel_pos``, ``[B, h, w, 3, heads, d]`` -> ``[B, h, w, heads, d]``."""
    b, h, w, _, heads, d = qkv.shape
    q, k, v = qkv.reshape(b, h * w, 3, heads, d).permute(2, 0, 3, 1, 4).reshape(3, b * heads, h * w, d).unbind(0)
    scores = (q * d**-0.5) @ k.transpose(-2, -1)
    r_q = q.reshape(b * heads, h, w, d)
    rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, relative(rows, h))
    rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, relative(columns, w))
    scores = scores.view(-1, h, w, h, w) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]
    x = scores.view(b * heads, h * w, h * w).softmax(dim=-1) @ v
    return x.view(b, heads, h, w, d).permute(0, 2, 3, 1, 4)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize(("h", "w"), [(3, 5), (4, 4)])
def test_equals_detectron2_with_gradients_of_all_inputs(h: int, w: int) -> None:
    torch.manual_seed(0)
    qkv, rows, columns = drawn(2, h, w, 3, 2, 8), drawn(2 * h - 1, 8), drawn(2 * w - 1, 8)
    found, expected = attention_on_map(qkv, rows, columns), with_whole_bias(qkv, rows, columns)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, (qkv, rows, columns), weight),
        torch.autograd.grad(expected, (qkv, rows, columns), weight),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_gradients_of_the_attention_by_differences() -> None:
    torch.manual_seed(0)
    inputs = drawn(1, 2, 3, 3, 1, 4), drawn(3, 4), drawn(7, 4)  # one table of another size: interpolated
    assert torch.autograd.gradcheck(attention_on_map, inputs)


def test_tables_of_another_size_are_interpolated() -> None:
    torch.manual_seed(0)
    qkv, rows, columns = drawn(1, 6, 3, 3, 2, 8), drawn(7, 8), drawn(9, 8)
    torch.testing.assert_close(attention_on_map(qkv, rows, columns), with_whole_bias(qkv, rows, columns))


def test_bf16_is_as_near_to_float64_as_the_whole_bias_is() -> None:
    torch.manual_seed(0)
    qkv, rows, columns = drawn(1, 8, 8, 3, 2, 16), drawn(15, 16), drawn(15, 16)
    exact = with_whole_bias(qkv, rows, columns)
    narrow = [each.to(torch.bfloat16) for each in (qkv, rows, columns)]
    found, other = attention_on_map(*narrow), with_whole_bias(*narrow)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().mean() < 1.5 * (other - exact).abs().mean()


def test_the_form_that_counts_flops_has_the_same_shape() -> None:
    qkv, rows, columns = drawn(1, 4, 6, 3, 2, 8), drawn(7, 8), drawn(11, 8)
    meta = attention_on_map(qkv.to("meta"), rows.to("meta"), columns.to("meta"))
    assert meta.shape == attention_on_map(qkv, rows, columns).shape


@pytest.mark.parametrize(("h", "w", "window"), [(4, 6, 2), (5, 7, 3), (2, 2, 4)])
def test_windows_are_cut_row_by_row_and_put_back(h: int, w: int, window: int) -> None:
    x = torch.randn(2, h, w, 3)
    cut, index = into_windows(x, window), 0
    for image in range(2):
        for top in range(0, h, window):
            for left in range(0, w, window):
                expected = torch.zeros(window, window, 3)
                part = x[image, top : top + window, left : left + window]
                expected[: part.shape[0], : part.shape[1]] = part
                assert torch.equal(cut[index], expected)
                index += 1
    assert len(cut) == index
    assert torch.equal(out_of_windows(cut, (h, w)), x)


def draw_tables(encoder: Encoder) -> None:
    for name, parameter in encoder.named_parameters():
        if "rel_pos" in name:
            torch.nn.init.normal_(parameter, std=0.5)


def test_attention_in_windows_is_attention_with_a_block_diagonal_mask() -> None:
    encoder = vit((128, 128), class_token=False)
    attend_on_grid(encoder, 4, [], "none", encoder.grid)
    plain = vit((128, 128), class_token=False)
    plain.load_state_dict(encoder.state_dict())
    x = torch.randn(2, 8, 8, 32)
    attention: Any = plain.blocks[0].attn
    q, k, v = attention.qkv(x.flatten(1, 2)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    place = torch.arange(8) // 4
    window = (2 * place[:, None] + place).flatten()
    mask = window[:, None] == window[None, :]
    attended = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    on_grid: Any = encoder.blocks[0].attn
    torch.testing.assert_close(on_grid(x), attention.proj(attended).unflatten(1, (8, 8)))


@pytest.mark.parametrize("kind", [vit, convvit])
def test_the_whole_grid_without_windows_equals_plain_blocks(kind: Any) -> None:
    """Tables of zeros add nothing; a ViT without a class token, whose grid differs from its training's."""
    options = {"class_token": False} if kind is vit else {}
    encoder, plain = kind(**options), kind(**options)
    plain.load_state_dict(encoder.state_dict())
    attend_on_grid(encoder, None, None, "decomposed", encoder.grid)
    pixels = images(96, 64)
    for one, other in zip(encoder.feature_maps(pixels), plain.feature_maps(pixels), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_beit_blocks_take_windows_and_relative_positions() -> None:
    options: dict[str, Any] = {
        "class_token": False,
        "block": "beit",
        "masked_tokens": "mask_token",
        "layer_scale": 0.1,
    }
    encoder, plain = vit(**options), vit(**options)
    plain.load_state_dict(encoder.state_dict())
    attend_on_grid(encoder, None, None, "decomposed", encoder.grid)
    pixels = images(64, 64)
    torch.testing.assert_close(encoder.feature_maps(pixels), plain.feature_maps(pixels), rtol=1e-4, atol=1e-5)
    draw_tables(encoder)
    block: Any = encoder.blocks[0]
    x = torch.randn(1, 4, 4, 32)
    bias = torch.cat((block.attn.q_bias, block.attn.k_bias, block.attn.v_bias))
    qkv = F.linear(x, block.attn.qkv.weight, bias).unflatten(-1, (3, 2, 16))
    expected = with_whole_bias(qkv, block.attn.rel_pos_h, block.attn.rel_pos_w).flatten(-2)
    torch.testing.assert_close(block.attn(x), block.attn.proj(expected), rtol=1e-4, atol=1e-5)


def test_windowed_and_global_blocks_have_tables_of_their_sizes() -> None:
    encoder = vit((64, 96))
    attend_on_grid(encoder, 3, None, "decomposed", encoder.grid)
    shapes = {name: tuple(parameter.shape) for name, parameter in encoder.named_parameters() if "rel_pos" in name}
    assert shapes["blocks.3.attn.rel_pos_h"] == (7, 16)
    assert shapes["blocks.3.attn.rel_pos_w"] == (11, 16)
    assert all(parameter.count_nonzero() == 0 for name, parameter in encoder.named_parameters() if "rel_pos" in name)
    assert "cls_token" not in dict(encoder.named_parameters())


@pytest.mark.parametrize(("depth", "expected"), [(12, [2, 5, 8, 11]), (24, [5, 11, 17, 23])])
def test_four_blocks_are_global_as_in_vitdet(depth: int, expected: list[int]) -> None:
    encoder = vit(depth=depth)
    attend_on_grid(encoder, 14, None, "none", encoder.grid)
    windows: list[Any] = [block.attn.window for block in encoder.blocks]  # type: ignore[union-attr]
    assert [index for index, window in enumerate(windows) if window is None] == expected
    assert set(windows) == {None, 14}


def test_padding_takes_part_in_attention_as_in_vitdet() -> None:
    encoder = vit((80, 80))  # 5 x 5 tokens, windows of 3: padded to 6 x 6
    attend_on_grid(encoder, 3, [], "decomposed", encoder.grid)
    draw_tables(encoder)
    attention: Any = encoder.blocks[0].attn
    x = torch.randn(1, 5, 5, 32)
    padded = torch.zeros(1, 6, 6, 32)
    padded[:, :5, :5] = x
    expected = torch.zeros(1, 6, 6, 32)
    for top in (0, 3):
        for left in (0, 3):
            window = attention.qkv(padded[:, top : top + 3, left : left + 3]).unflatten(-1, (3, 2, 16))
            found = with_whole_bias(window, attention.rel_pos_h, attention.rel_pos_w).flatten(-2)
            expected[:, top : top + 3, left : left + 3] = attention.proj(found)
    torch.testing.assert_close(attention(x), expected[:, :5, :5], rtol=1e-4, atol=1e-5)


def test_encoders_without_such_blocks_are_rejected() -> None:
    with pytest.raises(ValueError, match="Encoder has no map_widths: it gives no feature maps"):
        attend_on_grid(Encoder(), None, None, "none", (4, 4))
    with pytest.raises(ValueError, match="Swin has windows"):
        attend_on_grid(swin(), 7, None, "none", (2, 2))
    relative_vit = vit(block="beit", masked_tokens="mask_token", positions="relative")
    with pytest.raises(ValueError, match="relative positions of one grid"):
        attend_on_grid(relative_vit, 7, None, "none", (4, 4))
    with pytest.raises(ValueError, match=r"global_blocks must be in 0\.\.3, got \[9\]"):
        attend_on_grid(vit(), 7, [9], "none", (4, 4))
