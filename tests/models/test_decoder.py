from __future__ import annotations

import math

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from dmjd.masking import MaskedViews, MaskSpec
from dmjd.models.decoder import MAEDecoder, SelectiveBlock, VisibleBranch
from dmjd.models.norm import layer_norm
from dmjd.positions import sincos_positions

ENCODER_DIM, DIM, GRID = 24, 32, (3, 4)
N = GRID[0] * GRID[1]


def fill(module: nn.Module) -> None:
    """Weights far from any initialisation, so that each of them matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def make_decoder(prefix: int) -> MAEDecoder:
    decoder = MAEDecoder(
        encoder_dim=ENCODER_DIM, grid=GRID, prefix_tokens=prefix, dim=DIM, depth=2, num_heads=4, mlp_ratio=2.0
    )
    fill(decoder)
    return decoder.eval()


def timm_block(block: nn.Module) -> Block:
    """timm's own block with the weights of ``block``: it computes every token."""
    whole = Block(DIM, 4, 2.0, qkv_bias=True, norm_layer=layer_norm).to(next(block.parameters()).dtype)
    whole.load_state_dict(block.state_dict(), strict=True)
    return whole


def draw(views: int, batch: int, kind: str = "hidden") -> MaskedViews:
    """``kind``, what is predicted: "hidden" tokens, a "subset", "visible" ones too, or "any" in any order."""
    ratio = {"subset": 0.3, "visible": 0.9}.get(kind)
    spec = MaskSpec(views=views, mask_ratio=0.6, pattern="uniform", loss_ratio=ratio)
    drawn = spec.draw(torch.arange(batch), GRID, seed=0, epoch=0)
    if kind != "any":
        return drawn
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(N, generator=generator)[:5] for _ in range(views * batch)])
    return drawn._replace(predicted=ids.view(views, batch, 5))


PREDICTED = pytest.mark.parametrize(
    ("views", "kind"), [(1, "hidden"), (3, "hidden"), (1, "subset"), (1, "visible"), (2, "any")]
)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("prefix", [0, 1])
@PREDICTED
@torch.no_grad()
def test_decoder_rebuilds_each_grid_by_hand(prefix: int, views: int, kind: str) -> None:
    decoder, (drawn, predicted) = make_decoder(prefix), draw(views, 3, kind)
    visible = drawn.visible.shape[-1]
    tokens = random(views * 3, prefix + visible, ENCODER_DIM)
    result = decoder(tokens, drawn, predicted)
    assert result.shape == (views * 3, predicted.shape[-1], DIM)
    positions = sincos_positions(GRID, DIM)
    for k in range(views):
        for b in range(3):
            embedded = decoder.embed(tokens[k * 3 + b])
            grid = decoder.mask_token[0, 0].repeat(N, 1)
            for slot, token in enumerate(drawn.visible[k, b].tolist()):
                grid[token] = embedded[prefix + slot]
            x = torch.cat((embedded[:prefix], grid + positions))[None]  # the prefix has no position of its own
            for block in decoder.blocks:
                x = timm_block(block)(x)
            expected = decoder.norm(x)[0, prefix:][predicted[k, b]]
            torch.testing.assert_close(result[k * 3 + b], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@PREDICTED
def test_selecting_before_the_last_block_equals_selecting_after_it(prefix: int, views: int, kind: str) -> None:
    block = SelectiveBlock(DIM, 4, 2.0, qkv_bias=True, norm_layer=layer_norm).double()
    fill(block)
    whole, ids = timm_block(block), draw(views, 2, kind).predicted
    x = random(views * 2, prefix + N, DIM).double().requires_grad_()
    some = block(x, ids, prefix)
    rows = torch.arange(views * 2).unsqueeze(1)
    selected = whole(x)[rows, prefix + ids.flatten(0, 1)]
    cotangent = random(*selected.shape).double()
    found = torch.autograd.grad((some * cotangent).sum(), [x, *block.parameters()])
    expected = torch.autograd.grad((selected * cotangent).sum(), [x, *whole.parameters()])
    names = ["x", *dict(block.named_parameters())]
    assert names == ["x", *dict(whole.named_parameters())]
    for name, ours, full in zip(["output", *names], [some, *found], [selected, *expected], strict=True):
        assert ours.shape == full.shape, name
        assert full.any(), name
        assert (ours - full).abs().max().item() <= 1e-12 * full.abs().max().item(), name


def test_prefix_takes_part_in_attention() -> None:
    decoder, (drawn, predicted) = make_decoder(1), draw(1, 2)
    tokens = random(2, 1 + drawn.visible.shape[-1], ENCODER_DIM).requires_grad_()
    (decoder(tokens, drawn, predicted) ** 2).sum().backward()
    assert tokens.grad is not None
    assert bool((tokens.grad[:, 0].abs().sum(dim=-1) > 0).all())


def test_layers_are_maes() -> None:
    decoder = make_decoder(1)
    assert decoder.dim == DIM
    assert len(decoder.blocks) == 2
    norms = [module for module in decoder.modules() if isinstance(module, nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [1e-6] * 5
    # embed, mask token, final norm, and two blocks of: two norms, qkv and projection, MLP of ratio 2; no positions
    block = 4 * DIM + (DIM * 3 * DIM + 3 * DIM) + (DIM * DIM + DIM) + (DIM * 2 * DIM + 2 * DIM) + (2 * DIM * DIM + DIM)
    expected = ENCODER_DIM * DIM + DIM + DIM + 2 * DIM + 2 * block
    assert sum(parameter.numel() for parameter in decoder.parameters()) == expected
    assert set(decoder.state_dict()) == {name for name, _ in decoder.named_parameters()}


def test_visible_branch_has_the_papers_layers() -> None:
    branch = VisibleBranch(encoder_dim=ENCODER_DIM, width=40, target_dim=7)
    linears = [module for module in branch.projector if isinstance(module, nn.Linear)]
    norms = [module for module in branch.projector if isinstance(module, nn.LayerNorm)]
    assert [(linear.in_features, linear.out_features) for linear in linears] == [(ENCODER_DIM, 40), (40, 40), (40, 40)]
    assert [norm.elementwise_affine for norm in norms] == [True, True, False]
    assert isinstance(branch.predictor, nn.Linear)
    assert (branch.predictor.in_features, branch.predictor.out_features) == (40, 7)
    assert all(linear.bias is not None for linear in (*linears, branch.predictor))


@torch.no_grad()
def test_visible_branch_equals_the_formula() -> None:
    branch = VisibleBranch(encoder_dim=ENCODER_DIM, width=40, target_dim=7).double()
    fill(branch)
    tokens = random(3, 5, ENCODER_DIM).double()
    result = branch(tokens)
    weights = list(branch.state_dict().values())  # in order of application

    def standardise(x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred / (centred.pow(2).mean(dim=-1, keepdim=True) + 1e-6).sqrt()

    x = tokens
    for weight, bias, gain, shift in (weights[0:4], weights[4:8]):
        x = standardise(x @ weight.T + bias) * gain + shift
        x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    x = standardise(x @ weights[8].T + weights[9])
    assert len(weights) == 12
    torch.testing.assert_close(result, x @ weights[10].T + weights[11], rtol=1e-12, atol=1e-12)
