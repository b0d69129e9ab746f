"""gelu_mlp, forward and both together with backward: PyTorch's layers eager, compiled, compiled and checkpointed, ours.

    python benchmarks/op_gelu_mlp.py [--json FOLDER]

The shapes are the MLPs of a ConvViT-B step on 128 images in two block views at .6, in bfloat16. Beside the ways stand
their matrix products alone, as if bias, GELU and its gradient cost nothing: no way can be faster that does not compute
less. Ours and the checkpointed way keep x alone and compute the first product twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import timing
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dmjd.ops import gelu_mlp, status

VIEWS, VISIBLE, TOKENS = 256, 76, 196


class Case(NamedTuple):
    name: str
    rows: int
    width: int
    hidden: int


CASES = (
    Case("stage 1", VIEWS * VISIBLE * 16, 256, 2048),
    Case("stage 2", VIEWS * VISIBLE * 4, 384, 3072),
    Case("stage 3", VIEWS * VISIBLE, 768, 3072),
    Case("decoder", VIEWS * TOKENS, 512, 4096),
)

Mlp = Callable[..., Tensor]


def layers(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


def checkpointed(*inputs: Tensor) -> Tensor:
    return checkpoint(layers, *inputs, use_reentrant=False)


def products(x: Tensor, weight1: Tensor, weight2: Tensor, hidden: Tensor, grad: Tensor, backward: bool) -> None:
    x @ weight1.T
    hidden @ weight2.T
    if backward:
        grad @ weight2
        hidden @ weight1
        hidden.T @ x
        grad.T @ hidden


def measure(case: Case, table: timing.Table) -> None:
    def draw(*size: int) -> Tensor:
        return torch.randn(size, device="cuda").to(torch.bfloat16)

    xs = [draw(case.rows, case.width).requires_grad_() for _ in range(timing.BUFFERS)]
    grad = draw(case.rows, case.width)
    weights = [
        tensor.requires_grad_()
        for tensor in (
            draw(case.hidden, case.width),
            draw(case.hidden),
            draw(case.width, case.hidden),
            draw(case.width),
        )
    ]
    name = f"{case.name}: {case.rows} x {case.width} -> {case.hidden}"

    def both(mlp: Mlp, x: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(mlp(x, *weights), (x, *weights), grad)

    def add(way: str, forward: list[timing.Call], together: list[timing.Call]) -> None:
        for part, calls in (("forward", forward), ("forward and backward", together)):
            median, how = timing.device_us(calls, repeats=1)
            table.add(name, f"{way}, {part}", median, notes=how)

    detached = [weight.detach() for weight in weights]
    hidden = draw(case.rows, case.hidden)
    bare = [
        [
            lambda x=x, backward=backward: products(x.detach(), detached[0], detached[2], hidden, grad, backward)
            for x in xs
        ]
        for backward in (False, True)
    ]
    add("products alone", *bare)
    ways: dict[str, Mlp] = {
        "PyTorch": layers,
        "torch.compile": torch.compile(layers, dynamic=False),
        "torch.compile, checkpointed": torch.compile(checkpointed, dynamic=False),
        "ours": gelu_mlp,
    }
    for way, mlp in ways.items():

        @torch.no_grad()
        def forward(x: Tensor, mlp: Mlp = mlp) -> Tensor:
            return mlp(x, *weights)

        add(way, [lambda x=x, f=forward: f(x) for x in xs], [lambda x=x, m=mlp: both(m, x) for x in xs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--json", default="benchmarks/results", metavar="FOLDER")
    options = parser.parse_args()
    served = status()["gelu_mlp"]["CUDA"]
    if served != "triton":
        raise SystemExit(f"gelu_mlp has no kernel here: {served}")
    table = timing.Table("op_gelu_mlp", timing.device_name("cuda"))
    for case in CASES:
        torch._dynamo.reset()
        measure(case, table)
        torch.cuda.empty_cache()
    table.save(options.json)


if __name__ == "__main__":
    main()
