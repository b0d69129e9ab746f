"""HOG of a batch of 224 x 224 RGB images: official formulations, torch.compile of the reference, and ours.

    python benchmarks/op_hog.py [--json benchmarks/results] [--device cuda|cpu]

The floor is reading the pixels once and writing the target once at the speed of a copy. On the CPU everything runs on
one thread, and there is no floor.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from timing import BUFFERS, Row, Table, copy_bytes_per_us, device_name, device_us, host_us
from torch import Tensor

from dmjd.ops._lib import reference, status
from dmjd.ops.hog import hog

SIZE, CELL, BINS, PATCH = 224, 8, 9, 16
SOBEL = torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])


def one_hot_cells(magnitude: Tensor, index: Tensor) -> Tensor:
    """``[B, C, bins, rows, columns]``: magnitudes scattered over a map per bin, then summed over cells."""
    batch, channels, height, width = magnitude.shape
    maps = magnitude.new_zeros(batch, channels, BINS, height, width)
    maps.scatter_(2, index.unsqueeze(2), magnitude.unsqueeze(2))
    return F.avg_pool2d(maps.flatten(1, 2), CELL).unflatten(1, (channels, BINS)) * CELL**2


def official_dmjd(images: Tensor) -> Tensor:
    """DMJD's: central differences as convolutions, zero on the border, arc tangent, mean per cell, LayerNorm."""
    x = images.permute(0, 3, 1, 2).float()
    channels = x.shape[1]
    difference = torch.tensor([-1.0, 0, 1], device=x.device)
    row = F.pad(F.conv2d(x, difference.view(1, 1, 3, 1).repeat(channels, 1, 1, 1), groups=channels), (0, 0, 1, 1))
    col = F.pad(F.conv2d(x, difference.view(1, 1, 1, 3).repeat(channels, 1, 1, 1), groups=channels), (1, 1))
    angle = torch.rad2deg(torch.atan2(row, col)) % 180
    index = (angle / (180 / BINS)).floor().long() % BINS
    cells = one_hot_cells(torch.hypot(row, col), index) / CELL**2
    cells = F.layer_norm(cells.movedim(2, -1), (BINS,))  # [B, C, rows, columns, bins]
    k, tokens = PATCH // CELL, SIZE // PATCH
    cells = cells.unflatten(3, (tokens, k)).unflatten(2, (tokens, k))  # [B, C, h, k, w, k, bins]
    return cells.permute(0, 2, 4, 3, 5, 6, 1).reshape(len(x), tokens**2, -1)


def official_maskfeat(images: Tensor) -> Tensor:
    """MaskFeat's: Sobel by convolution on the reflected image, arc tangent, sum per cell, l2."""
    x = images.permute(0, 3, 1, 2).float()
    channels = x.shape[1]
    x = F.pad(x, (1, 1, 1, 1), mode="reflect")
    kernel = SOBEL.to(x.device).expand(channels, 1, 3, 3)
    gx, gy = (F.conv2d(x, weight.contiguous(), groups=channels) for weight in (kernel, kernel.transpose(2, 3)))
    index = (torch.atan2(gx, gy) / math.pi * BINS).floor().long() % BINS
    cells = F.normalize(one_hot_cells(torch.stack([gx, gy], -1).norm(dim=-1), index), dim=2)
    k, tokens = PATCH // CELL, SIZE // PATCH
    cells = cells.unflatten(4, (tokens, k)).unflatten(3, (tokens, k))  # [B, C, bins, h, k, w, k]
    return cells.permute(0, 3, 5, 1, 2, 4, 6).reshape(len(x), tokens**2, -1)


def scatter_add(images: Tensor) -> Tensor:
    """DMJD's target with one scatter_add into the cells: few passes, but float atomics on a GPU."""
    x = images.permute(0, 3, 1, 2).float()
    row, col = torch.zeros_like(x), torch.zeros_like(x)
    row[..., 1:-1, :] = x[..., 2:, :] - x[..., :-2, :]
    col[..., 1:-1] = x[..., 2:] - x[..., :-2]
    angle = torch.rad2deg(torch.atan2(row, col)).remainder_(180)
    index = angle.div_(180 / BINS).long().clamp_(max=BINS - 1)
    n = SIZE // CELL
    place = torch.arange(SIZE, device=x.device) // CELL
    planes = torch.arange(len(x) * x.shape[1], device=x.device).view(len(x), -1, 1, 1)
    index += ((planes * n + place[:, None]) * n + place) * BINS
    cells = x.new_zeros(x.shape[0] * x.shape[1] * n * n * BINS)
    cells.scatter_add_(0, index.flatten(), torch.hypot(row, col).flatten())
    cells = F.layer_norm(cells.view(len(x), -1, n, n, BINS) / CELL**2, (BINS,))
    k, tokens = PATCH // CELL, SIZE // PATCH
    cells = cells.unflatten(3, (tokens, k)).unflatten(2, (tokens, k))
    return cells.permute(0, 2, 4, 3, 5, 6, 1).reshape(len(x), tokens**2, -1)


def plain(flavour: str, norm: str) -> Callable[[Tensor], Tensor]:
    """The reference, whatever kernel is loaded."""
    ours = reference("hog")
    return lambda images: ours(images, CELL, BINS, PATCH, flavour, norm, "nhwc", torch.float32)


def check(images: Tensor) -> None:
    """All ways agree, or their times mean nothing (atan2 rounds: a pixel may change its bin)."""
    for ours, way in (
        (hog(images), official_dmjd(images)),
        (hog(images), scatter_add(images)),
        (hog(images, flavour="maskfeat", norm="l2"), official_maskfeat(images)),
    ):
        share = ((ours - way).abs() > 1e-3).float().mean().item()
        assert share < 0.02, f"{share:.2%} of values differ"


def batches(batch: int, device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, SIZE, SIZE, 3)
    return [torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator) for _ in range(BUFFERS)]


Way = tuple[str, Callable[[Tensor], Tensor], int]  # name, function, bytes of a value of its result


def ways() -> dict[str, list[Way]]:
    return {
        "dmjd": [
            ("official: scatter over bin maps", official_dmjd, 4),
            ("ours, float32", lambda x: hog(x), 4),
            ("ours, bfloat16", lambda x: hog(x, out_dtype=torch.bfloat16), 2),
        ],
        "maskfeat": [
            ("official: scatter over bin maps", official_maskfeat, 4),
            ("ours, float32", lambda x: hog(x, flavour="maskfeat", norm="l2"), 4),
            ("ours, bfloat16", lambda x: hog(x, flavour="maskfeat", norm="l2", out_dtype=torch.bfloat16), 2),
        ],
        "maskfeat_gauss": [("ours, float32", lambda x: hog(x, flavour="maskfeat_gauss", norm="l2"), 4)],
    }


def add_cuda(table: Table, sizes: Sequence[int]) -> None:
    speed = copy_bytes_per_us()
    for batch in sizes:
        inputs = batches(batch, "cuda")
        for flavour, all_ways in ways().items():
            if flavour != "maskfeat_gauss":
                # One graph for all sizes would be a dynamic one; the static one is the faster.
                compiled = torch.compile(plain(flavour, "layernorm" if flavour == "dmjd" else "l2"), dynamic=False)
                all_ways.insert(1, ("torch.compile of the reference", compiled, 4))
            for name, way, size in all_ways:
                floor = (inputs[0].numel() + hog(inputs[0]).numel() * size) / speed
                time, how = device_us([lambda x=x, way=way: way(x) for x in inputs])
                table.add(f"{flavour}, uint8 NHWC, batch {batch}", name, time, floor, "" if how == "graph" else how)
        pixels = [x.permute(0, 3, 1, 2).float().contiguous() for x in inputs]
        floor = (pixels[0].numel() * 4 + hog(inputs[0]).numel() * 4) / speed
        time, how = device_us([lambda x=x: hog(x, flavour="maskfeat", norm="l2", layout="nchw") for x in pixels])
        table.add(f"maskfeat, float32 NCHW, batch {batch}", "ours, float32", time, floor, "" if how == "graph" else how)


def add_cpu(table: Table, batch: int) -> None:
    torch.set_num_threads(1)
    inputs = batches(batch, "cpu")
    for flavour, all_ways in ways().items():
        norm = "layernorm" if flavour == "dmjd" else "l2"
        others: list[Way] = [("reference", plain(flavour, norm), 4)]
        if flavour == "dmjd":
            others.append(("scatter_add", scatter_add, 4))
        for name, way, _ in all_ways[:1] + others + all_ways[1:2] if len(all_ways) > 1 else others + all_ways:
            time = host_us([lambda x=x, way=way: way(x) for x in inputs], seconds=2)
            table.add(f"{flavour}, uint8 NHWC, batch {batch}", name, time)


def speedups(rows: Sequence[Row]) -> None:
    """Ours in float32 against everything else of its case."""
    for row in rows:
        ours = next(r for r in rows if r.case == row.case and r.way == "ours, float32")
        if row.way not in ("ours, float32", "ours, bfloat16"):
            print(f"{row.case}: {row.median_us / ours.median_us:.1f} x faster than {row.way}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="folder for the table")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    print(status()["hog"])
    check(batches(2, arguments.device)[0])
    table = Table("op_hog", device_name(arguments.device))
    if arguments.device == "cuda":
        add_cuda(table, (64, 256))
    else:
        add_cpu(table, 8)
    speedups(table.rows)
    if arguments.json:
        table.save(arguments.json)


if __name__ == "__main__":
    main()
