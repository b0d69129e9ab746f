"""The GELU of compiled blocks, by its values and gradients in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from dmjd.models.mlp import Gelu, ShortGelu, gelu
from dmjd.models.norm import layer_norm
from dmjd.models.vit import EncoderBlock
from dmjd.parallel.apply import checkpoint_block


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_value_and_gradient_of_every_number_of_half_precision_are_those_of_float64_rounded(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = x[x.isfinite()].requires_grad_()
    wide = x.detach().double().requires_grad_()
    found, expected = ShortGelu.apply(x), F.gelu(wide)
    slopes = torch.autograd.grad(found.sum(), x) + torch.autograd.grad(expected.sum(), wide)
    half_a_step = torch.finfo(dtype).eps / 2
    for value, exact in ((found.double(), expected), (slopes[0].double(), slopes[1])):
        error = (value - exact).abs() - 1.01 * half_a_step * exact.abs()
        assert error.max() < 5e-7


def test_outside_of_a_compiled_graph_on_cuda_it_is_torch_s() -> None:
    x = torch.randn(1000).bfloat16()
    assert torch.equal(gelu(x), F.gelu(x))
    assert torch.equal(torch.compile(Gelu(), backend="eager")(x), F.gelu(x))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "selective", "full", "mlp"])
def test_a_compiled_block_follows_eager_mode(mode: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    eager = EncoderBlock(256, 4, 4.0, qkv_bias=True, norm_layer=layer_norm).cuda()
    block = copy.deepcopy(eager)
    checkpoint_block(block, mode)
    block.compile(fullgraph=True, dynamic=False)
    x = torch.randn(8, 50, 256, device="cuda", requires_grad=True)
    results = []
    for each in (eager, block):
        with torch.autocast("cuda", torch.bfloat16):
            out = each(x)
        results.append((out, *torch.autograd.grad(out.square().mean(), (x, *each.parameters()))))
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()
