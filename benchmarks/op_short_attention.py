"""short_attention, forward and backward, beside each backend of PyTorch's scaled_dot_product_attention.

    python benchmarks/op_short_attention.py [--json FOLDER]

bfloat16, q, k and v as views of one packed projection [B, N, 3, H, D], which no way copies; gradients of q, k and v
apart, so that no way stacks them. The rows "packed" are a whole forward and backward pass from the projection to its
gradient, where PyTorch stacks what ours has written in place. The floor is what must move (forward q, k, v and the
result; backward those, the result's gradient and three gradients; each once) at the copy speed of the card; notes give
the time of all exponentials at 16 a clock and multiprocessor, and of all products at the rate of a large one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import timing
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dmjd.ops import short_attention_packed, status

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
EXPONENTIALS_A_CLOCK, BOOST_HZ = 16, 1.755e9  # of a multiprocessor; of an H100 or H200


class Case(NamedTuple):
    name: str
    batch: int
    heads: int
    tokens: int
    depth: int
    bias: bool = False  # one map for all images, with its gradient


CASES = (
    Case("decoder", 256, 16, 196, 32),
    Case("ConvViT stage 3", 256, 12, 76, 64),
    Case("MAE encoder", 256, 12, 50, 64),
    Case("fine-tuning", 128, 12, 197, 64),
    Case("ViT-H encoder", 64, 16, 65, 80),
    Case("patches of 14, decoder", 128, 16, 257, 32),
    Case("BEiT", 128, 12, 197, 64, bias=True),
)


def product_flops_per_us(size: int = 8192) -> float:
    left, right = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    return 2 * size**3 / timing.device_us([lambda: left @ right], repeats=4)[0]


def measure(case: Case, bytes_per_us: float, flops_per_us: float, table: timing.Table) -> None:
    _, batch, heads, tokens, depth, with_bias = case
    name = f"{case.name}: {batch} x {heads} x {tokens} x {depth}"
    scale = depth**-0.5
    packed = [
        torch.randn(batch, tokens, 3, heads, depth, device="cuda").bfloat16().requires_grad_()
        for _ in range(timing.BUFFERS)
    ]
    grad = torch.randn(batch, tokens, heads, depth, device="cuda").bfloat16()
    bias = torch.randn(heads, tokens, tokens, device="cuda").bfloat16().requires_grad_() if with_bias else None
    parts = [[part.detach().requires_grad_() for part in qkv.unbind(2)] for qkv in packed]
    pairs = batch * heads * tokens**2
    exponentials = pairs / (
        torch.cuda.get_device_properties(0).multi_processor_count * EXPONENTIALS_A_CLOCK * BOOST_HZ / 1e6
    )

    def add(part: str, way: str, calls: list[timing.Call], moved: int, products: int) -> None:
        median, how = timing.device_us(calls, repeats=2)
        notes = f"{how}, exponentials {exponentials * (2 if products == 7 else 1):.0f} us"
        notes += f", products {2 * pairs * depth * products / flops_per_us:.0f} us"
        table.add(name, f"{part}: {way}", median, moved * grad.nbytes / bytes_per_us, notes)

    def peer(parts: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def gradients(call: Callable[..., Tensor], leaves: list[Tensor]) -> timing.Call:
        """The backward pass alone, of a forward pass that is over."""
        result = call()
        return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)

    extra = [] if bias is None else [bias]
    mask = None if bias is None else bias.unsqueeze(0).expand(batch, -1, -1, -1)
    detached = None if mask is None else mask.detach()
    for way, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            try:
                peer(parts[0], mask)
            except RuntimeError:
                continue  # a backend that takes no bias
            forward = [lambda p=p: peer([part.detach() for part in p], detached) for p in parts]
            add("forward", way, forward, 4, 2)
            backward = [gradients(lambda p=p: peer(p, mask), [*p, *extra]) for p in parts]
            add("backward", way, backward, 8, 5)
            del backward
            both: list[timing.Call] = [
                lambda qkv=qkv: torch.autograd.grad(peer(qkv.unbind(2), mask), [qkv, *extra], grad) for qkv in packed
            ]
            add("packed", way, both, 12, 7)
    op, op_backward = torch.ops.dmjd.short_attention, torch.ops.dmjd.short_attention_backward
    fixed = None if bias is None else bias.detach()
    views = [qkv.detach().unbind(2) for qkv in packed]
    add("forward", "ours", [lambda v=v: op(*v, fixed, scale) for v in views], 4, 2)
    saved = [(*v, fixed, *op(*v, fixed, scale)) for v in views]
    add("backward", "ours", [lambda s=s: op_backward(grad, *s, scale, with_bias) for s in saved], 8, 5)
    both = [
        lambda qkv=qkv: torch.autograd.grad(short_attention_packed(qkv, bias), [qkv, *extra], grad) for qkv in packed
    ]
    add("packed", "ours", both, 12, 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--json", default="benchmarks/results", metavar="FOLDER")
    options = parser.parse_args()
    served = status()["short_attention"]["CUDA"]
    if served != "native":
        raise SystemExit(f"short_attention has no kernel here: {served}")
    table = timing.Table("op_short_attention", timing.device_name("cuda"))
    bytes_per_us, flops_per_us = timing.copy_bytes_per_us(), product_flops_per_us()
    for case in CASES:
        measure(case, bytes_per_us, flops_per_us, table)
        torch.cuda.empty_cache()
    table.save(options.json)


if __name__ == "__main__":
    main()
