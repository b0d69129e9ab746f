"""The kernels for Hopper, and what gelu_mlp takes them for."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dmjd.ops import _native, gelu_hidden, gelu_mlp, reference, status

Case = tuple[int, int, int, int]  # rows, and the widths of x, of the hidden layer and of its result

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100, H200 or GH200"
)


def make(case: Case, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """x, weight1, bias1, grad and weight2."""
    rows, depth, hidden, out = case
    generator = torch.Generator().manual_seed(0)
    sizes = (rows, depth), (hidden, depth), (hidden,), (rows, out), (out, hidden)
    scales = 1.0, depth**-0.5, 1.0, 1.0, out**-0.5
    return [
        (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(device, dtype)
        for size, scale in zip(sizes, scales, strict=True)
    ]


def definition(x: Tensor, weight1: Tensor, bias1: Tensor, grad: Tensor, weight2: Tensor) -> tuple[Tensor, ...]:
    """In float64; the second result is what multiplies the gradient."""
    before = x @ weight1.T + bias1
    below = 0.5 * torch.erfc(-before / 2**0.5)
    slope = below + before * torch.exp(-0.5 * before**2) / (2 * torch.pi) ** 0.5
    grad_hidden = (grad @ weight2) * slope
    pieces = grad_hidden.split(gelu_hidden.ROWS_PER_SUM)
    return grad_hidden, before * below, torch.stack([piece.sum(0) for piece in pieces])


def test_the_references_equal_the_definition() -> None:
    inputs = make((130, 12, 20, 8), torch.float64)
    expected = definition(*inputs)
    found = reference("gelu_hidden_gradient")(*inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5 if one.dtype == torch.float32 else 1e-12, rtol=1e-5)
    torch.testing.assert_close(reference("gelu_hidden")(*inputs[:3]), expected[1], atol=1e-12, rtol=1e-12)


def test_opcheck() -> None:
    inputs = make((130, 12, 20, 8), torch.float64)
    torch.library.opcheck(torch.ops.dmjd.gelu_hidden.default, tuple(inputs[:3]))
    torch.library.opcheck(torch.ops.dmjd.gelu_hidden_gradient.default, tuple(inputs))


def test_other_cards_and_sizes_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gelu_hidden, "_on_hopper", lambda device: True)
    monkeypatch.setattr(_native, "why_missing", lambda library: None)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    assert gelu_hidden.served(x, 256, 64, 128)
    assert not gelu_hidden.served(x, 128, 64)
    assert not gelu_hidden.served(x, 256, 64, 96)
    assert not gelu_hidden.served(x.float(), 256, 64)
    assert not gelu_hidden.served(x[:0], 256, 64)
    monkeypatch.setattr(_native, "why_missing", lambda library: "not built")
    assert not gelu_hidden.served(x, 256, 64)
    monkeypatch.setattr(gelu_hidden, "_on_hopper", lambda device: False)
    monkeypatch.setattr(_native, "why_missing", lambda library: None)
    assert not gelu_hidden.served(x, 256, 64)


CASES: list[Case] = [
    (1000, 256, 2048, 256),  # a ring's worth of steps: staggered
    (1, 64, 256, 64),  # one row, one step
    (129, 192, 512, 320),  # widths that differ, one row in the second tile
    (5000, 384, 768, 384),
    (300, 768, 1024, 256),  # the second product alone is staggered
    (70000, 256, 256, 64),  # more tiles than blocks from here on
    (20000, 256, 512, 256),  # both products are staggered
    (20000, 320, 512, 256),  # the second is, and the ring is entered anywhere
    (20000, 512, 512, 320),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("case", "dtype"), [*product(CASES, (torch.bfloat16, torch.float16))])
def test_hopper_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    inputs = make(case, dtype, "cuda")
    assert gelu_hidden.served(inputs[0], case[2], case[1], case[3])
    expected = definition(*(tensor.double() for tensor in inputs))
    found = torch.ops.dmjd.gelu_hidden_gradient(*inputs)
    # Half a unit in the last place. A slope in float16 adds half a unit of its own, and float32's sums the rest.
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for one, other, slope in zip(found[:2], expected[:2], (2**-11, 0), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, atol=2e-4, rtol=1.001 * (rounding + slope))
    assert found[2].dtype == torch.float32
    torch.testing.assert_close(found[2].double(), expected[2], atol=1e-2, rtol=1e-3)
    assert torch.equal(torch.ops.dmjd.gelu_hidden(*inputs[:3]), found[1])


@pytest.mark.gpu
@on_hopper
def test_hopper_repeats_bit_for_bit_and_writes_nothing_beside() -> None:
    inputs = make((1100, 256, 512, 256), torch.bfloat16, "cuda")
    first = torch.ops.dmjd.gelu_hidden_gradient(*inputs)
    for _ in range(20):
        again = torch.ops.dmjd.gelu_hidden_gradient(*inputs)
        assert all(map(torch.equal, first, again))
    for rows in (1024, 1061):  # what lies behind the rows that were asked for has no part in them
        part = torch.ops.dmjd.gelu_hidden(inputs[0][:rows], *inputs[1:3])
        assert torch.equal(part, first[1][:rows])


@pytest.mark.gpu
@on_hopper
def test_hopper_refuses_what_tiles_do_not_cover() -> None:
    x, weight1, bias1, grad, weight2 = make((300, 128, 256, 128), torch.bfloat16, "cuda")
    hidden, gradient = torch.ops.dmjd.gelu_hidden, torch.ops.dmjd.gelu_hidden_gradient
    with pytest.raises(RuntimeError, match="last size of bias must be a multiple of 256, got 128"):
        hidden(x, weight1[:128], bias1[:128])
    with pytest.raises(RuntimeError, match="last size of x must be a multiple of 64, got 96"):
        hidden(x[:, :96].contiguous(), weight1[:, :96].contiguous(), bias1)
    with pytest.raises(RuntimeError, match="weight must be contiguous"):
        hidden(x, weight1.T.contiguous().T, bias1)
    with pytest.raises(RuntimeError, match="x must be bfloat16 or float16"):
        hidden(x.float(), weight1.float(), bias1.float())
    with pytest.raises(RuntimeError, match="weight2 must be on x's device"):
        gradient(x, weight1, bias1, grad, weight2.cpu())
    with pytest.raises(RuntimeError, match="shape of grad does not fit"):
        gradient(x, weight1, bias1, grad[1:], weight2)


@pytest.mark.gpu
@on_hopper
def test_gelu_mlp_takes_views_of_flat_buffers_anywhere() -> None:
    def shifted(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape).requires_grad_()

    x, weight1, bias1, grad, weight2 = make((300, 128, 256, 128), torch.bfloat16, "cuda")
    plain = [tensor.requires_grad_() for tensor in (x, weight1, bias1, weight2, bias1[:128].detach().clone())]
    expected = torch.autograd.grad(gelu_mlp(*plain), plain, grad)
    views = [shifted(tensor.detach()) for tensor in plain]
    found = torch.autograd.grad(gelu_mlp(*views), views, shifted(grad).detach())
    assert all(
        map(torch.equal, found[:4], expected[:4])
    )  # bias2's is torch's sum, which may add views in another order
    torch.testing.assert_close(found[4], expected[4], atol=0, rtol=2**-7)


@pytest.mark.gpu
@on_hopper
def test_hopper_serves_gelu_mlp() -> None:
    assert status()["gelu_hidden"]["CUDA"] == status()["gelu_hidden_gradient"]["CUDA"] == "native"
    x, weight1, bias1, grad, weight2 = make((500, 128, 256, 128), torch.bfloat16, "cuda")
    inputs = [tensor.requires_grad_() for tensor in (x, weight1, bias1, weight2, bias1[:128].detach().clone())]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gelu_mlp(*inputs).backward(grad)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "gelu_hidden_kernel" in event.key]
    assert len(kernels) == 2
