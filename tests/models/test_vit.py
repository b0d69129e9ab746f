from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from dmjd.masking import MaskSpec
from dmjd.models.vit import ViTEncoder
from dmjd.ops.tokens import gather_tokens
from dmjd.ops.views import Views
from dmjd.positions import sincos_positions

DIM, PATCH, HEADS, DEPTH = 32, 4, 4, 2


def make_encoder(image_size: tuple[int, int] = (16, 16), in_chans: int = 3, **options: Any) -> ViTEncoder:
    encoder = ViTEncoder(
        image_size=image_size,
        patch_size=PATCH,
        in_chans=in_chans,
        embed_dim=DIM,
        depth=DEPTH,
        num_heads=HEADS,
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoder.parameters():  # weights far from any initialisation, so that each of them matters
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return encoder.eval()


def timm_twin(encoder: ViTEncoder, image_size: tuple[int, int], in_chans: int = 3) -> VisionTransformer:
    """timm's ViT with the same weights; every name but the positions comes from the encoder, and is loaded strictly."""
    prefix = encoder.num_prefix_tokens
    twin = VisionTransformer(
        img_size=image_size,
        patch_size=PATCH,
        in_chans=in_chans,
        num_classes=0,
        global_pool="",
        embed_dim=DIM,
        depth=DEPTH,
        num_heads=HEADS,
        class_token=prefix == 1,
    )
    grid = (image_size[0] // PATCH, image_size[1] // PATCH)
    positions = torch.cat((torch.zeros(prefix, DIM), sincos_positions(grid, DIM)))
    state = {name: value for name, value in encoder.state_dict().items() if name != "mask_token"}
    twin.load_state_dict(state | {"pos_embed": positions[None]}, strict=True)
    return twin.eval()


def make_images(batch: int, channels: int, size: tuple[int, int], seed: int = 1) -> Tensor:
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(seed))


def draw_views(batch: int, grid: tuple[int, int], views: int = 2) -> Views:
    spec = MaskSpec(views=views, mask_ratio=0.6, pattern="uniform")
    return spec.draw(torch.arange(batch), grid, seed=0, epoch=0).views


def encode_by_hand(encoder: ViTEncoder, tokens: Tensor) -> Tensor:
    """One sequence ``[n, D]`` of patch tokens that have their positions -> ``[prefix + n, D]``."""
    if encoder.cls_token is not None:
        tokens = torch.cat((encoder.cls_token[0], tokens))
    x = tokens[None]
    for block in encoder.blocks:
        x = block(x)
    return encoder.norm(x)[0]


def paint_hidden(images: Tensor, mask: Tensor, grid: tuple[int, int], value: float) -> Tensor:
    """Set the pixels under ``mask [B, N]`` to ``value``."""
    pixels = mask.unflatten(-1, grid).repeat_interleave(PATCH, -2).repeat_interleave(PATCH, -1)
    return images.masked_fill(pixels[:, None], value)


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize(
    ("trained", "shown"),
    [((16, 16), (16, 16)), ((8, 20), (8, 20)), ((16, 16), (12, 24)), ((8, 20), (20, 8)), ((16, 16), (4, 4))],
)
@torch.no_grad()
def test_whole_images_encode_as_in_timm(class_token: bool, trained: tuple[int, int], shown: tuple[int, int]) -> None:
    encoder = make_encoder(trained, class_token=class_token)
    images = make_images(3, 3, shown)
    expected = timm_twin(encoder, shown).forward_features(images)
    assert expected.shape == (3, int(class_token) + shown[0] * shown[1] // PATCH**2, DIM)
    torch.testing.assert_close(encoder(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 5])
@torch.no_grad()
def test_any_number_of_channels(channels: int) -> None:
    encoder = make_encoder(in_chans=channels)
    images = make_images(2, channels, (16, 16))
    expected = timm_twin(encoder, (16, 16), channels).forward_features(images)
    torch.testing.assert_close(encoder(images), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_mlp_ratio_is_timms() -> None:
    encoder = make_encoder(mlp_ratio=2.5)
    assert encoder.blocks[0].mlp.fc1.weight.shape == (80, DIM)  # type: ignore[union-attr]


@pytest.mark.parametrize("masked_tokens", ["drop", "mask_token"])
@torch.no_grad()
def test_without_views_the_mask_token_plays_no_part(masked_tokens: str) -> None:
    encoder = make_encoder(masked_tokens=masked_tokens)
    images = make_images(2, 3, (16, 16))
    expected = timm_twin(encoder, (16, 16)).forward_features(images)
    torch.testing.assert_close(encoder(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("class_token", [True, False])
def test_attributes_and_what_a_checkpoint_holds(class_token: bool) -> None:
    encoder = make_encoder((8, 20), class_token=class_token, masked_tokens="mask_token")
    assert encoder.embed_dim == DIM
    assert encoder.patch_size == PATCH
    assert encoder.grid == (2, 5)
    assert encoder.num_prefix_tokens == int(class_token)
    assert len(encoder.blocks) == DEPTH
    names = set(encoder.state_dict())
    assert names == {name for name, _ in encoder.named_parameters()}  # positions are a function of the grid
    assert all(parameter.requires_grad for parameter in encoder.parameters())
    assert "mask_token" in names
    assert ("cls_token" in names) == class_token
    assert "mask_token" not in make_encoder(class_token=class_token).state_dict()


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("views", [1, 2, 3])
@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
@torch.no_grad()
def test_drop_encodes_each_view_as_if_alone(class_token: bool, views: int, size: tuple[int, int]) -> None:
    encoder = make_encoder(class_token=class_token)  # (12, 20) is another grid than it was made for
    grid = (size[0] // PATCH, size[1] // PATCH)
    images, drawn = make_images(3, 3, size), draw_views(3, grid, views)
    result = encoder(images, drawn)
    assert result.shape == (views * 3, int(class_token) + drawn.visible.shape[-1], DIM)
    tokens = encoder.patch_embed(images) + sincos_positions(grid, DIM)
    for k in range(views):
        for b in range(3):
            expected = encode_by_hand(encoder, tokens[b, drawn.visible[k, b]])
            torch.testing.assert_close(result[k * 3 + b], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
@torch.no_grad()
def test_mask_token_takes_the_place_of_a_patch_before_positions(
    class_token: bool, views: int, size: tuple[int, int]
) -> None:
    encoder = make_encoder(class_token=class_token, masked_tokens="mask_token")
    assert encoder.mask_token is not None
    grid = (size[0] // PATCH, size[1] // PATCH)
    images, drawn = make_images(3, 3, size), draw_views(3, grid, views)
    result = encoder(images, drawn)
    assert result.shape == (views * 3, int(class_token) + grid[0] * grid[1], DIM)
    embedded, positions = encoder.patch_embed(images), sincos_positions(grid, DIM)
    for k in range(views):
        for b in range(3):
            tokens = embedded[b].clone()
            for token in drawn.masked[k, b].tolist():
                tokens[token] = encoder.mask_token[0, 0]
            expected = encode_by_hand(encoder, tokens + positions)
            torch.testing.assert_close(result[k * 3 + b], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masked_tokens", ["drop", "mask_token"])
@pytest.mark.parametrize("value", [1e6, float("nan")])
@torch.no_grad()
def test_hidden_pixels_do_not_reach_their_view(masked_tokens: str, value: float) -> None:
    encoder = make_encoder(masked_tokens=masked_tokens)
    images, drawn = make_images(3, 3, (16, 16)), draw_views(3, (4, 4))
    clean = encoder(images, drawn).unflatten(0, (2, 3))
    for k in range(2):
        painted = encoder(paint_hidden(images, drawn.mask[k], (4, 4), value), drawn).unflatten(0, (2, 3))
        assert torch.equal(painted[k], clean[k])
        assert not torch.equal(painted[1 - k], clean[1 - k])  # the other view sees some of these pixels


@pytest.mark.parametrize("masked_tokens", ["drop", "mask_token"])
def test_hidden_pixels_do_not_reach_a_gradient(masked_tokens: str) -> None:
    encoder = make_encoder(masked_tokens=masked_tokens)
    drawn = draw_views(3, (4, 4), views=1)
    images = make_images(3, 3, (16, 16)).requires_grad_()
    (encoder(images, drawn) ** 2).sum().backward()
    assert images.grad is not None
    influence = images.grad.abs().sum(dim=1).unflatten(-1, (4, PATCH)).unflatten(-3, (4, PATCH)).sum(dim=(-1, -3))
    assert torch.equal(influence.flatten(1) == 0, drawn.mask[0])


@pytest.mark.parametrize("size", [(16, 18), (15, 16)])
def test_sides_must_be_multiples_of_the_patch(size: tuple[int, int]) -> None:
    message = f"image size {size[0]}x{size[1]} is not divisible by the patch size 4"
    with pytest.raises(ValueError, match=message):
        make_encoder(size)
    with pytest.raises(ValueError, match=message):
        make_encoder()(make_images(1, 3, size))


@pytest.mark.parametrize("masked_tokens", ["drop", "mask_token"])
@pytest.mark.parametrize(("images", "grid"), [(2, (4, 4)), (1, (4, 4)), (3, (2, 4))])
def test_views_of_another_batch_or_grid_are_refused(masked_tokens: str, images: int, grid: tuple[int, int]) -> None:
    # One image would broadcast against three views, and ids of a smaller grid would gather the wrong places.
    with pytest.raises(ValueError, match="do not fit"):
        make_encoder(masked_tokens=masked_tokens)(make_images(images, 3, (16, 16)), draw_views(3, grid))


@pytest.mark.parametrize("views", [None, 1, 3])
def test_the_product_of_patches_is_the_convolution(views: int | None) -> None:
    encoder, images = make_encoder((8, 12), in_chans=2).double(), make_images(3, 2, (8, 12)).double()
    visible = None if views is None else draw_views(3, (2, 3), views).visible
    expected = encoder.patch_embed(images)
    expected = expected if visible is None else gather_tokens(expected, visible)
    found = encoder.patch_embed.product(images, visible)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    leaves = tuple(encoder.patch_embed.parameters())
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad))


def test_attention_is_torch_s_fused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = torch.nn.functional.scaled_dot_product_attention
    calls = 0

    def counted(*tensors: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return fused(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    make_encoder()(make_images(2, 3, (16, 16)))
    assert calls == DEPTH
