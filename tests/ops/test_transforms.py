"""Ops under torch.func, forward-mode AD and second derivatives, against their references in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from dmjd.ops import (
    disjoint_masks,
    gather_tokens,
    gelu_mlp,
    masked_depthwise_conv2d,
    reference,
    scatter_tokens,
    status,
)

VIEWS = disjoint_masks(torch.arange(2), grid=(3, 3), views=2, mask_ratio=0.5, seed=0, epoch=0)
FLAT = VIEWS.map(lambda field: field.flatten(0, 1))
VISIBLE = VIEWS.visible.shape[-1]

Function = Callable[..., Any]

# What an op's user calls, the same through the reference, and the shapes of what can be differentiated.
OPS: dict[str, tuple[Function, Function, list[tuple[int, ...]]]] = {
    "gather_tokens": (
        lambda x: gather_tokens(x, VIEWS.visible, 1),
        lambda x: reference("gather_tokens")(x, VIEWS.visible, 1),
        [(2, 10, 4)],
    ),
    "scatter_tokens": (
        lambda x, token, positions: scatter_tokens(x, token, VIEWS.restore, positions, 1),
        lambda x, token, positions: reference("scatter_tokens")(x, token, VIEWS.restore, positions, 1),
        [(4, 1 + VISIBLE, 4), (4,), (9, 4)],
    ),
    "masked_depthwise_conv2d": (
        lambda x, weight, bias: masked_depthwise_conv2d(x, VIEWS.visible, VIEWS.restore, weight, bias, (3, 3), 2),
        lambda x, weight, bias: reference("masked_depthwise_conv2d")(
            x, FLAT.visible, FLAT.restore, weight, bias, 3, 3, 2
        ),
        [(4, VISIBLE, 4, 3), (3, 3, 3), (3,)],
    ),
    # Its front end goes to scaled_dot_product_attention on the CPU, which has no forward mode.
    "short_attention": (
        lambda q, k, v, bias: torch.ops.dmjd.short_attention(q, k, v, bias, 0.5)[0],
        lambda q, k, v, bias: reference("short_attention")(q, k, v, bias, 0.5)[0],
        [(2, 3, 2, 4), (2, 3, 2, 4), (2, 3, 2, 4), (2, 3, 3)],
    ),
    "gelu_mlp": (gelu_mlp, reference("gelu_mlp"), [(2, 3, 4), (5, 4), (5,), (2, 5), (2,)]),
}

ON_CARDS_ALONE = ("gelu_mlp", "short_attention")  # kernels

Values = tuple[Tensor, ...]


def scalar(f: Function) -> Function:
    return lambda *values: f(*values).square().sum().sin()


def every(values: Values) -> tuple[int, ...]:
    return tuple(range(len(values)))


def three(values: Values) -> Values:
    return tuple(torch.stack([value, 2 * value, value - 1]) for value in values)


def tangent(f: Function, values: Values, directions: Values, moved: tuple[int, ...]) -> Tensor:
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(value, direction) if i in moved else value
            for i, (value, direction) in enumerate(zip(values, directions, strict=True))
        ]
        found = forward_ad.unpack_dual(f(*duals)).tangent
        assert found is not None
        return found.clone()


# Each is a function of an op, of the values it is taken at and of directions.
TRANSFORMS: dict[str, Callable[[Function, Values, Values], Any]] = {
    "grad": lambda f, v, d: grad(scalar(f), every(v))(*v),
    "vjp": lambda f, v, d: vjp(f, *v)[1](f(*v)),
    "jvp": lambda f, v, d: jvp(f, v, d),
    "jvp of the first alone": lambda f, v, d: jvp(lambda x: f(x, *v[1:]), v[:1], d[:1]),
    "jvp of the last alone": lambda f, v, d: jvp(lambda x: f(*v[:-1], x), v[-1:], d[-1:]),
    "jacrev": lambda f, v, d: jacrev(f, every(v))(*v),
    "jacfwd": lambda f, v, d: jacfwd(f, every(v))(*v),
    "hessian": lambda f, v, d: hessian(scalar(f), every(v))(*v),
    "vmap": lambda f, v, d: vmap(f)(*three(v)),
    "vmap of the last alone": lambda f, v, d: vmap(lambda x: f(*v[:-1], x), -1, 1)(torch.stack([v[-1], d[-1]], -1)),
    "vmap of grad": lambda f, v, d: vmap(grad(scalar(f), every(v)))(*three(v)),
    "grad of vmap": lambda f, v, d: grad(lambda *x: vmap(f)(*three(x)).square().sum(), every(v))(*v),
    "jvp of grad": lambda f, v, d: jvp(grad(scalar(f), every(v)), v, d),
    "grad of jvp": lambda f, v, d: grad(lambda *x: jvp(scalar(f), x, d)[1].sin(), every(v))(*v),
    "dual tensors": lambda f, v, d: tangent(f, v, d, every(v)),
    "a dual weight": lambda f, v, d: tangent(f, v, d, (len(v) - 1,)),
    "dual tensors without grad": lambda f, v, d: torch.no_grad()(tangent)(f, v, d, every(v)),
    "dual among parameters": lambda f, v, d: tangent(f, tuple(x.clone().requires_grad_() for x in v), d, (0,)).detach(),
    "functional.jvp": lambda f, v, d: torch.autograd.functional.jvp(f, v, d),
    "functional.hvp": lambda f, v, d: torch.autograd.functional.hvp(scalar(f), v, d),
    "functional.jacobian, vectorised": lambda f, v, d: torch.autograd.functional.jacobian(f, v, vectorize=True),
    "inference mode": lambda f, v, d: torch.inference_mode()(jvp)(f, v, d),
}


def make(op: str) -> tuple[Values, Values]:
    generator = torch.Generator().manual_seed(0)
    shapes = OPS[op][2]
    values, directions = (
        tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes) for _ in range(2)
    )
    return values, directions


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_gives_what_it_gives_of_the_reference(op: str, transform: str) -> None:
    ours, theirs, _ = OPS[op]
    results = [tree_leaves(TRANSFORMS[transform](f, *make(op))) for f in (ours, theirs)]
    assert len(results[0]) == len(results[1]) > 0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert any(bool(one.count_nonzero()) for one in results[0])


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_every_kind_and_order_equal_differences(op: str) -> None:
    values = [value.requires_grad_() for value in make(op)[0]]
    assert torch.autograd.gradcheck(
        OPS[op][0], values, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(OPS[op][0], values, check_fwd_over_rev=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transform", ["jvp", "vmap of grad", "dual tensors"])
def test_a_transform_compiles_without_graph_breaks(op: str, transform: str) -> None:
    torch._dynamo.reset()
    values, directions = make(op)

    def run(*inputs: Tensor) -> Any:
        return TRANSFORMS[transform](OPS[op][0], inputs[: len(values)], inputs[len(values) :])

    expected = run(*values, *directions)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(*values, *directions)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("op", OPS)
def test_a_plain_call_still_goes_to_the_kernel(op: str) -> None:
    """The reference must not serve a training step, nor its backward pass."""
    if op not in ON_CARDS_ALONE and status()[op]["CPU"] != "native":
        pytest.skip("the native kernels are not built or DMJD_DISABLE_EXT is set")
    values = [value.requires_grad_() for value in make(op)[0]]
    with torch.profiler.profile() as profile:
        OPS[op][0](*values).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {f"dmjd::{op}", f"dmjd::{op}_backward"} <= names
    if op not in ON_CARDS_ALONE:
        assert not any("aten::gather" in name or "aten::conv" in name for name in names)


def test_ids_can_be_mapped_over() -> None:
    x = make("gather_tokens")[0][0].requires_grad_()
    several = torch.stack([VIEWS.visible, VIEWS.visible.flip(1)])
    mapped = vmap(lambda ids: gather_tokens(x, ids, 1))(several)
    looped = torch.stack([gather_tokens(x, ids, 1) for ids in several])
    assert torch.equal(mapped, looped)
    gradients = [torch.autograd.grad(result.sin().sum(), x)[0] for result in (mapped, looped)]
    torch.testing.assert_close(*gradients)


class Block(torch.nn.Module):
    """gelu_mlp between a gather and a scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)
        self.token = torch.nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        shown = gather_tokens(x, VIEWS.visible)
        hidden = gelu_mlp(shown, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        return scatter_tokens(hidden, self.token, VIEWS.restore).square().mean()


def test_functional_call_of_a_module_gives_its_gradients() -> None:
    torch.manual_seed(0)
    module, x = Block().double(), torch.randn(2, 9, 4, dtype=torch.float64)
    module(x).backward()
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    found = grad(lambda values: functional_call(module, values, (x,)))(parameters)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad)
