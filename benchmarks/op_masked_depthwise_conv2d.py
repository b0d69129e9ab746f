"""masked_depthwise_conv2d, forward and backward: through a dense map, that map's convolution alone, and ours.

    python benchmarks/op_masked_depthwise_conv2d.py [--device cuda|cpu] [--json FOLDER]

The shapes are the two convolution stages of ConvViT-B and -L, two block-masked views of each image, 76 of 196 tokens
visible (and once 49, MAE's rate). Beside the dense map that scatters to zeros, convolves channels-last and gathers back
stands the convolution alone, as if maps cost nothing. The floor is what must move (forward x and the result; backward x
and two gradients; each once) at the copy speed of the card; notes give the time of all multiply-adds of an unmasked
neighbourhood in float32 units. On the CPU one thread works on two images.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import timing
import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.ops import disjoint_masks, reference, status

VIEWS, GRID, KERNEL = 2, (14, 14), 5
BATCH = {"cuda": 256, "cpu": 2}
PADDING = [KERNEL // 2, KERNEL // 2]
FLOAT32_LANES, BOOST_HZ = 128, 1.755e9  # of a Hopper multiprocessor; of an H100 SXM


class Case(NamedTuple):
    name: str
    channels: int
    q: int
    mask_ratio: float = 0.6
    dtype: torch.dtype = torch.bfloat16
    compile: bool = False  # also time torch.compile of the dense map: seconds each


CASES = {
    "cuda": (
        Case("B stage 1", 256, 4, compile=True),
        Case("B stage 2", 384, 2),
        Case("L stage 1", 384, 4),
        Case("L stage 2", 768, 2),
        Case("B stage 1", 256, 4, mask_ratio=0.75),
        Case("B stage 1", 256, 4, dtype=torch.float32),
    ),
    "cpu": (
        Case("B stage 1", 256, 4, dtype=torch.float32),
        Case("B stage 1", 256, 4),
        Case("B stage 2", 384, 2, dtype=torch.float32),
    ),
}


class Inputs(NamedTuple):
    x: Tensor  # [K*B, V, q*q, C]
    grad: Tensor
    visible: Tensor  # [K*B, V]
    restore: Tensor  # [K*B, N]


def make_inputs(case: Case, device: str) -> list[Inputs]:
    inputs = []
    for epoch in range(timing.BUFFERS):
        views = disjoint_masks(
            torch.arange(BATCH[device], device=device),
            grid=GRID,
            views=VIEWS,
            mask_ratio=case.mask_ratio,
            pattern="block",
            seed=0,
            epoch=epoch,
        )
        visible = views.visible.flatten(0, 1)
        x, grad = (
            torch.randn(*visible.shape, case.q**2, case.channels, device=device).to(case.dtype) for _ in range(2)
        )
        inputs.append(Inputs(x, grad, visible, views.restore.flatten(0, 1)))
    return inputs


def to_map(x: Tensor, index: Tensor, q: int) -> Tensor:
    """Channels-last map ``[R, C, H, W]``, zero where hidden."""
    (height, width), (rows, _, _, channels) = GRID, x.shape
    tokens = x.new_zeros(rows, height * width, q * q, channels).scatter_(1, index, x)
    pixels = tokens.view(rows, height, width, q, q, channels).permute(0, 1, 3, 2, 4, 5)
    return pixels.reshape(rows, height * q, width * q, channels).permute(0, 3, 1, 2)


def from_map(pixel_map: Tensor, index: Tensor, q: int) -> Tensor:
    (height, width), (rows, channels) = GRID, pixel_map.shape[:2]
    pixels = pixel_map.permute(0, 2, 3, 1).reshape(rows, height, q, width, q, channels).permute(0, 1, 3, 2, 4, 5)
    return pixels.reshape(rows, height * width, q * q, channels).gather(1, index)


def convolve(pixel_map: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(pixel_map, weight, bias, padding=PADDING, groups=weight.shape[0])


def convolve_backward(grad_map: Tensor, pixel_map: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    channels = weight.shape[0]
    return torch.ops.aten.convolution_backward(
        grad_map, pixel_map, weight, [channels], [1, 1], PADDING, [1, 1], False, [0, 0], channels, [True] * 3
    )


def dense(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor, q: int) -> Tensor:
    return from_map(convolve(to_map(x, index, q), weight, bias), index, q)


def dense_backward(
    grad: Tensor, pixel_map: Tensor, index: Tensor, weight: Tensor, q: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``pixel_map`` is the forward's, which autograd keeps."""
    grad_map, grad_weight, grad_bias = convolve_backward(to_map(grad, index, q), pixel_map, weight)
    return from_map(grad_map, index, q), grad_weight, grad_bias


def measure(case: Case, device: str, bytes_per_us: float | None, table: timing.Table) -> None:
    inputs = make_inputs(case, device)
    x, _, visible, _ = inputs[0]
    channels, q = case.channels, case.q
    dtype = str(case.dtype).removeprefix("torch.")
    name = f"{case.name} C{channels} q{q} {visible.shape[1]}/{GRID[0] * GRID[1]} x{visible.shape[0]} {dtype}"
    weight, bias = torch.randn(channels, KERNEL, KERNEL, device=device), torch.randn(channels, device=device)
    low_weight, low_bias = weight[:, None].to(case.dtype), bias.to(case.dtype)
    indices = [each.visible[:, :, None, None].expand(each.x.shape) for each in inputs]
    maps = [to_map(each.x, index, q) for each, index in zip(inputs, indices, strict=True)]
    pairs = list(zip(inputs, indices, maps, strict=True))

    def add(way: str, calls: list[timing.Call], moved: int, sums: int, slow: bool = False) -> None:
        floor, notes = None, ""
        if device == "cpu":
            median = timing.host_us(calls)
        else:
            median, notes = timing.device_us(calls, repeats=1 if slow else 4)
            floor = moved * x.nbytes / bytes_per_us if bytes_per_us else None
            rate = torch.cuda.get_device_properties(0).multi_processor_count * FLOAT32_LANES * BOOST_HZ / 1e6
            notes += f", multiply-adds {sums * x.numel() * KERNEL**2 / rate:.0f} us"
        table.add(name, way, median, floor, notes)

    def rows(direction: str, moved: int, sums: int, ways: dict[str, list[timing.Call]]) -> None:
        for way, calls in ways.items():
            add(f"{direction}: {way}", calls, moved, sums, slow=way != "ours")

    ops, args = torch.ops.dmjd, (*GRID, q)
    forward: dict[str, list[timing.Call]] = {
        "dense map": [lambda e=e, i=i: dense(e.x, i, low_weight, low_bias, q) for e, i, _ in pairs],
        "its convolution alone": [lambda m=m: convolve(m, low_weight, low_bias) for *_, m in pairs],
    }
    backward: dict[str, list[timing.Call]] = {
        "dense map": [lambda e=e, i=i, m=m: dense_backward(e.grad, m, i, low_weight, q) for e, i, m in pairs],
        "its convolution alone": [lambda m=m: convolve_backward(m, m, low_weight) for *_, m in pairs],
    }
    if case.compile:
        compiled, compiled_backward = torch.compile(dense), torch.compile(dense_backward)
        forward["dense map, torch.compile"] = [
            lambda e=e, i=i: compiled(e.x, i, low_weight, low_bias, q) for e, i, _ in pairs
        ]
        backward["dense map, torch.compile"] = [
            lambda e=e, i=i, m=m: compiled_backward(e.grad, m, i, low_weight, q) for e, i, m in pairs
        ]
    if device == "cpu":
        whole, whole_backward = (reference(f"masked_depthwise_conv2d{suffix}") for suffix in ("", "_backward"))
        forward["our reference"] = [lambda e=e: whole(e.x, e.visible, e.restore, weight, bias, *args) for e in inputs]
        backward["our reference"] = [
            lambda e=e: whole_backward(e.grad, e.x, e.visible, e.restore, weight, *args) for e in inputs
        ]
    forward["ours"] = [
        lambda e=e: ops.masked_depthwise_conv2d(e.x, e.visible, e.restore, weight, bias, *args) for e in inputs
    ]
    backward["ours"] = [
        lambda e=e: ops.masked_depthwise_conv2d_backward(e.grad, e.x, e.visible, e.restore, weight, *args)
        for e in inputs
    ]
    rows("forward", 2, 1, forward)
    rows("backward", 3, 2, backward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", default="benchmarks/results", metavar="FOLDER")
    options: Any = parser.parse_args()
    device = options.device
    if device == "cpu":
        torch.set_num_threads(1)
    served = status()["masked_depthwise_conv2d"][device.upper()]
    if served != "native":
        raise SystemExit(f"masked_depthwise_conv2d has no kernel for {device} here: {served}")
    table = timing.Table("op_masked_depthwise_conv2d", timing.device_name(device))
    bytes_per_us = timing.copy_bytes_per_us() if device == "cuda" else None
    for case in CASES[device]:
        measure(case, device, bytes_per_us, table)
        if device == "cuda":
            torch.cuda.empty_cache()
    table.save(options.json)


if __name__ == "__main__":
    main()
