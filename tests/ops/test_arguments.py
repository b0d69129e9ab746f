"""Arguments as callers write them: numpy's numbers, one for two, MAE's shapes, other default devices, wrong types."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dmjd.ops
from dmjd.ops import Domain, Views

ops: Any = dmjd.ops  # what the calls below pass is not what the types allow

IDS = torch.arange(2)
REQUEST: dict[str, Any] = {"grid": (6, 6), "views": 2, "mask_ratio": 0.6, "seed": 0, "epoch": 0}
VIEWS = ops.disjoint_masks(IDS, **REQUEST)
X = torch.randn(2, 36, 4)
SHOWN = ops.gather_tokens(X, VIEWS.visible)
PIXELS = torch.randn(4, VIEWS.visible.shape[-1], 4, 3)
WEIGHT = torch.randn(3, 3, 3)
QKV = torch.linspace(-1, 1, 2 * 3 * 3 * 2 * 4).view(2, 3, 3, 2, 4)
MLP = [torch.randn(shape) for shape in ((2, 3, 4), (5, 4), (5,), (2, 5), (2,))]
IMAGES = torch.zeros(1, 32, 32, 3, dtype=torch.uint8)
KEY = ops.make_key(0, 0)


def masks(**changes: Any) -> Views:
    return ops.disjoint_masks(IDS, **REQUEST | changes)


def convolution(**changes: Any) -> Tensor:
    arguments = {"x": PIXELS, "visible": VIEWS.visible, "restore": VIEWS.restore, "weight": WEIGHT, "bias": None}
    return ops.masked_depthwise_conv2d(**arguments | {"grid": (6, 6), "q": 2} | changes)


def bits(**changes: Any) -> Tensor:
    return ops.keyed_bits(**{"sample_ids": IDS, "words": 4, "key": KEY, "domain": Domain.MASK} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": np.int64(0), "epoch": np.uint8(0)},
        {"seed": torch.tensor(0)},
        {"seed": np.array(0), "epoch": np.array(0, np.uint8)},
        {"seed": np.array(0), "epoch": torch.tensor(0)},
        {"grid": 6},
        {"grid": np.int64(6)},
        {"grid": [6, np.int32(6)]},
        {"grid": np.array([6, 6])},
        {"views": np.int64(2)},
        {"views": torch.tensor(2)},
        {"mask_ratio": np.float32(0.6)},
        {"mask_ratio": Fraction(3, 5)},
        {"pred_ratio": np.float16(1)},
        {"count": np.int64(22)},
        {"count": 22, "block": 2},
    ],
    ids=str,
)
def test_numbers_of_other_types_give_the_same_masks(changes: dict[str, Any]) -> None:
    assert all(map(torch.equal, masks(**changes), VIEWS))


def test_a_decimal_of_numpys_float32_is_the_one_that_was_typed() -> None:
    assert ops.mask_plan(10, views=1, mask_ratio=np.float32(0.6)).hidden == 60
    plan = ops.mask_plan(np.int64(14), views=2, mask_ratio=0.6, pattern="block", block=2)
    assert plan == ops.mask_plan((14, 14), views=2, mask_ratio=0.6, pattern="block")
    assert {type(side) for side in (*plan.grid, *plan.block)} == {int}


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: masks(seed="0"), TypeError, "seed must be an integer, got '0'"),
    (lambda: masks(seed=True), TypeError, "seed must be an integer, got True"),
    (lambda: masks(epoch=1.0), TypeError, "epoch must be an integer, got 1.0"),
    (lambda: masks(epoch=10**400), ValueError, "epoch must be in [0, 2**32), got a value of type int"),
    (lambda: masks(seed=torch.tensor(0.0)), TypeError, "seed must be an integer or an int64 tensor"),
    (lambda: masks(grid="14"), TypeError, "grid must be an integer or two integers, got '14'"),
    (lambda: masks(grid=14.0), TypeError, "grid must be an integer, got 14.0"),
    (lambda: masks(grid=(6, "6")), TypeError, "grid must be an integer, got '6'"),
    (lambda: masks(grid=(6, 6, 6)), ValueError, "grid must be an integer or two integers, got (6, 6, 6)"),
    (lambda: masks(grid=10**30), ValueError, "grid must hold at most 2147483647 tokens"),
    (lambda: masks(block="2x2"), TypeError, "block must be an integer or two integers, got '2x2'"),
    (lambda: masks(mask_ratio="0.6"), TypeError, "mask_ratio must be a number, got '0.6'"),
    (lambda: masks(mask_ratio=None), TypeError, "mask_ratio must be a number, got None"),
    (lambda: masks(mask_ratio=1e-12), ValueError, "mask_ratio between 0.0278 and 0.9722 works"),
    (lambda: masks(pred_ratio="1"), TypeError, "pred_ratio must be a number, got '1'"),
    (lambda: masks(views="2"), TypeError, "views must be an integer, got '2'"),
    (lambda: masks(count=2.5), TypeError, "count must be an integer, got 2.5"),
    (lambda: ops.disjoint_masks([1, 2], **REQUEST), TypeError, "sample_ids must be a tensor, got [1, 2]"),
    (lambda: ops.disjoint_masks(np.arange(2), **REQUEST), TypeError, "sample_ids must be a tensor, got array([0, 1])"),
    (lambda: ops.draw_masks(IDS, (6, 6), seed=0, epoch=0), TypeError, "plan must be a MaskPlan, as mask_plan(...)"),
    (lambda: ops.gather_tokens(X, [[0]]), TypeError, "gather_tokens: ids must be a tensor, got [[0]]"),
    (
        lambda: ops.gather_tokens(X.numpy(), VIEWS.visible),
        TypeError,
        "gather_tokens: x must be a tensor, got a value of",
    ),
    (lambda: ops.gather_tokens(X, VIEWS.visible, "1"), TypeError, "gather_tokens: prefix_tokens must be an integer"),
    (
        lambda: ops.scatter_tokens(SHOWN, 0.0, VIEWS.restore),
        TypeError,
        "scatter_tokens: mask_token must be a tensor, got 0",
    ),
    (
        lambda: ops.scatter_tokens(SHOWN, X[0, 0], VIEWS.restore, torch.zeros(1, 37, 4)),
        ValueError,
        "positions must be [36, 4]",
    ),
    (lambda: convolution(q=2.0), TypeError, "masked_depthwise_conv2d: q must be an integer, got 2.0"),
    (lambda: convolution(grid="6"), TypeError, "masked_depthwise_conv2d: grid must be an integer or two integers"),
    (lambda: convolution(bias=[1.0]), TypeError, "masked_depthwise_conv2d: bias must be a tensor, got [1.0]"),
    (lambda: ops.short_attention_packed(None), TypeError, "short_attention_packed: qkv must be a tensor, got None"),
    (
        lambda: ops.short_attention(*QKV.unbind(2), scale="1"),
        TypeError,
        "short_attention: scale must be a number, got '1'",
    ),
    (lambda: ops.gelu_mlp(*MLP[:2], None, *MLP[3:]), TypeError, "gelu_mlp: bias1 must be a tensor, got None"),
    (lambda: ops.hog(IMAGES.numpy()), TypeError, "hog: images must be a tensor"),
    (lambda: ops.hog(IMAGES, bins=9.0), TypeError, "hog: bins must be an integer, got 9.0"),
    (lambda: ops.horizontal_flip(IMAGES, [True]), TypeError, "horizontal_flip: flips must be a tensor, got [True]"),
    (lambda: ops.normalise(IMAGES, 0.5, [0.5] * 3), TypeError, "normalise: mean must be a sequence of numbers"),
    (lambda: ops.normalise(IMAGES, [0.5] * 3, ["1"] * 3), TypeError, "normalise: std must be a number, got '1'"),
    (lambda: ops.normalise(IMAGES, [0.5] * 3, [0.5] * 3, "float32"), TypeError, "normalise: dtype must be floating"),
    (lambda: ops.patchify(X[None], "4"), TypeError, "patchify: patch must be an integer, got '4'"),
    (lambda: ops.unpatchify(X, "6", 2), TypeError, "unpatchify: grid must be an integer or two integers, got '6'"),
    (lambda: ops.philox4x32([0] * 4, KEY), TypeError, "philox4x32: counter must be a tensor"),
    (lambda: bits(lane=-1), ValueError, "keyed_bits: lane must be in [0, 2**24), got -1"),
    (lambda: bits(lane=1 << 24), ValueError, "keyed_bits: lane must be in [0, 2**24), got 16777216"),
    (lambda: bits(lane=0.5), TypeError, "keyed_bits: lane must be an integer, got 0.5"),
    (lambda: bits(domain=256), ValueError, "keyed_bits: domain must be in [0, 2**8), got 256"),
    (lambda: bits(words=-1), ValueError, "keyed_bits: words must be in [0, 2**34], got -1"),
    (lambda: bits(words=10**30), ValueError, "keyed_bits: words must be in [0, 2**34], got 1000000"),
    (lambda: masks(views=torch.tensor(True)), TypeError, "views must be an integer, got tensor(True)"),
    (
        lambda: masks(views=torch.tensor(2, device="meta")),
        TypeError,
        "views must be an integer, got tensor(..., device",
    ),
    (lambda: masks(mask_ratio=10**400), ValueError, "mask_ratio must be in the range of a float, got a value of type"),
    (lambda: masks(pred_ratio=Fraction(10**400, 3)), ValueError, "pred_ratio must be in the range of a float"),
    (lambda: masks(pattern=np.array(["uniform", "x"])), ValueError, "pattern must be one of uniform, block, beit, got"),
    (lambda: ops.hog(IMAGES, norm=np.array([1, 2])), ValueError, "hog: norm must be one of none, l2, layernorm, got"),
    (
        lambda: ops.gather_tokens(X.to_sparse(), VIEWS.visible),
        TypeError,
        "gather_tokens: x must be a dense tensor, got",
    ),
    (
        lambda: ops.hog(torch.nested.nested_tensor([X, X], layout=torch.jagged)),
        TypeError,
        "hog: images must be a dense tensor, got a nested",
    ),
    (
        lambda: ops.normalise(IMAGES, [0.5] * 3, [float("nan")] * 3),
        ValueError,
        "normalise: std must be finite, got (nan",
    ),
    (
        lambda: ops.normalise(IMAGES, [0, 0, float("inf")], [1] * 3),
        ValueError,
        "normalise: mean must be finite, got (0",
    ),
    (lambda: ops.normalise(IMAGES, torch.tensor(0.5), [1] * 3), TypeError, "normalise: mean must be a sequence of num"),
    (lambda: ops.normalise(IMAGES, [0] * 3, np.array(0.5)), TypeError, "normalise: std must be a sequence of numbers"),
    (lambda: ops.normalise(IMAGES[..., :0], [], []), ValueError, "normalise: images must have at least 1 channel"),
    (lambda: ops.unpatchify(X, (-6, -6), 2), ValueError, "unpatchify: grid must hold 0 or more patches each way"),
    (
        lambda: ops.horizontal_flip(IMAGES, torch.ones(1, dtype=torch.bool, device="meta")),
        ValueError,
        "horizontal_flip: flips must be on images' device cpu, got meta",
    ),
    (
        lambda: convolution(weight=WEIGHT.to("meta")),
        ValueError,
        "all tensors must be on one device, got x on cpu, visible on cpu, restore on cpu, weight on meta",
    ),
    (
        lambda: torch.autocast("cpu")(ops.gelu_mlp)(MLP[0].long(), *MLP[1:]),
        TypeError,
        "gelu_mlp: x must be floating, got torch.int64",
    ),
    (lambda: ops.reference("hogg"), ValueError, "reference: name must be one of disjoint_masks, gather_tokens,"),
    (lambda: bits(sample_ids=[0]), TypeError, "keyed_bits: sample_ids must be a tensor, got [0]"),
    (lambda: bits(sample_ids=IDS.int()), TypeError, "keyed_bits: sample_ids must be int64, got torch.int32"),
    (lambda: bits(sample_ids=IDS[None]), ValueError, "keyed_bits: sample_ids must be one-dimensional [B]"),
    (lambda: ops.mask_plan((1, 1), views=2, mask_ratio=0.5), ValueError, "grid must have at least 2 units"),
    (lambda: ops.mask_plan(2, views=1, mask_ratio=0.5, pattern="block"), ValueError, "grid must have at least 2 units"),
    (lambda: ops.mask_plan(2, views=8, mask_ratio=0.25), ValueError, "take views up to 4, or regulation='none'"),
]


@pytest.mark.parametrize(("call", "kind", "part"), WRONG, ids=[part for _, _, part in WRONG])
def test_a_wrong_argument_is_one_line_that_names_it(call: Callable[[], Any], kind: type[Exception], part: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_integers_of_numpy_serve_every_op() -> None:
    two = np.int64(2)
    assert torch.equal(convolution(grid=np.int64(6), q=two), convolution())
    assert torch.equal(ops.gather_tokens(X, VIEWS.visible, np.int64(0)), SHOWN)
    assert torch.equal(ops.hog(IMAGES, cell=np.int64(8), bins=np.uint8(9), patch=np.int64(16)), ops.hog(IMAGES))
    assert torch.equal(bits(lane=two, words=two), bits(lane=2, words=2))
    planes = IMAGES.permute(0, 3, 1, 2)
    assert torch.equal(ops.unpatchify(ops.patchify(planes, np.int64(8)), 4, np.int64(8)), planes)
    mean = [0.25, 0.5, 0.75]
    for given in (np.array(mean, np.float32), torch.tensor(mean)):
        assert torch.equal(ops.normalise(IMAGES, given, given), ops.normalise(IMAGES, mean, mean))


def test_mae_keeps_its_mask_token_and_positions_in_three_dimensions() -> None:
    token = torch.randn(1, 1, 4, requires_grad=True)
    positions = torch.randn(1, 36, 4, requires_grad=True)
    flat = token.detach().flatten().requires_grad_(), positions.detach()[0].requires_grad_()
    results = (
        ops.scatter_tokens(SHOWN, token, VIEWS.restore, positions),
        ops.scatter_tokens(SHOWN, flat[0], VIEWS.restore, flat[1]),
    )
    assert torch.equal(*results)
    for result in results:
        result.square().sum().backward()
    for one, other in zip((token, positions), flat, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.shape == one.shape
        assert torch.equal(one.grad.flatten(), other.grad.flatten())


CALLS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: masks().mask,
    "block": lambda: masks(pattern="block", mask_ratio=0.5).mask,
    "beit": lambda: masks(pattern="beit").mask,
    "complementary": lambda: masks(regulation="complementary").mask,
    "reference of beit": lambda: ops.reference("disjoint_masks")(
        IDS, KEY, *ops.mask_plan((6, 6), views=2, mask_ratio=0.6, pattern="beit").op_arguments
    )[3],
    "keyed_uniform": lambda: ops.keyed_uniform(IDS, 5, key=ops.make_key(1, 2), domain=Domain.CROP),
    "make_key": lambda: ops.make_key(1, 2),
    "hog": lambda: ops.hog(IMAGES),
    "reference of hog": lambda: ops.reference("hog")(IMAGES, 8, 9, 16, "maskfeat_gauss", "l2", "nhwc", torch.float32),
    "normalise": lambda: ops.normalise(IMAGES, [0.5] * 3, [0.5] * 3),
    "gather_tokens": lambda: ops.gather_tokens(X, VIEWS.visible),
    "scatter_tokens": lambda: ops.scatter_tokens(SHOWN, X[0, 0], VIEWS.restore, X[0]),
    "masked_depthwise_conv2d": convolution,
    "reference of the convolution": lambda: torch.func.jvp(lambda x: convolution(x=x), (PIXELS,), (PIXELS,)),
    "gelu_mlp": lambda: ops.gelu_mlp(*MLP),
    "short_attention": lambda: ops.short_attention_packed(QKV),
    "reference of short_attention": lambda: torch.ops.dmjd.short_attention_packed(QKV, None, 0.5),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_default_device_is_nothing_to_an_op(call: str) -> None:
    expected = torch.utils._pytree.tree_leaves(CALLS[call]())
    with torch.device("meta"):
        found = torch.utils._pytree.tree_leaves(CALLS[call]())
    assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_a_default_device_of_cuda_is_nothing_to_an_op_on_the_cpu(call: str) -> None:
    expected = torch.utils._pytree.tree_leaves(CALLS[call]())
    torch.set_default_device("cuda")
    try:
        found = torch.utils._pytree.tree_leaves(CALLS[call]())
    finally:
        torch.set_default_device(None)
    assert all(map(torch.equal, found, expected))


def test_meta_tensors_give_shapes() -> None:
    meta = [tensor.to("meta").requires_grad_() for tensor in MLP]
    result = ops.gelu_mlp(*meta)
    assert (result.device.type, result.shape) == ("meta", (2, 3, 2))
    result.sum().backward()
    assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in meta)
    moved = {"x": PIXELS, "visible": VIEWS.visible, "restore": VIEWS.restore, "weight": WEIGHT}
    assert convolution(**{name: tensor.to("meta") for name, tensor in moved.items()}).shape == PIXELS.shape
    tangent = torch.func.jvp(ops.gelu_mlp, tuple(t.detach() for t in meta), tuple(t.detach() for t in meta))[1]
    assert (tangent.device.type, tangent.shape) == ("meta", (2, 3, 2))


def test_flops_are_those_that_the_reference_is_counted_with() -> None:
    flat = VIEWS.map(lambda field: field.flatten(0, 1))

    def count(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[int, int]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        with FlopCounterMode(display=False) as counter:
            result = function(*leaves)
        with FlopCounterMode(display=False) as backward:
            result.sum().backward()
        return counter.get_total_flops(), backward.get_total_flops()

    for name, inputs in (("short_attention", [*QKV.unbind(2)]), ("short_attention_packed", [QKV])):
        op = getattr(torch.ops.dmjd, name)
        found = count(lambda *x, op=op: op(*x, None, 0.5)[0], inputs)
        assert found == (4 * 2 * 3**2 * 2 * 4, 10 * 2 * 3**2 * 2 * 4)
        assert found[0] == count(lambda *x, name=name: ops.reference(name)(*x, None, 0.5)[0], inputs)[0]

    rows, depth, hidden, out = 6, 4, 5, 2
    forward, backward = count(ops.gelu_mlp, MLP)
    assert (forward, backward) == (2 * rows * hidden * (depth + out), 2 * rows * hidden * (3 * depth + 2 * out))
    assert forward == count(ops.reference("gelu_mlp"), MLP)[0]
    with FlopCounterMode(display=False) as counter:
        ops.reference("gelu_mlp_backward")(torch.ones(2, 3, 2), *MLP[:4])
    assert backward == counter.get_total_flops()

    dense = ops.reference("masked_depthwise_conv2d")
    found = count(lambda x, weight: convolution(x=x, weight=weight), [PIXELS, WEIGHT])
    expected = count(lambda x, w: dense(x, flat.visible, flat.restore, w, None, 6, 6, 2), [PIXELS, WEIGHT])
    assert found == expected
    assert found[0] == 2 * PIXELS.shape[0] * 12 * 12 * PIXELS.shape[-1] * 9


@pytest.mark.parametrize("first", ["dmjd.ops", "torch.utils.flop_counter"])
def test_flops_are_counted_whichever_is_imported_first(first: str) -> None:
    code = f"""
import {first}, sys, torch, dmjd.ops
assert {first!r} != "dmjd.ops" or "triton" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    dmjd.ops.gelu_mlp(*(torch.ones(shape) for shape in ((1, 2), (3, 2), (3,), (4, 3), (4,))))
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(2 * 3 * (2 + 4))


def test_views_and_plans_are_loaded_as_weights_are() -> None:
    plans = [ops.mask_plan((6, 6), views=2, mask_ratio=0.6, pattern=pattern) for pattern in ("block", "beit")]
    file = io.BytesIO()
    torch.save({"views": VIEWS, "plans": plans}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["views"]) is Views
    assert all(map(torch.equal, loaded["views"], VIEWS))
    assert loaded["plans"] == plans
    assert torch.equal(ops.draw_masks(IDS, loaded["plans"][1], seed=0, epoch=0).mask, masks(pattern="beit").mask)


def test_complex_tokens_have_the_gradient_of_their_parts() -> None:
    x = torch.view_as_complex(torch.randn(2, 36, 4, 2)).requires_grad_()
    parts = torch.view_as_real(x.detach()).flatten(2).requires_grad_()
    weight = torch.randn(4, VIEWS.visible.shape[-1], 8)
    (torch.view_as_real(ops.gather_tokens(x, VIEWS.visible)).flatten(2) * weight).sum().backward()
    (ops.gather_tokens(parts, VIEWS.visible) * weight).sum().backward()
    assert x.grad is not None
    assert parts.grad is not None
    assert torch.equal(torch.view_as_real(x.grad).flatten(2), parts.grad)


@pytest.mark.parametrize("empty", ["rows", "inputs", "hidden", "outputs"])
def test_gelu_mlp_of_a_width_of_zero_is_what_the_layers_give(empty: str) -> None:
    rows, depth, hidden, out = (0 if name == empty else 2 for name in ("rows", "inputs", "hidden", "outputs"))
    shapes = (3, rows, depth), (hidden, depth), (hidden,), (out, hidden), (out,)
    found, expected = ([torch.ones(shape, requires_grad=True) for shape in shapes] for _ in range(2))
    ops.gelu_mlp(*found).sum().backward()
    ops.reference("gelu_mlp")(*expected).sum().backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


@pytest.mark.parametrize("word", [-1, 1 << 32, (1 << 40) + 5, -(1 << 62)])
def test_the_reference_of_philox_reads_the_low_halves_as_the_kernels_do(word: int) -> None:
    counter, key = torch.full((2, 4), word), torch.tensor([word, 1 - word])
    expected = ops.philox4x32(counter & 0xFFFFFFFF, key & 0xFFFFFFFF)
    assert torch.equal(ops.reference("philox4x32")(counter, key), expected)
    assert torch.equal(ops.philox4x32(counter, key), expected)


def test_a_program_that_returns_views_is_exported_saved_and_loaded() -> None:
    class Masks(torch.nn.Module):
        def forward(self, ids: Tensor) -> Views:
            views: Views = ops.disjoint_masks(ids, **REQUEST)
            return views

    file = io.BytesIO()
    torch.export.save(torch.export.export(Masks(), (IDS,)), file)
    file.seek(0)
    assert all(map(torch.equal, torch.export.load(file).module()(IDS), VIEWS))


def test_masks_compile_with_sizes_rates_and_keys_left_open() -> None:
    def masks_of(x: Tensor, ids: Tensor, ratio: float, seed: int) -> Views:
        grid = (x.shape[1], x.shape[2])
        views: Views = ops.disjoint_masks(ids, grid=grid, views=2, mask_ratio=ratio, seed=seed, epoch=1)
        return views

    torch._dynamo.reset()
    compiled = torch.compile(masks_of, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, height, width, ratio in ((2, 4, 6, 0.6), (3, 10, 6, 0.7)):
        arguments = torch.empty(batch, height, width), torch.arange(batch), ratio, batch
        assert all(map(torch.equal, compiled(*arguments), masks_of(*arguments)))


def test_what_a_plan_derives_from_its_counts_can_be_traced() -> None:
    plan = ops.mask_plan((6, 6), views=2, mask_ratio=0.6)
    scaled = torch.compile(lambda x: x * plan.m_corr * plan.units, fullgraph=True, backend="eager")
    assert scaled(torch.ones(1)).item() == pytest.approx(plan.hidden)


def test_a_type_checker_knows_the_words() -> None:
    for function in (ops.mask_plan, ops.disjoint_masks):
        hints = get_type_hints(function)
        assert set(get_args(hints["pattern"])) == {"uniform", "block", "beit"}
        assert set(get_args(hints["regulation"])) == {"disjoint", "none", "complementary"}
        assert set(get_args(hints["rounding"])) == {"exact", "official"}
    hints = get_type_hints(ops.hog)
    assert set(get_args(hints["flavour"])) == {"dmjd", "maskfeat", "maskfeat_gauss", "skimage"}
    assert set(get_args(hints["norm"])) == {"none", "l2", "layernorm"}
    assert set(get_args(hints["layout"])) == {"nhwc", "nchw"}
