from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.ops import gelu_hidden, gelu_mlp

Case = tuple[tuple[int, ...], int, int]  # x's shape, the hidden width, the output's


def make(case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    shape, hidden, out = case
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    depth = shape[-1]
    tensors = (
        draw(*shape),
        draw(hidden, depth) / depth**0.5,
        draw(hidden),
        draw(out, hidden) / hidden**0.5,
        draw(out),
    )
    return [tensor.to(device, dtype).requires_grad_() for tensor in tensors]


def definition(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    before = x @ weight1.T + bias1
    return (before * 0.5 * torch.erfc(-before / 2**0.5)) @ weight2.T + bias2


def gradients(result: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad(result, inputs, grad.to(result)))


@pytest.mark.parametrize("case", [((5, 7, 12), 20, 9), ((3,), 4, 5), ((0, 6), 8, 6), ((2, 3, 4, 4, 8), 16, 8)])
def test_equals_the_definition(case: Case) -> None:
    inputs = make(case)
    expected, result = definition(*inputs), gelu_mlp(*inputs)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-12)
    for found, wanted in zip(gradients(result, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-11)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks there itself
def test_opcheck_and_gradcheck() -> None:
    inputs = make(((2, 3, 4), 6, 5))
    torch.library.opcheck(torch.ops.dmjd.gelu_mlp.default, tuple(inputs))
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    backward = (grad, *(tensor.detach() for tensor in inputs[:4]))
    torch.library.opcheck(torch.ops.dmjd.gelu_mlp_backward.default, backward)
    assert torch.autograd.gradcheck(gelu_mlp, inputs)


def test_keeps_no_hidden_layer() -> None:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    inputs = make(((64, 8), 32, 8))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        gelu_mlp(*inputs)
    assert sum(kept) == sum(tensor.numel() for tensor in inputs[:4])


def test_autocast_rounds_as_linear_layers_do() -> None:
    x, weight1, bias1, weight2, bias2 = inputs = make(((40, 16), 32, 8), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)
        result = gelu_mlp(*inputs)
        found, wanted = gradients(result, inputs), gradients(expected, inputs)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, expected)
    assert all(tensor.dtype == torch.float32 for tensor in found)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks there itself
def test_compiles_without_a_break() -> None:
    inputs = make(((6, 4), 8, 4), torch.float32)
    compiled = torch.compile(gelu_mlp, fullgraph=True, backend="aot_eager")
    expected, result = gelu_mlp(*inputs), compiled(*inputs)
    assert torch.equal(result, expected)
    assert all(map(torch.equal, gradients(result, inputs), gradients(expected, inputs)))


def test_bad_arguments() -> None:
    x, weight1, bias1, weight2, bias2 = make(((2, 4), 8, 6), torch.float32)
    with pytest.raises(ValueError, match=r"expected x \[\.\.\., C\].*got x \[2, 4\], weight1 \[8, 3\]"):
        gelu_mlp(x, weight1[:, :3], bias1, weight2, bias2)
    with pytest.raises(ValueError, match=r"bias1 \[7\]"):
        gelu_mlp(x, weight1, bias1[:7], weight2, bias2)
    with pytest.raises(ValueError, match=r"bias2 \[5\]"):
        gelu_mlp(x, weight1, bias1, weight2, bias2[:5])
    with pytest.raises(ValueError, match=r"must be matrices, got \[8, 4, 1\]"):
        gelu_mlp(x, weight1.unsqueeze(2), bias1, weight2, bias2)
    with pytest.raises(ValueError, match="must be on one device, got x on cpu, weight1 on meta"):
        gelu_mlp(x, weight1.to("meta"), bias1, weight2, bias2)
    with pytest.raises(TypeError, match=r"weight2 must have x's floating dtype torch\.float32, got torch\.float64"):
        gelu_mlp(x, weight1, bias1, weight2.double(), bias2)
    with pytest.raises(TypeError, match=r"x must have x's floating dtype torch\.int64"):
        gelu_mlp(x.long(), weight1, bias1, weight2, bias2)


INTERPRETED = """
import torch
from dmjd.ops import gelu_mlp_kernels as kernels
draw = torch.Generator().manual_seed(0)
x, grad = (torch.randn(300, depth, generator=draw) for depth in (64, 128))
weight1, bias1 = torch.randn(256, 64, generator=draw) / 8, 2 * torch.randn(256, generator=draw)
weight2 = torch.randn(128, 256, generator=draw) / 11
before = (x.double() @ weight1.double().T + bias1).requires_grad_()
hidden = torch.nn.functional.gelu(before)
(expected,) = torch.autograd.grad(hidden, before, grad.double() @ weight2.double())
*found, sums = kernels.hidden_gradient(x, weight1, bias1, grad, weight2)
found.append(sums.sum(0))
wanted = expected, hidden.detach(), expected.sum(0)
for one, other in zip((*found, kernels.hidden_layer(x, weight1, bias1)), (*wanted, wanted[1]), strict=True):
    torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)
"""


def test_the_kernels_arithmetic_without_a_card() -> None:
    """Triton's interpreter runs them on the CPU, in float32; the rows do not fill the last tile."""
    pytest.importorskip("triton", reason="needs triton, which torch's CUDA builds bring")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        ((1000, 256), 2048, 256),
        ((3, 77, 64), 128, 192),
        ((1, 64), 256, 64),
        ((130, 60), 256, 64),  # these three are the references'
        ((130, 64), 100, 64),
        ((0, 64), 128, 64),
    ],
)
@pytest.mark.parametrize("hopper", [True, False])
def test_cuda_equals_the_definition(
    hopper: bool, case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hopper:  # the kernels in Triton, which every card has
        monkeypatch.setattr(gelu_hidden, "served", lambda *_: False)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        inputs = make(case, dtype, "cuda")
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        expected, result = definition(*exact), gelu_mlp(*inputs)
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
        for found, wanted in zip(
            [result, *gradients(result, inputs)], [expected, *gradients(expected, exact)], strict=True
        ):
            assert found.dtype == dtype
            scale = wanted.abs().max().item() if wanted.numel() else 1.0
            torch.testing.assert_close(found.double(), wanted, atol=tolerance * scale, rtol=tolerance)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.gpu
def test_cuda_takes_any_layout_and_repeats_bit_for_bit() -> None:
    inputs = make(((500, 128), 256, 128), torch.bfloat16, "cuda")
    strided = [tensor.detach().T.contiguous().T.requires_grad_() for tensor in inputs[:2]] + inputs[2:]
    runs = []
    for tensors in (inputs, strided, inputs):
        result = gelu_mlp(*tensors)
        runs.append([result, *gradients(result, tensors)])
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.gpu
def test_cuda_more_elements_than_32_bits_count() -> None:
    rows = 2**31 // 2048 + 200
    inputs = make(((8, 64), 2048, 64), torch.bfloat16, "cuda")
    x = inputs[0].detach().repeat(rows // 8 + 1, 1)[:rows].requires_grad_()
    result = gelu_mlp(x, *inputs[1:])
    (grad,) = torch.autograd.grad(result, x, torch.ones_like(result))
    small = gelu_mlp(*inputs)
    (small_grad,) = torch.autograd.grad(small, inputs[0], torch.ones_like(small))
    last = (rows - 1) % 8
    torch.testing.assert_close(result[-1], small[last], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(grad[-1], small_grad[last], atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_cuda_on_a_device_that_is_not_current() -> None:
    inputs = make(((256, 64), 128, 64), torch.bfloat16, "cuda:1")
    assert torch.cuda.current_device() == 0
    result = gelu_mlp(*inputs)
    found = gradients(result, inputs)
    torch.testing.assert_close(
        result.double(), definition(*(tensor.double() for tensor in inputs)), atol=0.05, rtol=0.05
    )
    assert all(tensor.device == result.device for tensor in found)


@pytest.mark.gpu
def test_cuda_graphs_of_torch_compile() -> None:
    inputs = make(((256, 64), 128, 64), torch.bfloat16, "cuda")
    compiled = torch.compile(gelu_mlp, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        result = compiled(*inputs)
        assert torch.equal(result, gelu_mlp(*inputs))
