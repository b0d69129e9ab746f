from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dmjd.masking import MaskedViews, MaskSpec
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder, VisibleBranch
from dmjd.models.masked_image_model import Encoder, MaskedImageModel
from dmjd.models.vit import ViTEncoder

DIM, PATCH, GRID, TARGET_DIM = 32, 4, (4, 4), 7
N = GRID[0] * GRID[1]


def make_encoder(*, class_token: bool = True, masked_tokens: str = "drop") -> ViTEncoder:
    return ViTEncoder(
        image_size=(GRID[0] * PATCH, GRID[1] * PATCH),
        patch_size=PATCH,
        in_chans=3,
        embed_dim=DIM,
        depth=1,
        num_heads=4,
        class_token=class_token,
        masked_tokens=masked_tokens,
    )


def make_decoder(encoder: Encoder) -> MAEDecoder:
    return MAEDecoder(
        encoder_dim=DIM,
        grid=GRID,
        prefix_tokens=encoder.num_prefix_tokens,
        dim=48,
        depth=1,
        num_heads=4,
        mlp_ratio=2.0,
    )


def make_model(kind: str, *, class_token: bool = True, visible: bool = True, seed: int = 0) -> MaskedImageModel:
    """``kind`` "decoder" is MAE's or DMJD's layout, "linear" SimMIM's or MaskFeat's."""
    torch.manual_seed(seed)
    encoder = make_encoder(class_token=class_token, masked_tokens="drop" if kind == "decoder" else "mask_token")
    branch = VisibleBranch(encoder_dim=DIM, width=40, target_dim=TARGET_DIM) if visible else None
    return MaskedImageModel(encoder, make_decoder(encoder) if kind == "decoder" else None, branch, TARGET_DIM)


def make_images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, GRID[0] * PATCH, GRID[1] * PATCH, generator=torch.Generator().manual_seed(1))


def draw(views: int = 2, batch: int = 3) -> MaskedViews:
    return MaskSpec(views=views, mask_ratio=0.6, pattern="uniform").draw(torch.arange(batch), GRID, seed=0, epoch=0)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def mae(dim: int, depth: int, heads: int) -> MaskedImageModel:
    with torch.device("meta"):  # shapes alone: no memory, no initialisation
        encoder = ViTEncoder(
            image_size=(224, 224), patch_size=16, in_chans=3, embed_dim=dim, depth=depth, num_heads=heads
        )
        decoder = MAEDecoder(
            encoder_dim=dim, grid=encoder.grid, prefix_tokens=1, dim=512, depth=8, num_heads=16, mlp_ratio=4.0
        )
        return MaskedImageModel(encoder, decoder, None, target_dim=16 * 16 * 3)


def test_mae_base_has_the_official_size() -> None:
    model = mae(768, 12, 12)
    assert count(model) == 111_655_680
    assert count(model) == 111_907_840 - 197 * 768 - 197 * 512  # all of MAE's, less its two frozen position tables
    assert count(model.encoder) == 85_798_656 - 197 * 768


def test_mae_large_has_the_official_size() -> None:
    assert count(mae(1024, 24, 16)) == 329_541_888 - 197 * 1024 - 197 * 512 == 329_239_296


def test_the_visible_branch_adds_its_own_parameters_only() -> None:
    branch = VisibleBranch(encoder_dim=768, width=512, target_dim=108)
    projector = (768 * 512 + 512 + 1024) + (512 * 512 + 512 + 1024) + (512 * 512 + 512)
    assert count(branch) == projector + 512 * 108 + 108
    assert count(make_model("decoder")) - count(make_model("decoder", visible=False)) == count(
        VisibleBranch(encoder_dim=DIM, width=40, target_dim=TARGET_DIM)
    )


@pytest.mark.parametrize("kind", ["decoder", "linear"])
def test_linear_layers_and_patch_convolution_start_xavier_uniform(kind: str) -> None:
    model = make_model(kind)
    matrices = {
        name: module.weight.detach().flatten(1)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }
    assert "encoder.patch_embed.proj" in matrices
    assert "head" in matrices
    for name, flat in matrices.items():
        bound = math.sqrt(6 / sum(flat.shape))
        assert 0.98 * bound < flat.abs().max().item() <= bound, name
        if flat.numel() > 1000:  # a uniform distribution has the standard deviation bound / sqrt(3)
            assert flat.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
            assert abs(flat.mean().item()) < 0.05 * bound, name


def test_biases_and_norms_start_neutral() -> None:
    model = make_model("decoder")
    norms = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert torch.equal(module.bias, torch.zeros_like(module.bias))
        if isinstance(module, nn.LayerNorm) and module.elementwise_affine:
            norms += 1
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert torch.equal(module.bias, torch.zeros_like(module.bias))
    assert norms == 3 + 3 + 2  # encoder, decoder, visible branch
    assert isinstance(model.encoder, ViTEncoder)
    bias = model.encoder.patch_embed.proj.bias  # MAE leaves this one at torch's default
    assert isinstance(bias, Tensor)
    assert 0 < bias.abs().max().item() <= 1 / math.sqrt(3 * PATCH * PATCH)


@pytest.mark.parametrize("kind", ["decoder", "linear"])
def test_tokens_start_normal_with_deviation_002(kind: str) -> None:
    tokens: dict[str, list[Tensor]] = {"cls_token": [], "mask_token": []}
    for seed in range(40):
        for name, parameter in make_model(kind, seed=seed).named_parameters():
            if name.endswith("_token"):
                tokens[name.split(".")[-1]].append(parameter.detach().flatten())
    for name, values in tokens.items():
        pooled = torch.cat(values)
        assert len(values) == 40, name
        assert pooled.std().item() == pytest.approx(0.02, rel=0.05), name
        assert abs(pooled.mean().item()) < 0.002, name
        assert pooled.abs().max().item() > 0.05, name  # normal, not uniform, and not cut at two deviations


def test_weights_are_a_function_of_the_seed() -> None:
    first, again, other = (make_model("decoder", seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["encoder.cls_token"], other["encoder.cls_token"])


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("views", [1, 2])
@torch.no_grad()
def test_decoder_layout_equals_its_parts(class_token: bool, views: int) -> None:
    model, images, masked_views = make_model("decoder", class_token=class_token), make_images(), draw(views)
    assert model.decoder is not None
    assert model.visible_branch is not None
    prediction = model(images, masked_views)
    encoded = model.encoder(images, masked_views.views)
    everything = torch.arange(N).expand(views, 3, N)
    decoded = model.head(model.decoder(encoded, masked_views.views, everything))
    for row in range(views * 3):
        ids = masked_views.predicted[row // 3, row % 3]
        torch.testing.assert_close(prediction.masked[row], decoded[row, ids], rtol=1e-5, atol=1e-6)
    shown = model.visible_branch(encoded[:, int(class_token) :])
    assert shown.shape[1] == masked_views.views.visible.shape[-1]
    assert prediction.visible is not None
    torch.testing.assert_close(prediction.visible, shown, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("views", [1, 2])
@torch.no_grad()
def test_linear_layout_reads_the_encoders_own_tokens(class_token: bool, views: int) -> None:
    model, images, masked_views = make_model("linear", class_token=class_token), make_images(), draw(views)
    assert model.visible_branch is not None
    prediction = model(images, masked_views)
    encoded = model.encoder(images, masked_views.views)[:, int(class_token) :]
    assert prediction.visible is not None
    for row in range(views * 3):
        ids = masked_views.predicted[row // 3, row % 3]
        visible = masked_views.views.visible[row // 3, row % 3]
        torch.testing.assert_close(prediction.masked[row], model.head(encoded[row, ids]), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            prediction.visible[row], model.visible_branch(encoded[row, visible]), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("kind", ["decoder", "linear"])
@torch.no_grad()
def test_predicted_ids_choose_tokens_and_their_order(kind: str) -> None:
    model, images, masked_views = make_model(kind), make_images(), draw()
    everything = torch.arange(N).expand(2, 3, N)
    generator = torch.Generator().manual_seed(5)
    subset = torch.stack([torch.randperm(N, generator=generator)[:5] for _ in range(6)]).view(2, 3, 5)
    full = model(images, MaskedViews(masked_views.views, everything))
    some = model(images, MaskedViews(masked_views.views, subset))
    assert full.masked.shape == (6, N, TARGET_DIM)
    assert some.masked.shape == (6, 5, TARGET_DIM)
    for k in range(2):
        for b in range(3):
            expected = full.masked[k * 3 + b][subset[k, b]]
            torch.testing.assert_close(some.masked[k * 3 + b], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(some.visible, full.visible)  # what is predicted is the masked branch's business alone


@pytest.mark.parametrize("kind", ["decoder", "linear"])
@torch.no_grad()
def test_no_visible_prediction_without_the_branch(kind: str) -> None:
    prediction = make_model(kind, visible=False)(make_images(), draw())
    assert prediction.visible is None
    assert prediction.masked.shape[-1] == TARGET_DIM


@pytest.mark.parametrize("kind", ["decoder", "linear"])
@torch.no_grad()
def test_hidden_pixels_reach_neither_branch(kind: str) -> None:
    model, images, masked_views = make_model(kind), make_images(), draw()
    clean = model(images, masked_views)
    for k in range(2):
        hidden = masked_views.views.mask[k].unflatten(-1, GRID)
        pixels = hidden.repeat_interleave(PATCH, -2).repeat_interleave(PATCH, -1)
        painted = model(images.masked_fill(pixels[:, None], 1e6), masked_views)
        rows = slice(k * 3, k * 3 + 3)
        assert torch.equal(painted.masked[rows], clean.masked[rows])
        assert torch.equal(painted.visible[rows], clean.visible[rows])
        assert not torch.equal(painted.masked, clean.masked)


@pytest.mark.parametrize("kind", ["decoder", "linear"])
@pytest.mark.parametrize("class_token", [True, False])
def test_every_parameter_learns(kind: str, class_token: bool) -> None:
    model = make_model(kind, class_token=class_token)
    prediction = model(make_images(), draw())
    (prediction.masked.square().sum() + prediction.visible.square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


def test_a_linear_head_needs_the_encoder_to_keep_hidden_tokens() -> None:
    with pytest.raises(ValueError, match="needs masked_tokens='mask_token'"):
        MaskedImageModel(make_encoder(masked_tokens="drop"), None, None, TARGET_DIM)


def test_a_decoder_needs_the_encoder_to_drop_hidden_tokens() -> None:
    encoder = make_encoder(masked_tokens="mask_token")
    with pytest.raises(ValueError, match="needs masked_tokens='drop'"):
        MaskedImageModel(encoder, make_decoder(encoder), None, TARGET_DIM)


def make_convvit(*, multi_scale: bool = True) -> MaskedImageModel:
    torch.manual_seed(0)
    encoder = ConvViTEncoder(
        image_size=(GRID[0] * 16, GRID[1] * 16),
        in_chans=3,
        embed_dims=(8, 12, DIM),
        depths=(1, 1, 1),
        mlp_ratios=(2, 2, 2),
        num_heads=4,
        multi_scale=multi_scale,
    )
    branch = VisibleBranch(encoder_dim=DIM, width=40, target_dim=TARGET_DIM)
    return MaskedImageModel(encoder, make_decoder(encoder), branch, TARGET_DIM)


def make_large_images() -> Tensor:
    return torch.randn(3, 3, GRID[0] * 16, GRID[1] * 16, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_convvit_takes_the_place_of_vit() -> None:
    model, images, masked_views = make_convvit(), make_large_images(), draw()
    assert model.decoder is not None
    assert model.visible_branch is not None
    prediction = model(images, masked_views)
    encoded = model.encoder(images, masked_views.views)
    assert torch.equal(prediction.masked, model.head(model.decoder(encoded, *masked_views)))
    assert torch.equal(prediction.visible, model.visible_branch(encoded))


@torch.no_grad()
def test_pixels_hidden_from_convvit_reach_neither_branch() -> None:
    model, images, masked_views = make_convvit(), make_large_images(), draw()
    clean = model(images, masked_views)
    for k in range(2):
        hidden = masked_views.views.mask[k].unflatten(-1, GRID)
        pixels = hidden.repeat_interleave(16, -2).repeat_interleave(16, -1)
        painted = model(images.masked_fill(pixels[:, None], 1e6), masked_views)
        rows = slice(k * 3, k * 3 + 3)
        assert torch.equal(painted.masked[rows], clean.masked[rows])
        assert torch.equal(painted.visible[rows], clean.visible[rows])
        assert not torch.equal(painted.masked, clean.masked)


@pytest.mark.parametrize("multi_scale", [True, False])
def test_every_parameter_of_convvit_learns(multi_scale: bool) -> None:
    model = make_convvit(multi_scale=multi_scale)
    prediction = model(make_large_images(), draw())
    (prediction.masked.square().sum() + prediction.visible.square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


@pytest.mark.parametrize("kind", ["vit", "convvit"])
def test_a_decoder_serves_one_image_size(kind: str) -> None:
    model, images = (make_model("decoder"), make_images()) if kind == "vit" else (make_convvit(), make_large_images())
    half = images[..., : images.shape[-1] // 2]
    views = MaskSpec(views=1, mask_ratio=0.5, pattern="uniform").draw(torch.arange(3), (4, 2), seed=0, epoch=0)
    model.encoder(half, views.views)
    with pytest.raises(ValueError, match=r"the decoder was built for \(4, 4\) tokens, got \(4, 2\)"):
        model(half, views)
