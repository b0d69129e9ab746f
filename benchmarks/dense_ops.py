"""Parts "depthwise" and "attention" of dense_step.py: the two operations of whole images, by several ways each.

Depthwise: ConvViT's 5 x 5 depthwise convolution of whole maps. Every way begins from and ends in a map with channels
last, ``[B, H, W, C]``, unless its name says blocks, ``[B, N, q * q, C]``, the layout of pre-training's visible tokens.
Attention: windows of 14 x 14 tokens and the whole grid of 64 x 64, with and without decomposed relative positions,
which extend queries by their products with the tables and keys by one-hot rows and columns, so that no bias of
4096 x 4096 is made. bfloat16; forward, and forward with backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import detectron2_vit
import timing
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from dmjd.models.dense.grid_attention import attention_on_map
from dmjd.ops import masked_depthwise_conv2d, short_attention

Ways = Mapping[str, Callable[..., Tensor]]
KERNEL = 5
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Map(NamedTuple):
    """A map of ConvViT: images, pixels of a side of the image, stride, channels, pixels of a token's side."""

    name: str
    batch: int
    image: int
    stride: int
    channels: int
    q: int


MAPS = (
    Map("B stage 1", 16, 512, 4, 256, 4),
    Map("B stage 2", 16, 512, 8, 384, 2),
    Map("B stage 1", 4, 1024, 4, 256, 4),
    Map("B stage 2", 4, 1024, 8, 384, 2),
    Map("L stage 1", 8, 512, 4, 384, 4),
)
TINY_MAPS = (Map("tiny stage 1", 1, 64, 4, 32, 4), Map("tiny stage 2", 1, 64, 8, 48, 2))


class Grid(NamedTuple):
    """Attention of ``batch`` grids, or windows, of side x side tokens."""

    name: str
    batch: int
    heads: int
    side: int
    depth: int


GRIDS = (Grid("windows", 25 * 8, 12, 14, 64), Grid("whole grid", 2, 12, 64, 64))
TINY_GRIDS = (Grid("windows", 2, 2, 4, 16), Grid("whole grid", 1, 2, 8, 16))


def depthwise(table: timing.Table, device: str, tiny: bool) -> None:
    """Ways of the convolution."""
    bytes_per_us = timing.copy_bytes_per_us() if device == "cuda" else None
    for case in TINY_MAPS if tiny else MAPS:
        side = case.image // case.stride
        weight = torch.randn(case.channels, 1, KERNEL, KERNEL, device=device)
        bias = torch.randn(case.channels, device=device)
        maps = [
            torch.randn(case.batch, side, side, case.channels, device=device).bfloat16() for _ in range(timing.BUFFERS)
        ]
        blocks = [to_blocks(each, case.q) for each in maps]
        name = f"{case.name}: {case.batch} x {side} x {side} x {case.channels}"
        floor = 2 * maps[0].nbytes / bytes_per_us if bytes_per_us else None
        for way, (convolve, inputs) in _convolutions(case.q, maps, blocks).items():
            _time(table, name, way, convolve, inputs, [weight, bias], floor, device)


def _convolutions(q: int, maps: list[Tensor], blocks: list[Tensor]) -> dict[str, tuple[Any, list[Tensor]]]:
    """Way -> function of (input, weight, bias), and its inputs."""

    def of_planes(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        planes = x.permute(0, 3, 1, 2).contiguous()
        return _conv2d(planes, weight, bias).permute(0, 2, 3, 1).contiguous()

    def channels_last(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _conv2d(x.permute(0, 3, 1, 2), weight, bias).permute(0, 2, 3, 1)

    def weight_too(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        last = weight.contiguous(memory_format=torch.channels_last)
        return _conv2d(x.permute(0, 3, 1, 2), last, bias).permute(0, 2, 3, 1)

    def of_blocks(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _masked(x, weight, bias, q)

    def through_blocks(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return from_blocks(_masked(to_blocks(x, q), weight, bias, q), q)

    def of_pixels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _masked(x.flatten(1, 2).unsqueeze(2), weight, bias, 1).view(x.shape)

    return {
        "cuDNN, NCHW, with both copies": (of_planes, maps),
        "cuDNN, channels last": (channels_last, maps),
        "cuDNN, channels last, weight too": (weight_too, maps),
        "masked op, blocks": (of_blocks, blocks),
        "masked op, through blocks": (through_blocks, maps),
        "masked op, tokens of one pixel": (of_pixels, maps),
    }


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As autocast computes it."""
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    return F.conv2d(x, weight, bias, padding=KERNEL // 2, groups=weight.shape[0])


def _masked(x: Tensor, weight: Tensor, bias: Tensor, q: int) -> Tensor:
    """All tokens of a square grid are visible."""
    rows, tokens = x.shape[:2]
    every = torch.arange(tokens, device=x.device).expand(1, rows, -1).contiguous()
    side = math.isqrt(tokens)
    return masked_depthwise_conv2d(x, every, every, weight.squeeze(1), bias, grid=(side, side), q=q)


def to_blocks(x: Tensor, q: int) -> Tensor:
    """``[B, H, W, C] -> [B, N, q * q, C]``."""
    batch, height, width, channels = x.shape
    blocks = x.reshape(batch, height // q, q, width // q, q, channels).transpose(2, 3)
    return blocks.reshape(batch, -1, q * q, channels)


def from_blocks(x: Tensor, q: int) -> Tensor:
    """The inverse of :func:`to_blocks` for a square map."""
    batch, tokens, _, channels = x.shape
    side = math.isqrt(tokens)
    return x.reshape(batch, side, side, q, q, channels).transpose(2, 3).reshape(batch, side * q, side * q, channels)


def attention(table: timing.Table, device: str, tiny: bool, folder: Path | None) -> None:
    """Ways of attention; ``folder`` of detectron2's sources, or None."""
    for grid in TINY_GRIDS if tiny else GRIDS:
        tokens = grid.side**2
        packed = [
            torch.randn(grid.batch, tokens, 3, grid.heads, grid.depth, device=device).bfloat16()
            for _ in range(timing.BUFFERS)
        ]
        tables = [torch.randn(2 * grid.side - 1, grid.depth, device=device) * 0.02 for _ in range(2)]
        name = f"{grid.name}: {grid.batch} x {grid.heads} x {tokens} x {grid.depth}"
        for way, attend in _plain(device).items():
            _time(table, name, f"no positions, {way}", attend, packed, [], None, device)
        for way, attend in _positioned(grid, device, folder).items():
            _time(table, name, f"positions, {way}", attend, packed, tables, None, device)


def _plain(device: str) -> Ways:
    def ours(qkv: Tensor) -> Tensor:
        q, k, v = qkv.unbind(2)
        return short_attention(q, k, v)

    return {**{way: _by(backend, _sdpa) for way, backend in _backends(device).items()}, "short_attention": ours}


def _positioned(grid: Grid, device: str, folder: Path | None) -> Ways:
    ways: dict[str, Callable[..., Tensor]] = {}
    if folder is not None:
        add = detectron2_vit.modules(folder).utils.add_decomposed_rel_pos

        def materialised(qkv: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).flatten(1, 2)
            scores = (q * grid.depth**-0.5) @ k.transpose(-2, -1)
            size = grid.side, grid.side
            scores = add(scores, q, rows.to(q.dtype), columns.to(q.dtype), size, size)
            out = scores.softmax(-1) @ v
            return out.unflatten(0, (-1, grid.heads)).transpose(1, 2)

        ways["detectron2"] = materialised
        ways["detectron2, compiled"] = torch.compile(materialised) if device == "cuda" else materialised

    def biased(qkv: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """A bias [B, H, N, N], made of the products."""
        by_row, by_column = _products(qkv[:, :, 0], rows, columns, grid.side)
        bias = (by_row.unsqueeze(-1) + by_column.unsqueeze(-2)).flatten(-2)
        return _sdpa(qkv, bias)

    flexible: Any = torch.compile(flex_attention) if device == "cuda" else flex_attention

    def flex(qkv: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The products are added to the scores inside the kernel."""
        by_row, by_column = _products(qkv[:, :, 0], rows, columns, grid.side)

        def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + by_row[b, h, i, j // grid.side] + by_column[b, h, i, j % grid.side]

        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        out: Tensor = flexible(q, k, v, score_mod=add)
        return out.transpose(1, 2)

    def ours(qkv: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        size = grid.side, grid.side
        return attention_on_map(qkv.unflatten(1, size), rows, columns).flatten(1, 2)

    def extended(qkv: Tensor, rows: Tensor, columns: Tensor, narrow: bool = False) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        by_row, by_column = _products(qkv[:, :, 0], rows, columns, grid.side)
        places = torch.arange(grid.side, device=qkv.device)
        eye = torch.eye(grid.side, device=qkv.device, dtype=q.dtype)
        row, column = places.repeat_interleave(grid.side), places.repeat(grid.side)
        ones = torch.cat((eye[row], eye[column]), dim=-1).expand(*k.shape[:2], -1, -1)
        root = grid.depth**0.5
        long_q = torch.cat((q, by_row * root, by_column * root), dim=-1)
        long_k = torch.cat((k, ones), dim=-1)
        width = (-long_q.shape[-1]) % 8
        long_q, long_k = F.pad(long_q, (0, width)), F.pad(long_k, (0, width))
        padded = v if narrow else F.pad(v, (0, long_q.shape[-1] - v.shape[-1]))
        out = F.scaled_dot_product_attention(long_q, long_k, padded, scale=grid.depth**-0.5)
        return out[..., : grid.depth].transpose(1, 2)

    ways |= {f"bias, {way}": _by(backend, biased) for way, backend in _backends(device).items() if way != "flash"}
    ways |= {f"extended, {way}": _by(backend, extended) for way, backend in _backends(device).items()}
    narrow = partial(extended, narrow=True)
    ways |= {f"extended, narrow values, {way}": _by(backend, narrow) for way, backend in _backends(device).items()}
    return ways | {"flex_attention": flex, "attention_on_map": ours}


def _products(q: Tensor, rows: Tensor, columns: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """``[B, N, H, D]`` -> each ``[B, H, N, side]``: products with the table's rows, by the key's row and column."""
    places = torch.arange(side, device=q.device)
    distance = places[:, None] - places + side - 1
    grid = q.unflatten(1, (side, side))
    by_row = torch.einsum("byxhd,ykd->bhyxk", grid, rows.to(q.dtype)[distance]).flatten(2, 3)
    by_column = torch.einsum("byxhd,xkd->bhyxk", grid, columns.to(q.dtype)[distance]).flatten(2, 3)
    return by_row, by_column


def _sdpa(qkv: Tensor, bias: Tensor | None = None) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


def _backends(device: str) -> Mapping[str, SDPBackend]:
    return BACKENDS if device == "cuda" else {"math": SDPBackend.MATH}


def _by(backend: SDPBackend, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*arguments: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return attend(*arguments)

    return call


def _time(
    table: timing.Table,
    name: str,
    way: str,
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    weights: list[Tensor],
    floor: float | None,
    device: str,
) -> None:
    """Rows "forward" and "both", the latter with the gradients of input and weights; a way that the device does not
    support has none."""
    weights = [each.detach().requires_grad_() for each in weights]
    leaves = [each.detach().requires_grad_() for each in inputs]

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            return function(x, *weights)

    def both(x: Tensor) -> Any:
        out = function(x, *weights)
        return torch.autograd.grad(out, [x, *weights], grad.view(out.shape))

    try:
        grad = torch.randn_like(forward(inputs[0]))
        both(leaves[0])
        for part, call, tensors, share in (("forward", forward, inputs, 1.0), ("both", both, leaves, 2.5)):
            calls: list[timing.Call] = [lambda x=x, call=call: call(x) for x in tensors]
            if device == "cuda":
                median, notes = timing.device_us(calls, repeats=1)
            else:
                median, notes = timing.host_us(calls, seconds=0.1), ""
            table.add(name, f"{part}: {way}", median, floor and share * floor, notes)
    except (RuntimeError, NotImplementedError) as error:
        print(f"{name:44} {way:34} not supported: {str(error).splitlines()[0][:80]}", flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()
