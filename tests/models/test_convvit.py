"""The encoder against ConvMAE as its authors compute it: whole NCHW maps, the mask multiplied in before each 5 x 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.masking import MaskSpec
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.decoder import MAEDecoder
from dmjd.models.masked_image_model import MaskedImageModel
from dmjd.ops.views import Views

Grid = tuple[int, int]


class Layout(NamedTuple):
    """ConvViT-B or -L with thin layers and a shallow third stage."""

    embed_dims: tuple[int, int, int]
    depths: tuple[int, int, int]
    mlp_ratios: tuple[float, float, float]
    num_heads: int


B_LIKE = Layout((8, 12, 24), (2, 2, 3), (4, 4, 4), 3)
L_LIKE = Layout((12, 24, 32), (2, 2, 4), (8, 8, 4), 4)
LAYOUTS = pytest.mark.parametrize("layout", [B_LIKE, L_LIKE], ids=["base", "large"])


def make_encoder(layout: Layout, grid: Grid, *, in_chans: int = 3, multi_scale: bool = True) -> ConvViTEncoder:
    """Weights that keep activations near 1, and gains and biases that matter."""
    encoder = ConvViTEncoder(
        image_size=(16 * grid[0], 16 * grid[1]), in_chans=in_chans, multi_scale=multi_scale, **layout._asdict()
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter.copy_(0.3 * noise + ("norm" in name and name.endswith("weight")))
    return encoder.eval()


def make_images(batch: int, grid: Grid, channels: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, 16 * grid[0], 16 * grid[1], generator=generator, dtype=dtype)


def draw_views(views: int, batch: int, grid: Grid, pattern: Any = "block") -> Views:
    ratio = 0.5 if pattern == "block" else 0.75
    return MaskSpec(views=views, mask_ratio=ratio, pattern=pattern).draw(torch.arange(batch), grid, seed=0, epoch=0)[0]


def draw_scales(depth: int, rows: int) -> Tensor:
    """``[depth, 2, rows]`` where no branch, row or block is like its neighbour, and each branch drops some rows."""
    block, branch, row = torch.meshgrid(torch.arange(depth), torch.arange(2), torch.arange(rows), indexing="ij")
    return torch.tensor([0.0, 1.25, 2.0])[(block + 2 * branch + row) % 3]


class Outputs(NamedTuple):
    """Of the three stages before fusion, in the encoder's shapes, and of the encoder."""

    stage1: Tensor
    stage2: Tensor
    stage3: Tensor
    tokens: Tensor


def standardise(x: Tensor, dim: int, eps: float) -> Tensor:
    centred = x - x.mean(dim, keepdim=True)
    return centred / (centred.square().mean(dim, keepdim=True) + eps).sqrt()


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


class DenseConvMAE:
    """The reference: parameters by name; hidden tokens are computed too, and zeroed where the paper zeroes them."""

    def __init__(self, weights: Mapping[str, Tensor], layout: Layout) -> None:
        self.weights = weights
        self.layout = layout

    def __call__(self, images: Tensor, views: Views | None = None, scales: Tensor | None = None) -> Outputs:
        grid = (images.shape[2] // 16, images.shape[3] // 16)
        count = grid[0] * grid[1]
        if views is None:
            rows, ids = images.shape[0], torch.arange(count).expand(images.shape[0], -1)
            keep = torch.ones(rows, 1, *grid, dtype=images.dtype)
        else:
            images, ids = images.repeat(views.mask.shape[0], 1, 1, 1), views.visible.flatten(0, 1)
            rows = images.shape[0]
            keep = (~views.mask).reshape(rows, 1, *grid).to(images.dtype)
        depth1, depth2, depth3 = self.layout.depths
        ones = torch.ones(depth1 + depth2 + depth3, 2, rows)
        todo = iter((ones if scales is None else scales).to(images.dtype))
        chosen = torch.arange(rows).unsqueeze(1), ids
        x, maps = images, []
        for stage, (side, up) in enumerate(((4, 4), (2, 2)), 1):
            x = self.embed(x, f"patch_embed{stage}", side)
            mask = keep.repeat_interleave(up, 2).repeat_interleave(up, 3)
            for index in range(self.layout.depths[stage - 1]):
                x = self.conv_block(x, f"blocks{stage}.{index}", mask, next(todo))
            maps.append(x)
        x = self.embed(x, "patch_embed3", 2).flatten(2).transpose(1, 2)
        x = self.linear(x, "patch_embed4") + self.positions(grid).to(x.dtype)
        x = x[chosen]
        for index in range(depth3):
            x = self.vit_block(x, f"blocks3.{index}", next(todo))
        fused = x
        if views is not None and "stage1_output_decode.weight" in self.weights:
            for name, value, side in (("stage1_output_decode", maps[0], 4), ("stage2_output_decode", maps[1], 2)):
                fused = fused + self.conv(value, name, stride=side).flatten(2).transpose(1, 2)[chosen]
        blocks = []
        for value, side in zip(maps, (4, 2), strict=True):
            cut = value.reshape(rows, -1, grid[0], side, grid[1], side).permute(0, 2, 4, 3, 5, 1).flatten(1, 2)
            whole = value.permute(0, 2, 3, 1)
            blocks.append(whole if views is None else cut[chosen])
        return Outputs(blocks[0], blocks[1], x, self.norm(fused, "norm", -1, 1e-6))

    def conv(self, x: Tensor, name: str, **options: Any) -> Tensor:
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **options)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, x: Tensor, name: str, dim: int, eps: float) -> Tensor:
        shape = [1] * x.ndim
        shape[dim] = -1
        gain, shift = (self.weights[f"{name}.{part}"].view(shape) for part in ("weight", "bias"))
        return standardise(x, dim, eps) * gain + shift

    def embed(self, x: Tensor, name: str, side: int) -> Tensor:
        return gelu(self.norm(self.conv(x, f"{name}.proj", stride=side), f"{name}.norm", 1, 1e-5))

    def conv_block(self, x: Tensor, name: str, mask: Tensor, scale: Tensor) -> Tensor:
        first, second = scale.view(2, -1, 1, 1, 1)
        y = self.conv(self.norm(x, f"{name}.norm1", 1, 1e-5), f"{name}.conv1")
        y = self.conv(y * mask, f"{name}.attn", padding=2, groups=x.shape[1])
        x = x + first * self.conv(y, f"{name}.conv2")
        y = gelu(self.conv(self.norm(x, f"{name}.norm2", 1, 1e-5), f"{name}.mlp.fc1"))
        return x + second * self.conv(y, f"{name}.mlp.fc2")

    def vit_block(self, x: Tensor, name: str, scale: Tensor) -> Tensor:
        first, second = scale.view(2, -1, 1, 1)
        rows, count, width = x.shape
        qkv = self.linear(self.norm(x, f"{name}.norm1", -1, 1e-6), f"{name}.attn.qkv")
        q, k, v = qkv.view(rows, count, 3, self.layout.num_heads, -1).permute(2, 0, 3, 1, 4)
        seen = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        x = x + first * self.linear(seen.transpose(1, 2).reshape(rows, count, width), f"{name}.attn.proj")
        y = gelu(self.linear(self.norm(x, f"{name}.norm2", -1, 1e-6), f"{name}.mlp.fc1"))
        return x + second * self.linear(y, f"{name}.mlp.fc2")

    def positions(self, grid: Grid) -> Tensor:
        """MAE's: columns in the first half of the channels, rows in the second; rounded to float32 as in its files."""
        quarter = self.layout.embed_dims[2] // 4
        omega = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
        angles = [torch.arange(side, dtype=torch.float64).unsqueeze(1) * omega for side in grid]
        row, column = (torch.cat((angle.sin(), angle.cos()), 1) for angle in angles)
        table = torch.cat((column.repeat(grid[0], 1), row.repeat_interleave(grid[1], 0)), 1)
        return table.float()


def assert_equal(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-9) -> None:
    """Relative to the largest value, which must not be 0."""
    assert actual.shape == expected.shape, name
    size = expected.abs().max().item()
    assert size > 0, name
    assert (actual - expected).abs().max().item() <= tolerance * size, name


def gradients(tokens: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a loss to which every value matters differently; parameters that take no part are left out."""
    cotangent = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = torch.autograd.grad((tokens.double() * cotangent).sum(), list(weights.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(weights, found, strict=True) if gradient is not None}


def copied(encoder: ConvViTEncoder) -> dict[str, Tensor]:
    return {name: value.detach().clone().requires_grad_() for name, value in encoder.named_parameters()}


def check_against_dense(
    encoder: ConvViTEncoder, layout: Layout, images: Tensor, views: Views | None = None, scales: Tensor | None = None
) -> dict[str, Tensor]:
    """Every stage, the tokens and all gradients, which come back."""
    weights = copied(encoder)
    expected = DenseConvMAE(weights, layout)(images, views, scales)
    with torch.no_grad():
        for name, stage in zip(Outputs._fields, encoder.forward_stages(images, views, scales), strict=False):
            assert_equal(stage, getattr(expected, name), name)
    tokens = encoder(images, views, scales)
    assert_equal(tokens, expected.tokens, "tokens")
    wanted, found = gradients(expected.tokens, weights), gradients(tokens, dict(encoder.named_parameters()))
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert_equal(gradient, wanted[name], name)
    return found


@LAYOUTS
@pytest.mark.parametrize("grid", [(4, 4), (14, 14), (16, 16), (12, 20)], ids=lambda grid: f"{grid[0]}x{grid[1]}")
@pytest.mark.parametrize("pattern", ["uniform", "block"])
@pytest.mark.parametrize("views", [1, 2, 3])
def test_visible_tokens_are_those_of_the_masked_maps(layout: Layout, grid: Grid, pattern: Any, views: int) -> None:
    encoder = make_encoder(layout, grid).double()
    batch = 3 if grid == (4, 4) else 1  # large maps take their time
    found = check_against_dense(encoder, layout, make_images(batch, grid), draw_views(views, batch, grid, pattern))
    assert found.keys() == dict(encoder.named_parameters()).keys()


def test_visible_tokens_without_fusion() -> None:
    encoder = make_encoder(B_LIKE, (4, 4), multi_scale=False).double()
    assert not any("output_decode" in name for name in encoder.state_dict())
    check_against_dense(encoder, B_LIKE, make_images(2, (4, 4)), draw_views(2, 2, (4, 4)))


def test_a_view_that_hides_nothing_is_the_whole_image_and_fusion() -> None:
    encoder, images = make_encoder(B_LIKE, (2, 3)).double(), make_images(2, (2, 3))
    ids = torch.arange(6).expand(1, 2, 6)
    views = Views(visible=ids, masked=ids[..., :0], restore=ids, mask=torch.zeros(1, 2, 6, dtype=torch.bool))
    check_against_dense(encoder, B_LIKE, images, views)
    whole, blocks = encoder.forward_stages(images), encoder.forward_stages(images, views)
    assert_equal(blocks[2], whole[2], "stage3")


@LAYOUTS
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)])
def test_whole_images_are_the_maps_without_mask_and_fusion(layout: Layout, grid: Grid) -> None:
    encoder = make_encoder(layout, grid).double()
    found = check_against_dense(encoder, layout, make_images(2, grid))
    silent = {name for name, _ in encoder.named_parameters()} - found.keys()
    assert silent == {f"stage{stage}_output_decode.{part}" for stage in (1, 2) for part in ("weight", "bias")}


@pytest.mark.parametrize("grid", [(6, 2), (1, 1), (4, 4)])
def test_other_sizes_than_that_of_pretraining(grid: Grid) -> None:
    encoder = make_encoder(B_LIKE, (4, 6)).double()
    check_against_dense(encoder, B_LIKE, make_images(2, grid))
    if grid != (1, 1):
        check_against_dense(encoder, B_LIKE, make_images(2, grid), draw_views(2, 2, grid))


@pytest.mark.parametrize("channels", [1, 5])
def test_any_number_of_channels(channels: int) -> None:
    encoder = make_encoder(B_LIKE, (4, 4), in_chans=channels).double()
    check_against_dense(encoder, B_LIKE, make_images(2, (4, 4), channels), draw_views(2, 2, (4, 4)))


@LAYOUTS
@pytest.mark.parametrize("masked", [True, False], ids=["views", "whole"])
def test_branch_scales_act_on_every_residual_branch(layout: Layout, masked: bool) -> None:
    encoder, grid = make_encoder(layout, (4, 4)).double(), (4, 4)
    views = draw_views(2, 3, grid) if masked else None
    scales = draw_scales(len(encoder.blocks), 6 if masked else 3)
    assert len(encoder.blocks) == sum(layout.depths)
    check_against_dense(encoder, layout, make_images(3, grid), views, scales)


@pytest.mark.parametrize("masked", [True, False], ids=["views", "whole"])
def test_a_dropped_branch_leaves_its_row_alone(masked: bool) -> None:
    encoder, grid = make_encoder(B_LIKE, (4, 4)).double(), (4, 4)
    images, views = make_images(3, grid), draw_views(1, 3, grid) if masked else None
    depth = len(encoder.blocks)
    plain = encoder(images, views)
    assert torch.equal(encoder(images, views, torch.ones(depth, 2, 3)), plain)
    for index in range(depth):
        for branch in range(2):
            scales = torch.ones(depth, 2, 3)
            scales[index, branch, 1] = 0
            rows = encoder(images, views, scales)
            assert torch.equal(rows[[0, 2]], plain[[0, 2]]), index
            assert not torch.equal(rows[1], plain[1]), index
    nothing = encoder(images, views, torch.zeros(depth, 2, 3))
    for stage in (encoder.blocks1, encoder.blocks2, encoder.blocks3):
        del stage[:]
    assert torch.equal(nothing, encoder(images, views))


@LAYOUTS
@pytest.mark.parametrize("pattern", ["uniform", "block"])
def test_bfloat16_errs_as_little_as_the_maps_do(layout: Layout, pattern: Any) -> None:
    grid = (8, 8)
    encoder, images = make_encoder(layout, grid), make_images(4, grid, dtype=torch.float32)
    views, weights = draw_views(2, 4, grid, pattern), copied(encoder)
    exact_weights = {name: value.detach().double().requires_grad_() for name, value in weights.items()}
    exact = DenseConvMAE(exact_weights, layout)(images.double(), views).tokens
    with torch.autocast("cpu", torch.bfloat16):
        ours, dense = encoder(images, views), DenseConvMAE(weights, layout)(images, views).tokens

    def error(value: Tensor, truth: Tensor) -> float:
        return ((value - truth).norm() / truth.norm()).item()

    assert 0 < error(ours, exact) < min(0.02, 1.25 * error(dense, exact))
    truth = gradients(exact, exact_weights)
    found, wanted = gradients(ours, dict(encoder.named_parameters())), gradients(dense, weights)

    def joined(parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([part.flatten().double() for part in parts.values()])

    assert error(joined(found), joined(truth)) < 1.5 * error(joined(wanted), joined(truth))
    for name, gradient in found.items():
        # On a CPU torch sums the gradients of a bfloat16 LayerNorm's gain and shift in bfloat16, hence the wide bound.
        assert error(gradient, truth[name]) < (0.2 if "norm" in name else 0.06), name


@pytest.mark.parametrize("value", [1e6, float("nan")])
@torch.no_grad()
def test_hidden_pixels_change_no_bit_of_their_view(value: float) -> None:
    grid = (4, 6)
    encoder, images, views = (
        make_encoder(B_LIKE, grid),
        make_images(3, grid, dtype=torch.float32),
        draw_views(2, 3, grid),
    )
    clean = encoder(images, views).unflatten(0, (2, 3))
    for k in range(2):
        hidden = views.mask[k].unflatten(-1, grid).repeat_interleave(16, -2).repeat_interleave(16, -1)
        painted = encoder(images.masked_fill(hidden.unsqueeze(1), value), views).unflatten(0, (2, 3))
        assert torch.equal(painted[k], clean[k])
        assert not torch.equal(painted[1 - k], clean[1 - k])  # the other view sees some of these pixels


def test_hidden_pixels_get_no_gradient_and_visible_ones_do() -> None:
    grid = (4, 6)
    encoder, views = make_encoder(B_LIKE, grid), draw_views(1, 3, grid)
    images = make_images(3, grid, dtype=torch.float32).requires_grad_()
    encoder(images, views).square().sum().backward()
    assert images.grad is not None
    influence = images.grad.abs().sum(1).unflatten(-1, (grid[1], 16)).unflatten(-3, (grid[0], 16)).sum((-1, -3))
    assert torch.equal(influence.flatten(1) == 0, views.mask[0])


def test_attributes_and_what_a_checkpoint_holds() -> None:
    encoder = make_encoder(L_LIKE, (3, 5))
    assert (encoder.grid, encoder.patch_size, encoder.embed_dim) == ((3, 5), 16, 32)
    assert (encoder.num_prefix_tokens, encoder.mask_token) == (0, None)
    assert encoder.grid_of(make_images(1, (2, 4))) == (2, 4)
    names = {name for name, _ in encoder.named_parameters()}
    assert set(encoder.state_dict()) == names  # positions are a function of the grid
    assert all(parameter.requires_grad for parameter in encoder.parameters())
    assert len({id(block) for block in encoder.blocks}) == 2 + 2 + 4


def test_weights_start_as_convmaes() -> None:
    torch.manual_seed(0)
    layout = Layout((16, 24, 48), (1, 1, 1), (4, 4, 4), 4)
    encoder = ConvViTEncoder(image_size=(32, 32), in_chans=3, **layout._asdict())
    decoder = MAEDecoder(
        encoder_dim=48, grid=(2, 2), prefix_tokens=0, dim=32, depth=1, num_heads=4, mlp_ratio=layout.mlp_ratios[0]
    )
    model = MaskedImageModel(encoder, decoder, None, 7)
    convolutions = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            flat = module.weight.detach().flatten(1)
            xavier = isinstance(module, nn.Linear) or name == "encoder.patch_embed3.proj"
            bound = math.sqrt(6 / sum(flat.shape)) if xavier else flat.shape[1] ** -0.5  # torch's own
            assert 0.95 * bound < flat.abs().max().item() <= bound, name
            assert module.bias is not None
            assert (not module.bias.any()) == isinstance(module, nn.Linear), name
            convolutions += isinstance(module, nn.Conv2d)
        elif isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, torch.ones_like(module.weight)), name
            assert not module.bias.any(), name
    assert convolutions == 3 + 2 * 5 + 2


@pytest.mark.parametrize("size", [(64, 72), (60, 64)])
def test_sides_must_be_multiples_of_16(size: tuple[int, int]) -> None:
    message = f"image size {size[0]}x{size[1]} is not divisible by the patch size 16"
    with pytest.raises(ValueError, match=message):
        ConvViTEncoder(image_size=size, in_chans=3, **B_LIKE._asdict())
    encoder = make_encoder(B_LIKE, (4, 4))
    with pytest.raises(ValueError, match=message):
        encoder(torch.zeros(1, 3, *size))
    with pytest.raises(ValueError, match=message):
        encoder(torch.zeros(1, 3, *size), draw_views(1, 1, (4, 4)))


@pytest.mark.parametrize(("images", "grid"), [(2, (4, 4)), (1, (4, 4)), (3, (2, 4))])
def test_views_of_another_batch_or_grid_are_refused(images: int, grid: Grid) -> None:
    views = draw_views(2, 3, grid, "uniform")
    message = f"views of 3 images with {grid[0] * grid[1]} tokens do not fit {images} images with 4x4 tokens"
    with pytest.raises(ValueError, match=message):
        make_encoder(B_LIKE, (4, 4))(make_images(images, (4, 4)), views)


@pytest.mark.parametrize("field", ["embed_dims", "depths", "mlp_ratios"])
@pytest.mark.parametrize("count", [2, 4])
def test_there_are_three_stages(field: str, count: int) -> None:
    arguments = B_LIKE._asdict() | {field: (4,) * count}
    with pytest.raises(ValueError, match=f"{field} must hold one value for each of the 3 stages, got .4, 4"):
        ConvViTEncoder(image_size=(64, 64), in_chans=3, **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_ratio": 0.99}, "mask_ratio=0.99"),
        ({"mask_ratio": 1.0}, "mask_ratio"),
        ({"block": (3, 3)}, "block 3x3"),
    ],
)
def test_masks_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskSpec(**options).plan((4, 4))
