"""short_attention: equal to softmax attention written out in float64, forward and every gradient."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.ops import short_attention, short_attention_packed, status
from dmjd.ops.short_attention import MOST_TOKENS, _needed_memory


class Case(NamedTuple):
    batch: int
    tokens: int
    heads: int
    depth: int
    windows: int | None = None  # of the bias; 0: one map for all images


CASES = [
    Case(3, 7, 2, 32),
    Case(2, 16, 1, 64, 0),
    Case(4, 9, 2, 80, 2),
    Case(3, 5, 2, 32, 3),
    Case(2, 1, 3, 64, 1),
    Case(0, 5, 2, 32),
    Case(2, 6, 2, 20, 0),  # heads without a kernel
]
# Every count of tiles that the kernels distinguish, whole and partial tiles, every head size and shape of bias.
CUDA_CASES = [
    *CASES,
    Case(5, 50, 3, 64),
    Case(3, 76, 2, 64),
    Case(2, 80, 2, 64, 0),
    Case(2, 81, 2, 64),
    Case(2, 197, 3, 64),
    Case(2, 208, 1, 64, 2),
    Case(2, 209, 2, 64, 0),
    Case(2, 256, 2, 64),
    Case(3, 196, 2, 32),
    Case(2, 197, 2, 32, 0),
    Case(8, 49, 3, 32, 4),
    Case(4, 144, 2, 32, 2),
    Case(2, 224, 2, 32),
    Case(2, 225, 2, 32),
    Case(2, 257, 2, 32, 0),
    Case(2, 288, 1, 32),
    Case(2, 65, 2, 80),
    Case(2, 80, 2, 80, 0),
    Case(2, 97, 2, 80),
    Case(2, 197, 1, 80, 2),
    Case(2, 257, 2, 64),  # these fall back
    Case(1, 289, 2, 32, 0),
]
ids = str


class Inputs(NamedTuple):
    qkv: Tensor
    bias: Tensor | None
    grad: Tensor

    def to(self, target: torch.dtype | str) -> Inputs:
        bias = None if self.bias is None else self.bias.to(target)
        return Inputs(self.qkv.to(target), bias, self.grad.to(target))


def make(case: Case, dtype: torch.dtype = torch.float64, spread: float = 1.0) -> Inputs:
    draw = torch.Generator().manual_seed(sum(case[:4]))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=draw, dtype=torch.float64) * spread).to(dtype)

    batch, tokens, heads, depth, windows = case
    bias = None
    if windows is not None:
        bias = normal(*((windows,) if windows else ()), heads, tokens, tokens)
    return Inputs(normal(batch, tokens, 3, heads, depth), bias, normal(batch, tokens, heads, depth))


def definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if bias is not None and bias.ndim == 3:
        scores = scores + bias
    elif bias is not None:
        scores = scores + bias[torch.arange(q.shape[0]) % bias.shape[0]]
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v)


def oracle(inputs: Inputs, scale: float | None = None) -> list[Tensor]:
    """Result, and gradients of qkv and bias, in float64 on the CPU."""
    qkv, bias, grad = inputs.to("cpu").to(torch.float64)
    leaves = [tensor.detach().requires_grad_() for tensor in (qkv, bias) if tensor is not None]
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = leaves[0].unbind(2)
    result = definition(q, k, v, leaves[1] if len(leaves) > 1 else None, scale)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


def results(inputs: Inputs, call: Callable[..., Any] = short_attention, **options: Any) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:2] if tensor is not None]
    packed = leaves[:1] if call is short_attention_packed else leaves[0].unbind(2)
    result = call(*packed, leaves[1] if len(leaves) > 1 else None, **options)
    return [result.detach(), *torch.autograd.grad(result, leaves, inputs.grad)]


def through_ops(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.dmjd.short_attention(q, k, v, bias, q.shape[-1] ** -0.5)[0]
    return result


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("call", [short_attention, short_attention_packed, through_ops])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_equals_the_definition(case: Case, call: Callable[..., Tensor]) -> None:
    inputs = make(case)
    for ours, expected in zip(results(inputs, call), oracle(inputs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_scale() -> None:
    inputs = make(CASES[2])
    for ours, expected in zip(results(inputs, scale=0.3), oracle(inputs, scale=0.3), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_any_layout_gives_equal_results() -> None:
    inputs = make(CASES[0])
    q, k, v = inputs.qkv.unbind(2)
    expected = short_attention(q, k, v)
    layouts = (
        inputs.qkv.permute(2, 0, 3, 1, 4).contiguous().permute(1, 3, 0, 2, 4),  # [3, B, H, N, D], as timm has it
        torch.stack((inputs.qkv, inputs.qkv), -1)[..., 0],  # no unit stride
    )
    for qkv in layouts:
        assert torch.equal(qkv, inputs.qkv)
        q, k, v = qkv.unbind(2)
        torch.testing.assert_close(short_attention(q, k, v), expected, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    for case in (Case(2, 3, 1, 4), Case(4, 3, 2, 2, 2), Case(2, 2, 1, 3, 0)):
        inputs = make(case)
        leaves = [tensor.requires_grad_() for tensor in (*inputs.qkv.unbind(2), inputs.bias) if tensor is not None]
        leaves = [tensor.detach().clone().requires_grad_() for tensor in leaves]

        def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            return through_ops(q, k, v, bias)

        assert torch.autograd.gradcheck(call, leaves)


# opcheck itself looks at .grad of tensors that are not leaves.
opcheck_warns = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def check_ops(inputs: Inputs) -> None:
    qkv, bias, grad = inputs
    q, k, v = (tensor.clone() for tensor in qkv.unbind(2))
    out, lse = torch.ops.dmjd.short_attention(q, k, v, bias, 0.2)
    backward = (grad, q, k, v, bias, out, lse, 0.2, bias is not None)
    torch.library.opcheck(torch.ops.dmjd.short_attention_backward, backward)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    bias = None if bias is None else bias.clone().requires_grad_()
    torch.library.opcheck(torch.ops.dmjd.short_attention, (*leaves, bias, 0.2))
    torch.library.opcheck(torch.ops.dmjd.short_attention_packed, (qkv.clone().requires_grad_(), bias, 0.2))


@opcheck_warns
def test_opcheck() -> None:
    for case in (CASES[0], CASES[2]):
        check_ops(make(case, torch.float32))


def test_lse_is_the_scores_log_sum_exp() -> None:
    q, k, v = make(CASES[0]).qkv.unbind(2)
    lse = torch.ops.dmjd.short_attention(q, k, v, None, 0.5)[1]
    expected = (torch.einsum("bihd,bjhd->bhij", q, k) * 0.5).exp().sum(-1).log()
    torch.testing.assert_close(lse, expected, rtol=1e-12, atol=1e-12)


def test_autocast_casts_all_to_its_dtype() -> None:
    inputs = make(CASES[2], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(inputs._replace(grad=inputs.grad.bfloat16()))
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32, torch.float32]
    for ours, expected in zip(found, oracle(inputs), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=5e-2, atol=5e-2)


def compiles(inputs: Callable[[int], Inputs], call: Callable[..., Tensor], **options: Any) -> None:
    def step(qkv: Tensor, bias: Tensor | None) -> Tensor:
        # Something precedes and follows, so that a launch on any stream but the current one would show.
        doubled = qkv * 2
        return (call(doubled, bias) if call is short_attention_packed else call(*doubled.unbind(2), bias)).square()

    torch.compiler.reset()
    compiled_step = torch.compile(step, fullgraph=True, **options)

    for batch in (2, 4, 2):
        given = inputs(batch)
        leaves = [tensor.detach().requires_grad_() for tensor in given[:2] if tensor is not None]
        bias = leaves[1] if len(leaves) > 1 else None
        compiled = compiled_step(leaves[0], bias)
        found = [compiled, *torch.autograd.grad(compiled, leaves, given.grad)]
        eager = step(leaves[0], bias)
        for ours, expected in zip(found, [eager, *torch.autograd.grad(eager, leaves, given.grad)], strict=True):
            # A compiler may round less often than eager operations do.
            rounding = max(2 * torch.finfo(ours.dtype).eps, 1e-12)
            assert (ours - expected).norm() <= rounding * expected.norm()


@pytest.mark.parametrize("call", [short_attention, short_attention_packed, through_ops])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(call: Callable[..., Tensor], dynamic: bool) -> None:
    compiles(lambda batch: make(Case(batch, 4 + batch, 2, 32, 0)), call, dynamic=dynamic, backend="aot_eager")


@pytest.mark.parametrize("case", [Case(2, 3, 2, 32), Case(2, 3, 1, 32, 2)])
def test_second_derivatives_and_forward_mode_agree_with_finite_differences(case: Case) -> None:
    qkv, bias, _ = make(case, spread=0.3)
    leaves = [tensor.requires_grad_() for tensor in (qkv, bias) if tensor is not None]

    def call(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = qkv.unbind(2)
        return through_ops(q, k, v, bias)

    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("case", [Case(2, 3, 2, 8), Case(2, 3, 1, 8, 2)])
def test_transforms_of_what_the_kernels_do_not_support(case: Case) -> None:
    qkv, bias, grad = make(case, spread=0.3)
    inputs = (qkv,) if bias is None else (qkv, bias)
    tangents = tuple(torch.randn_like(tensor) for tensor in inputs)
    step = 1e-6

    def call(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
        return short_attention_packed(qkv, bias)

    ahead, back = (
        call(*(tensor + sign * step * tangent for tensor, tangent in zip(inputs, tangents, strict=True)))
        for sign in (1, -1)
    )
    out, tangent = torch.func.jvp(call, inputs, tangents)[:2]
    torch.testing.assert_close(out, call(*inputs))
    torch.testing.assert_close(tangent, (ahead - back) / (2 * step), rtol=1e-6, atol=1e-8)
    stacked = torch.stack([qkv, 2 * qkv])
    each = torch.stack([short_attention_packed(one, bias) for one in stacked])
    torch.testing.assert_close(torch.vmap(lambda one: short_attention_packed(one, bias))(stacked), each)

    def loss(qkv: Tensor) -> Tensor:
        return (short_attention_packed(qkv, bias) * grad).sum()

    gradient = torch.func.grad(loss)
    (second,) = torch.func.vjp(gradient, qkv)[1](tangents[0])
    shift = step * tangents[0]
    differences = (gradient(qkv + shift) - gradient(qkv - shift)) / (2 * step)
    torch.testing.assert_close(second, differences, rtol=1e-5, atol=1e-8)  # the Hessian is symmetric


def test_errors_name_the_argument() -> None:
    qkv, bias, _ = make(CASES[2])
    assert bias is not None
    q, k, v = qkv.unbind(2)
    with pytest.raises(ValueError, match=r"one shape \[B, N, H, D\], .* got q \[4, 9, 2, 80\], k \[4, 8, 2, 80\]"):
        short_attention(q, k[:, 1:], v)
    with pytest.raises(ValueError, match=r"W a divisor of B, got \[3, 2, 9, 9\]"):
        short_attention(q, k, v, bias[:1].expand(3, -1, -1, -1))
    with pytest.raises(ValueError, match=r"bias must be \[H, N, N\].*got \[9, 9\]"):
        short_attention(q, k, v, bias[0, 0])
    with pytest.raises(TypeError, match=r"v must have q's dtype torch\.float64, got torch\.float32"):
        short_attention(q, k, v.float())
    with pytest.raises(TypeError, match=r"bias must have q's dtype torch\.float64, got torch\.bool"):
        short_attention(q, k, v, bias > 0)
    with pytest.raises(TypeError, match=r"q must be floating point, got torch\.int64"):
        short_attention(q.long(), k.long(), v.long())
    with pytest.raises(ValueError, match=r"D at least 1, got q \[4, 9, 2, 0\]"):
        short_attention(q[..., :0], k[..., :0], v[..., :0])
    with pytest.raises(ValueError, match="must be on one device, got q on cpu, k on meta"):
        short_attention(q, k.to("meta"), v)
    with pytest.raises(ValueError, match=r"qkv must be \[B, N, 3, H, D\], got \[4, 9, 2, 80\]"):
        short_attention_packed(q)


def close(inputs: Inputs, call: Callable[..., Tensor] = short_attention) -> None:
    """By norms, in units of rounding: operands and results are rounded, sums are not."""
    rounding = torch.finfo(inputs.qkv.dtype).eps
    for ours, expected in zip(results(inputs, call), oracle(inputs), strict=True):
        assert ours.dtype == inputs.qkv.dtype
        assert ours.shape == expected.shape
        if expected.numel():
            # Of one token the gradients of q and k are zero but for rounding.
            assert (ours.cpu().double() - expected).norm() <= rounding * max(expected.norm(), 1e-3 * inputs.grad.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES, ids=ids)
def test_cuda_equals_the_definition(case: Case) -> None:
    assert status()["short_attention_backward"]["CUDA"] == "native"
    for dtype in (torch.bfloat16, torch.float16):
        for call in (short_attention, short_attention_packed):
            close(make(case, dtype).to("cuda"), call)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CUDA_CASES[7], CUDA_CASES[15], CUDA_CASES[17]], ids=ids)
def test_cuda_repeats_bit_for_bit(case: Case) -> None:
    inputs = make(case._replace(batch=64), torch.bfloat16).to("cuda")
    first = results(inputs)
    assert all(equal(first, results(inputs)) for _ in range(3))
    assert equal(first, results(inputs, short_attention_packed))


@pytest.mark.gpu
def test_cuda_copies_nothing_of_a_packed_projection() -> None:
    inputs = make(Case(64, 76, 12, 64), torch.bfloat16).to("cuda")
    qkv = inputs.qkv.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = short_attention_packed(qkv)
    lse_bytes = 64 * 12 * 76 * 4
    assert torch.cuda.max_memory_allocated() - before <= result.nbytes + lse_bytes + 2**20
    torch.autograd.grad(result, qkv, inputs.grad)
    assert (
        torch.cuda.max_memory_allocated() - before <= result.nbytes + lse_bytes + qkv.nbytes + 2**20
    )  # of a block that is not split


@pytest.mark.gpu
def test_cuda_takes_any_layout() -> None:
    inputs = make(Case(3, 50, 2, 64), torch.bfloat16).to("cuda")
    odd = torch.empty(inputs.qkv.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view(inputs.qkv.shape)
    layouts = (
        inputs.qkv.permute(2, 0, 3, 1, 4).contiguous().permute(1, 3, 0, 2, 4),
        torch.stack((inputs.qkv, inputs.qkv), -1)[..., 0],
        odd.copy_(inputs.qkv),
    )
    expected = results(inputs)
    for qkv in layouts:
        assert equal(results(inputs._replace(qkv=qkv)), expected)
    spread = inputs.grad[:1, :1].expand_as(inputs.grad)
    close(inputs._replace(grad=spread))


@pytest.mark.gpu
def test_cuda_large_scores_and_hidden_keys() -> None:
    close(make(Case(2, 197, 2, 64), torch.bfloat16, spread=4.0).to("cuda"))
    inputs = make(Case(2, 197, 2, 64, 0), torch.bfloat16).to("cuda")
    assert inputs.bias is not None
    inputs.bias[..., 20:190] = -torch.inf
    inputs.bias[:, 3, 3:] = -torch.inf
    close(inputs)


@pytest.mark.gpu
@opcheck_warns
def test_cuda_opcheck() -> None:
    for case in (Case(2, 50, 2, 64), Case(4, 49, 2, 32, 2)):
        check_ops(make(case, torch.bfloat16).to("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("call", [short_attention, short_attention_packed])
def test_cuda_graphs_of_torch_compile(call: Callable[..., Tensor]) -> None:
    def inputs(batch: int) -> Inputs:
        return make(Case(batch, 50, 2, 64, 0), torch.bfloat16).to("cuda")

    compiles(inputs, call, mode="reduce-overhead")


@pytest.mark.gpu
def test_cuda_heads_that_the_card_has_no_room_for_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(Case(2, 197, 2, 64), torch.bfloat16).to("cuda")
    monkeypatch.setattr(sys.modules["dmjd.ops.short_attention"], "_shared_memory", lambda device: 100 * 1024)
    q, k, v = inputs.qkv.unbind(2)
    heads_first = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    assert torch.equal(short_attention(q, k, v), heads_first.transpose(1, 2))


@pytest.mark.gpu
def test_cuda_more_elements_than_32_bits_count() -> None:
    one = make(Case(1, 288, 32, 32), torch.bfloat16).to("cuda")
    rows = 2**31 // one.qkv.numel() + 2  # 2**31 elements lie before the last image
    expected = results(one, short_attention_packed)
    many = one._replace(
        qkv=one.qkv.new_zeros(rows, *one.qkv.shape[1:]), grad=one.grad.new_zeros(rows, *one.grad.shape[1:])
    )
    many.qkv[-1], many.grad[-1] = one.qkv[0], one.grad[0]
    found = results(many, short_attention_packed)
    assert torch.equal(found[0][-1], expected[0][0])
    assert torch.equal(found[1][-1], expected[1][0])


def test_needed_memory_covers_the_longest_sequences_of_hopper_and_the_goals_of_ampere() -> None:
    assert all(_needed_memory(tokens, depth) <= 227 * 1024 for depth, tokens in MOST_TOKENS.items() if depth != 80)
    assert _needed_memory(208, 80) <= 227 * 1024
    assert all(_needed_memory(tokens, depth) <= 163 * 1024 for tokens, depth in ((197, 64), (257, 32), (65, 80)))


def test_example_equals_timms_attention() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/timm_vit.py"))
    timms, ours = example["timms"], example["ours"]
    assert {type(block.attn) for block in ours.blocks} == {example["ShortAttention"]}
    torch.testing.assert_close(example["step"](ours), example["step"](timms))
    expected = dict(timms.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad)
