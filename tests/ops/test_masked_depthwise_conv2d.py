"""masked_depthwise_conv2d: equal to a dense convolution of the masked map, forward and every gradient."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.ops._lib import status
from dmjd.ops.masked_depthwise_conv2d import masked_depthwise_conv2d

BACKWARD = "masked_depthwise_conv2d_backward"


class Case(NamedTuple):
    grid: tuple[int, int]
    q: int
    k: int
    views: int
    batch: int
    visible: int
    channels: int


class Inputs(NamedTuple):
    """The arguments of a call, the map that ``x`` was cut from, and the gradient that comes back."""

    x: Tensor
    visible: Tensor
    restore: Tensor
    weight: Tensor
    bias: Tensor
    grid: tuple[int, int]
    q: int
    pixel_map: Tensor
    grad: Tensor

    def call(self, **changes: Any) -> Tensor:
        given = self._replace(**changes)
        return masked_depthwise_conv2d(*given[:7])

    def to(self, target: torch.dtype | str) -> Inputs:
        floats = ("x", "weight", "bias", "grad")
        names = (*floats, "visible", "restore") if isinstance(target, str) else floats
        return self._replace(**{name: getattr(self, name).to(target) for name in names})


def blocks(pixel_map: Tensor, q: int) -> Tensor:
    """``[R, C, H, W] -> [R, N, q*q, C]``."""
    rows, channels = pixel_map.shape[:2]
    return F.unfold(pixel_map, q, stride=q).view(rows, channels, q * q, -1).permute(0, 3, 2, 1)


def visible_blocks(pixel_map: Tensor, q: int, visible: Tensor) -> Tensor:
    tokens = blocks(pixel_map, q)
    return torch.stack([tokens[row, ids] for row, ids in enumerate(visible.flatten(0, 1))])


def make(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    height, width = case.grid
    rows, tokens = case.views * case.batch, height * width
    order = torch.rand(case.views, case.batch, tokens, generator=draw).argsort(-1)
    visible, hidden = order[..., : case.visible].sort(-1).values, order[..., case.visible :].sort(-1).values
    restore = torch.cat((visible, hidden), dim=-1).argsort(-1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    pixel_map = normal(rows, case.channels, height * case.q, width * case.q)
    x = visible_blocks(pixel_map, case.q, visible)
    weight, bias = normal(case.channels, case.k, case.k), normal(case.channels)
    return Inputs(x, visible, restore, weight, bias, case.grid, case.q, pixel_map, normal(*x.shape))


def oracle(inputs: Inputs) -> tuple[Tensor, ...]:
    """Result, and gradients of x, weight and bias, of the dense convolution in float64."""
    height, width = inputs.grid
    shown = torch.zeros(inputs.restore.flatten(0, 1).shape, dtype=torch.float64)
    shown.scatter_(1, inputs.visible.flatten(0, 1), 1.0)
    shown = shown.view(-1, 1, height, width).repeat_interleave(inputs.q, 2).repeat_interleave(inputs.q, 3)
    leaves = [t.double().requires_grad_() for t in (inputs.pixel_map, inputs.weight, inputs.bias)]
    pixel_map, weight, bias = leaves
    dense = F.conv2d(pixel_map * shown, weight[:, None], bias, padding=weight.shape[1] // 2, groups=weight.shape[0])
    result = visible_blocks(dense, inputs.q, inputs.visible)
    grad_map, grad_weight, grad_bias = torch.autograd.grad(result, leaves, inputs.grad.double())
    return result.detach(), visible_blocks(grad_map, inputs.q, inputs.visible), grad_weight, grad_bias


def results(inputs: Inputs) -> tuple[Tensor, ...]:
    x, weight, bias = (t.detach().requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias))
    result = inputs.call(x=x, weight=weight, bias=bias)
    return result.detach(), *torch.autograd.grad(result, (x, weight, bias), inputs.grad)


CASES = [
    Case((4, 4), 4, 5, views=2, batch=2, visible=7, channels=48),
    Case((12, 20), 2, 5, views=1, batch=1, visible=90, channels=24),
    Case((5, 3), 4, 5, views=1, batch=3, visible=15, channels=6),  # nothing hidden
    Case((5, 3), 4, 5, views=4, batch=1, visible=1, channels=33),  # one token alone
    Case((4, 6), 2, 7, views=3, batch=1, visible=14, channels=5),  # reaches two tokens away
    Case((6, 5), 1, 5, views=2, batch=1, visible=18, channels=3),
    Case((5, 6), 1, 7, views=1, batch=2, visible=25, channels=16),
    Case((3, 4), 3, 3, views=1, batch=2, visible=6, channels=17),
    Case((3, 3), 5, 7, views=2, batch=1, visible=5, channels=4),
    Case((1, 1), 1, 3, views=1, batch=1, visible=1, channels=1),
    Case((1, 9), 4, 5, views=1, batch=20, visible=6, channels=18),  # more tokens than one thread's share
]
# What the CUDA kernels for known windows add: whole and partial warps of channels, and odd ones.
CUDA_CASES = [
    *CASES,
    Case((14, 14), 4, 5, views=2, batch=3, visible=76, channels=256),
    Case((14, 14), 2, 5, views=2, batch=3, visible=76, channels=96),
    Case((7, 9), 4, 5, views=1, batch=4, visible=40, channels=70),
    Case((7, 9), 2, 5, views=1, batch=9, visible=40, channels=35),
]
ids = str


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_equals_dense_convolution(case: Case) -> None:
    inputs = make(case)
    for ours, expected in zip(results(inputs), oracle(inputs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def close(inputs: Inputs) -> None:
    """Sums are float32, so nothing is lost beyond the last rounding of inputs' dtype."""
    dtype = inputs.x.dtype
    rounding = 4e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for ours, expected in zip(results(inputs), oracle(inputs.to("cpu")), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.cpu().double(), expected, rtol=rounding, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=ids)
def test_lower_precision_sums_in_float32(dtype: torch.dtype) -> None:
    for case in (CASES[0], CASES[4]):
        close(make(case, dtype))


def test_without_bias() -> None:
    inputs = make(CASES[0])
    shifted = masked_depthwise_conv2d(*inputs[:4], None, *inputs[5:7]) + inputs.bias
    torch.testing.assert_close(shifted, inputs.call(), rtol=1e-12, atol=1e-12)


def test_hidden_tokens_do_not_matter_and_visible_ones_do() -> None:
    inputs = make(Case((1, 3), 2, 5, views=1, batch=2, visible=2, channels=1))
    # Two views of one map, tokens 0 and 1 visible in both; then token 1 is swapped for token 2.
    near, far = torch.tensor([[[0, 1]]]), torch.tensor([[[0, 2]]])
    restore_near, restore_far = torch.tensor([[[0, 1, 2]]]), torch.tensor([[[0, 2, 1]]])
    x = inputs.x[:1]
    first = inputs.call(x=x, visible=near, restore=restore_near)[0, 0]
    second = inputs.call(x=x, visible=far, restore=restore_far)[0, 0]
    alone = inputs.call(x=x[:, :1], visible=near[..., :1], restore=torch.tensor([[[0, 1, 2]]]))[0, 0]
    assert torch.equal(second, alone)  # token 2 is out of reach of token 0
    assert not torch.equal(first, alone)


def test_gradcheck() -> None:
    for case in (Case((2, 3), 2, 5, 1, 2, 3, 2), Case((3, 2), 1, 3, 2, 1, 4, 1)):
        inputs = make(case)
        leaves = [t.requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias)]

        def call(x: Tensor, weight: Tensor, bias: Tensor, given: Inputs = inputs) -> Tensor:
            return given.call(x=x, weight=weight, bias=bias)

        assert torch.autograd.gradcheck(call, leaves)


def test_strided_arguments_and_expanded_gradient() -> None:
    inputs = make(CASES[0])
    strided = inputs._replace(
        x=inputs.x.transpose(1, 3).contiguous().transpose(1, 3),
        weight=inputs.weight.transpose(0, 2).contiguous().transpose(0, 2),
        bias=torch.stack((inputs.bias, inputs.bias), 1)[:, 0],
        visible=inputs.visible.transpose(0, 1).contiguous().transpose(0, 1),
        restore=torch.stack((inputs.restore, inputs.restore), -1)[..., 1],
        grad=inputs.grad[:1, :1].expand_as(inputs.x),
    )
    dense = inputs._replace(grad=strided.grad.contiguous())
    for ours, expected in zip(results(strided), results(dense), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("batch", "visible"), [(0, 7), (2, 0)], ids=["no image", "nothing visible"])
def test_empty(batch: int, visible: int) -> None:
    inputs = make(Case((4, 4), 4, 5, 2, 2, 7, 6))
    inputs = inputs._replace(
        x=inputs.x[: 2 * batch, :visible],
        visible=inputs.visible[:, :batch, :visible],
        restore=inputs.restore[:, :batch],
    )._replace(grad=inputs.grad[: 2 * batch, :visible])
    result, grad_x, grad_weight, grad_bias = results(inputs)
    assert result.shape == grad_x.shape == inputs.x.shape
    assert not grad_weight.any()
    assert not grad_bias.any()


def test_gradients_do_not_depend_on_the_number_of_threads() -> None:
    if status()[BACKWARD]["CPU"] != "native":
        pytest.skip("the native kernel promises this; it is not built or DMJD_DISABLE_EXT is set")
    inputs, threads = make(CASES[-1], torch.float32), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results(inputs)
        torch.set_num_threads(2)
        assert all(torch.equal(one, two) for one, two in zip(alone, results(inputs), strict=True))
    finally:
        torch.set_num_threads(threads)


def test_autocast_keeps_float32_parameters_exact() -> None:
    inputs = make(CASES[0], torch.bfloat16)
    weight, bias = inputs.weight.float() * 1.001, inputs.bias.float() * 1.001
    mixed = inputs._replace(weight=weight, bias=bias)
    plain = results(mixed)
    with torch.autocast("cpu", torch.bfloat16):
        cast = results(mixed)
    assert [t.dtype for t in cast] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    assert all(torch.equal(one, two) for one, two in zip(plain, cast, strict=True))
    exact = oracle(mixed)
    for ours, expected in zip(cast, exact, strict=True):
        torch.testing.assert_close(
            ours.double(), expected, rtol=2**-7 if ours.dtype == torch.bfloat16 else 1e-5, atol=2e-4
        )


def op_arguments(inputs: Inputs) -> tuple[Any, ...]:
    return (
        inputs.x,
        inputs.visible.flatten(0, 1),
        inputs.restore.flatten(0, 1),
        inputs.weight,
        inputs.bias,
        *inputs.grid,
        inputs.q,
    )


def check_ops(inputs: Inputs) -> None:
    x, visible, restore, weight, bias, *layout = op_arguments(inputs)
    torch.library.opcheck(
        torch.ops.dmjd.masked_depthwise_conv2d,
        (x.requires_grad_(), visible, restore, weight.requires_grad_(), bias.requires_grad_(), *layout),
    )
    torch.library.opcheck(
        torch.ops.dmjd.masked_depthwise_conv2d_backward,
        (inputs.grad, x.detach(), visible, restore, weight.detach(), *layout),
    )


# opcheck itself looks at .grad of tensors that are not leaves.
opcheck_warns = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@opcheck_warns
def test_opcheck() -> None:
    check_ops(make(Case((2, 3), 2, 5, 1, 2, 3, 4), torch.float32))


def compiles(inputs: Callable[[int], Inputs], **options: Any) -> None:
    @torch.compile(fullgraph=True, **options)
    def step(x: Tensor, visible: Tensor, restore: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        # Something precedes and follows, so that a launch on any stream but the current one would show.
        return masked_depthwise_conv2d(x * 2, visible, restore, weight, bias, (4, 5), 2).square()

    for batch in (3, 4, 3):
        given = inputs(batch)
        leaves = [t.detach().requires_grad_() for t in (given.x, given.weight, given.bias)]
        compiled = step(leaves[0], given.visible, given.restore, *leaves[1:])
        grads = torch.autograd.grad(compiled, leaves, given.grad)
        x, weight, bias = leaves
        eager = given.call(x=x * 2, weight=weight, bias=bias).square()
        expected = torch.autograd.grad(eager, leaves, given.grad)
        for ours, theirs in zip((compiled, *grads), (eager, *expected), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool) -> None:
    def inputs(batch: int) -> Inputs:
        return make(Case((4, 5), 2, 5, 2, batch, 5 + batch, 4), torch.float32)

    compiles(inputs, dynamic=dynamic, backend="aot_eager")


def test_errors_name_the_argument() -> None:
    good = make(CASES[0])
    with pytest.raises(TypeError, match=r"x must be float32.*got torch\.int64"):
        good.call(x=good.x.long())
    with pytest.raises(TypeError, match=r"visible and restore must be int64, got torch\.int32"):
        good.call(visible=good.visible.int())
    with pytest.raises(ValueError, match=r"visible must be \[K, B, V\].*\(4, 7\)"):
        good.call(visible=good.visible.flatten(0, 1))
    with pytest.raises(ValueError, match=r"grid must be .*\(4, 5\).*\(2, 2, 16\)"):
        good.call(grid=(4, 5))
    with pytest.raises(ValueError, match=r"x must be \[K\*B, V, q\*q, C\].*q 2"):
        good.call(q=2)
    with pytest.raises(ValueError, match=r"x must be \[K\*B, V, q\*q, C\], got \(4, 6, 16, 48\)"):
        good.call(x=good.x[:, :6])
    with pytest.raises(ValueError, match=r"weight must be \[C, k, k\] with C = 48, got \(48, 1, 5, 5\)"):
        good.call(weight=good.weight[:, None])
    with pytest.raises(ValueError, match=r"weight must have k in \(3, 5, 7\), got \(48, 4, 4\)"):
        good.call(weight=good.weight[:, :4, :4])
    with pytest.raises(ValueError, match=r"bias must be \[C\] with C = 48, got \(47,\)"):
        good.call(bias=good.bias[:47])
    with pytest.raises(ValueError, match="all tensors must be on x's device, cpu"):
        good.call(restore=good.restore.to("meta"))


def test_example_equals_its_dense_block() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/masked_conv_block.py"))
    block, x, views, grid, q = (example[name] for name in ("block", "x", "views", "grid", "q"))
    # The dense block on a map of zeros where hidden, written with nothing of dmjd's.
    shown = (~views.mask).flatten(0, 1).view(-1, *grid).repeat_interleave(q, 1).repeat_interleave(q, 2)
    y = example["pixel_map"].flatten(1, 2).flatten(2, 3).repeat(2, 1, 1, 1)
    y = block.expand(block.norm(y)) * shown.unsqueeze(-1)
    y = block.project(block.depthwise(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(block(x, views), x + visible_blocks(y, q, views.visible))
    assert all(parameter.grad is not None for parameter in block.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES, ids=ids)
def test_cuda_equals_dense_convolution(case: Case) -> None:
    assert status()[BACKWARD]["CUDA"] == "native"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        close(make(case, dtype).to("cuda"))
    inputs = make(case)
    for ours, expected in zip(results(inputs.to("cuda")), oracle(inputs), strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=ids)
def test_cuda_repeats_bit_for_bit(dtype: torch.dtype) -> None:
    inputs = make(Case((14, 14), 4, 5, 2, 8, 76, 128), dtype).to("cuda")
    first = results(inputs)
    for _ in range(3):
        assert all(torch.equal(one, two) for one, two in zip(first, results(inputs), strict=True))


@pytest.mark.gpu
def test_cuda_takes_storage_that_pairs_do_not_fit() -> None:
    inputs = make(CASES[0], torch.bfloat16).to("cuda")

    def odd(tensor: Tensor) -> Tensor:
        storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
        return storage.copy_(tensor.flatten()).view(tensor.shape)

    close(inputs._replace(x=odd(inputs.x), grad=odd(inputs.grad)))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "visible"), [(0, 7), (2, 0)], ids=["no image", "nothing visible"])
def test_cuda_empty(batch: int, visible: int) -> None:
    inputs = make(Case((4, 4), 4, 5, 2, 2, 7, 6), torch.float32).to("cuda")
    inputs = inputs._replace(
        x=inputs.x[: 2 * batch, :visible],
        visible=inputs.visible[:, :batch, :visible],
        restore=inputs.restore[:, :batch],
    )._replace(grad=inputs.grad[: 2 * batch, :visible])
    result, _, grad_weight, grad_bias = results(inputs)
    assert result.shape == inputs.x.shape
    assert not grad_weight.any()
    assert not grad_bias.any()


@pytest.mark.gpu
@opcheck_warns
def test_cuda_opcheck() -> None:
    check_ops(make(Case((2, 3), 4, 5, 1, 2, 3, 64), torch.float32).to("cuda"))


@pytest.mark.gpu
def test_cuda_graphs_of_torch_compile() -> None:
    def inputs(batch: int) -> Inputs:
        return make(Case((4, 5), 2, 5, 2, batch, 8, 64), torch.float32, seed=batch).to("cuda")

    compiles(inputs, mode="reduce-overhead")


@pytest.mark.gpu
def test_cuda_more_elements_than_32_bits_count() -> None:
    # 2**31 elements lie before the last view, in bfloat16 so that input, gradients and results fit 40 GB.
    case = Case((14, 14), 4, 5, 1, 1, 196, 256)
    rows = 2**31 // (196 * 16 * 256) + 2
    one = make(case, torch.bfloat16).to("cuda")
    expected = results(one)
    many = one._replace(
        x=one.x.new_zeros(rows, *one.x.shape[1:]),
        grad=one.x.new_zeros(rows, *one.x.shape[1:]),
        visible=one.visible.expand(1, rows, -1),
        restore=one.restore.expand(1, rows, -1),
    )
    many.x[-1], many.grad[-1] = one.x[0], one.grad[0]
    result, grad_x, grad_weight, grad_bias = results(many)
    assert torch.equal(result[-1], expected[0][0])
    assert torch.equal(grad_x[-1], expected[1][0])
    torch.testing.assert_close(grad_weight, expected[2])
    torch.testing.assert_close(grad_bias, expected[3])
