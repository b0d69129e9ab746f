"""gather_tokens and scatter_tokens, forward and backward: MAE's formulation, the compiled reference, and ours.

    python benchmarks/op_tokens.py [--device cuda|cpu] [--json FOLDER]

Two disjoint views of each image. The floor is what must move (rows seen by a view read once, every row of the result
written once, ids read) at the copy speed of the device. MAE's formulation repeats the images, expands int64 ids over
the channels and gathers; its backward is what autograd makes of that, written out so that a CUDA graph holds it.
On the CPU one thread works on a smaller batch, which the caches partly hold: no floor is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import timing
import torch
from torch import Tensor

from dmjd.ops import Views, disjoint_masks, reference, status

VIEWS, GRID = 2, (14, 14)
TOKENS = GRID[0] * GRID[1]


class Case(NamedTuple):
    op: str
    channels: int
    pattern: Literal["uniform", "block", "beit"]
    mask_ratio: float
    dtype: torch.dtype
    compile: bool  # also time torch.compile of the reference: seconds each


CASES = (
    Case("gather", 768, "block", 0.6, torch.bfloat16, compile=True),
    Case("gather", 768, "block", 0.6, torch.float32, compile=False),
    Case("gather", 1024, "block", 0.6, torch.bfloat16, compile=False),
    Case("gather", 768, "uniform", 0.75, torch.bfloat16, compile=False),
    Case("gather", 1024, "uniform", 0.75, torch.float32, compile=False),
    Case("scatter", 512, "block", 0.6, torch.bfloat16, compile=False),
    Case("scatter", 512, "block", 0.6, torch.float32, compile=True),
    Case("scatter", 512, "uniform", 0.75, torch.bfloat16, compile=False),
    Case("scatter", 512, "uniform", 0.75, torch.float32, compile=False),
)


class Inputs(NamedTuple):
    views: Views
    x: Tensor  # [B, N, C]
    gathered: Tensor  # [K*B, V, C]
    full: Tensor  # [K*B, N, C]
    mask_token: Tensor
    positions: Tensor


def official_index(ids: Tensor, channels: int) -> Tensor:
    return ids.flatten(0, 1).unsqueeze(-1).repeat(1, 1, channels)


def official_gather(x: Tensor, ids: Tensor) -> Tensor:
    return torch.cat([x] * VIEWS).gather(1, official_index(ids, x.shape[-1]))


def official_gather_backward(grad: Tensor, index: Tensor) -> Tensor:
    """``index`` is the forward's, which autograd keeps."""
    copies = grad.new_zeros(grad.shape[0], TOKENS, grad.shape[-1]).scatter_add_(1, index, grad)
    return sum(copies.chunk(VIEWS)[1:], copies.chunk(VIEWS)[0])


def official_scatter(x: Tensor, mask_token: Tensor, restore: Tensor, positions: Tensor) -> Tensor:
    tokens = torch.cat((x, mask_token.repeat(x.shape[0], TOKENS - x.shape[1], 1)), dim=1)
    return tokens.gather(1, official_index(restore, x.shape[-1])) + positions


def official_scatter_backward(grad: Tensor, index: Tensor, visible: int) -> tuple[Tensor, Tensor]:
    tokens = grad.new_zeros(grad.shape).scatter_add_(1, index, grad)
    return tokens[:, :visible], tokens[:, visible:].sum(dim=(0, 1))


def make_inputs(case: Case, batch: int, device: str) -> list[Inputs]:
    inputs = []
    for epoch in range(timing.BUFFERS):
        views = disjoint_masks(
            torch.arange(batch, device=device),
            grid=GRID,
            views=VIEWS,
            mask_ratio=case.mask_ratio,
            pattern=case.pattern,
            seed=0,
            epoch=epoch,
        )
        rows, visible = VIEWS * batch, views.visible.shape[2]
        shapes = ((batch, TOKENS), (rows, visible), (rows, TOKENS), (), (TOKENS,))
        tensors = (torch.randn(*shape, case.channels, dtype=case.dtype, device=device) for shape in shapes)
        inputs.append(Inputs(views, *tensors))
    return inputs


def floor_bytes(case: Case, given: Inputs) -> tuple[int, int]:
    """Bytes that forward and backward must move."""
    _, batch, visible = given.views.visible.shape
    row = case.channels * case.dtype.itemsize
    seen, gathered, full = int((~given.views.mask).any(0).sum()), VIEWS * batch * visible, VIEWS * batch * TOKENS
    if case.op == "gather":
        return row * (seen + gathered) + 8 * gathered, row * (gathered + batch * TOKENS) + 8 * gathered
    both = row * (gathered + full) + 8 * full
    return both, both


Arguments = list[tuple[Any, ...]]
Way = tuple[str, Callable[..., Any], Arguments]


def ways(case: Case, inputs: list[Inputs]) -> tuple[list[Way], list[Way]]:
    """(name, function, arguments per input) of every way to do forward and backward."""
    visible = inputs[0].views.visible.shape[2]
    ids = [each.views.visible if case.op == "gather" else each.views.restore for each in inputs]
    indices = [official_index(each, case.channels) for each in ids]
    name = f"{case.op}_tokens"
    ours, ours_backward = (getattr(torch.ops.dmjd, name + suffix) for suffix in ("", "_backward"))
    if case.op == "gather":
        official: Way = ("official", official_gather, [(each.x, i) for each, i in zip(inputs, ids, strict=True)])
        official_backward: Way = (
            "official",
            official_gather_backward,
            [(each.gathered, index) for each, index in zip(inputs, indices, strict=True)],
        )
        forward_args: Arguments = [(each.x, i, 0) for each, i in zip(inputs, ids, strict=True)]
        backward_args: Arguments = [(each.gathered, i, TOKENS, 0) for each, i in zip(inputs, ids, strict=True)]
    else:
        official = (
            "official",
            official_scatter,
            [(each.gathered, each.mask_token, i, each.positions) for each, i in zip(inputs, ids, strict=True)],
        )
        official_backward = (
            "official",
            official_scatter_backward,
            [(each.full, index, visible) for each, index in zip(inputs, indices, strict=True)],
        )
        forward_args = [
            (each.gathered, each.mask_token, i, each.positions, 0) for each, i in zip(inputs, ids, strict=True)
        ]
        backward_args = [(each.full, i, visible, 0, False) for each, i in zip(inputs, ids, strict=True)]
    forward: list[Way] = [official]
    backward: list[Way] = [official_backward]
    if case.compile:
        for rows, suffix, args in ((forward, "", forward_args), (backward, "_backward", backward_args)):
            compiled = torch.compile(reference(name + suffix), dynamic=False)
            rows.append(("compiled reference", compiled, args))
    forward.append(("dmjd", ours, forward_args))
    backward.append(("dmjd", ours_backward, backward_args))
    return forward, backward


def measure(way: Way, device: str) -> tuple[float, str]:
    _, function, arguments = way
    calls = [lambda args=args: function(*args) for args in arguments]
    return timing.device_us(calls) if device == "cuda" else (timing.host_us(calls, seconds=0.5), "host")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FOLDER")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = 256 if args.device == "cuda" else 16
    kernels = {served[args.device.upper()] for name, served in status().items() if "tokens" in name}
    table = timing.Table("op_tokens", timing.device_name(args.device))
    speed = timing.copy_bytes_per_us() if args.device == "cuda" else None
    print(f"{table.device}, torch {torch.__version__}, kernels: {', '.join(kernels)}")
    if speed is not None:
        print(f"copy {speed / 1e3:.0f} GB/s, read and written")
    for case in CASES:
        if args.device == "cpu":
            case = case._replace(compile=False)  # its C++ takes minutes to build
        inputs = make_inputs(case, batch, args.device)
        visible = inputs[0].views.visible.shape[2]
        for direction, bytes_moved, rows in zip(
            ("forward", "backward"), floor_bytes(case, inputs[0]), ways(case, inputs), strict=True
        ):
            label = f"{case.op} {direction} B={batch} C={case.channels} V={visible} {str(case.dtype)[6:]}"
            for way in rows:
                time_us, how = measure(way, args.device)
                floor_us = None if speed is None else bytes_moved / speed
                share = "" if floor_us is None else f"{100 * floor_us / time_us:3.0f} % of copy speed, "
                table.add(label, way[0], time_us, floor_us, share + how)
    if args.json:
        table.save(args.json)


if __name__ == "__main__":
    main()
