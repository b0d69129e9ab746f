"""Residual addition and LayerNorm, forward and backward, as compiled blocks have them: eager and by torch.compile.

    python benchmarks/op_add_layer_norm.py [--json FOLDER]

The residual stream x is float32, the branch added to it bfloat16 (with scales of rows as stochastic depth has them, or
of channels as BEiT's layer scale), and the normed result bfloat16, for the linear layer that follows. Gradients are
those of x, branch, weight and bias. The rows "bias" also compute the gradient of the bias of the linear layer that ends
the branch, the sum of the branch's gradient over rows, which a compiled block computes in the same place. The floor is
what must move, each tensor once, at the copy speed of the card: forward x, branch and both results, 12 bytes an
element; backward the gradients of both results, the sum, and both gradients, 16 bytes (18 with scales of channels,
whose gradient reads the branch).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import timing
import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


class Case(NamedTuple):
    name: str
    images: int
    tokens: int
    width: int
    scale: str = ""  # "rows" or "channels"


CASES = (
    Case("ConvViT stage 3", 256, 76, 768),
    Case("decoder", 256, 196, 512),
    Case("MAE encoder", 256, 50, 768),
    Case("fine-tuning", 256, 197, 768, "rows"),
    Case("ConvViT stage 1", 256, 76 * 16, 256),
    Case("ConvViT stage 2", 256, 76 * 4, 384),
    Case("BEiT", 128, 197, 768, "channels"),
    Case("ViT-L encoder", 256, 50, 1024),
)

Inputs = tuple[Tensor, ...]


def plain(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + branch
    return total, F.layer_norm(total, weight.shape, weight, bias, EPS).to(branch.dtype)


def scaled(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    total = x + scale * branch
    return total, F.layer_norm(total, weight.shape, weight, bias, EPS).to(branch.dtype)


def with_bias(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    return plain(x, branch + last.to(branch.dtype), weight, bias)


def measure(case: Case, bytes_per_us: float, table: timing.Table) -> None:
    _, images, tokens, width, scaling = case
    name = f"{case.name}: {images * tokens} x {width}" + (f", scales of {scaling}" if scaling else "")

    def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, device="cuda").to(dtype)

    shape, bf16 = (images, tokens, width), torch.bfloat16
    weight, bias, last = (draw(width).requires_grad_() for _ in range(3))
    scale = draw(images, 1, 1) if scaling == "rows" else draw(width).requires_grad_()
    streams = [(draw(*shape).requires_grad_(), draw(*shape, dtype=bf16).requires_grad_()) for _ in range(4)]
    grads = [(draw(*shape), draw(*shape, dtype=bf16)) for _ in range(4)]
    elements = images * tokens * width
    back = 18 if scaling == "channels" else 16

    def add(part: str, way: str, calls: list[timing.Call], bytes_moved: int) -> None:
        median, how = timing.device_us(calls, repeats=2)
        speed = f"{how}, {bytes_moved * elements / median / 1000:.0f} GB/s"
        table.add(name, f"{part}: {way}", median, bytes_moved * elements / bytes_per_us, speed)

    def time(way: str, call: Callable[..., tuple[Tensor, Tensor]], *more: Tensor) -> None:
        leaves = [weight, bias, *(tensor for tensor in more if tensor.requires_grad)]
        inputs: list[Inputs] = [(*stream, weight, bias, *more) for stream in streams]
        add("forward", way, [lambda i=i: call(*i) for i in inputs], 12)
        results = [call(*i) for i in inputs]
        backward: list[timing.Call] = [
            lambda r=r, s=s, g=g: torch.autograd.grad(r, (*s, *leaves), g, retain_graph=True)
            for r, s, g in zip(results, streams, grads, strict=True)
        ]
        add("backward", way, backward, back)
        del results, backward
        both: list[timing.Call] = [
            lambda i=i, s=s, g=g: torch.autograd.grad(call(*i), (*s, *leaves), g)
            for i, s, g in zip(inputs, streams, grads, strict=True)
        ]
        add("both", way, both, 12 + back)

    more = (scale,) if scaling else ()
    function = scaled if scaling else plain
    time("eager", function, *more)
    torch._dynamo.reset()
    time("torch.compile", torch.compile(function, dynamic=False), *more)
    if not scaling:
        time("torch.compile, bias", torch.compile(with_bias, dynamic=False), last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--json", default="benchmarks/results", metavar="FOLDER")
    options = parser.parse_args()
    torch._functorch.config.donated_buffer = False  # a backward pass is timed more than once
    table = timing.Table("op_add_layer_norm", timing.device_name("cuda"))
    bytes_per_us = timing.copy_bytes_per_us()
    print(f"copy {bytes_per_us / 1e6:.2f} TB/s")
    for case in CASES:
        measure(case, bytes_per_us, table)
        torch.cuda.empty_cache()
        table.save(options.json)


if __name__ == "__main__":
    main()
