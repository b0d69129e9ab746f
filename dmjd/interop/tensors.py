"""Weights with other shapes in other layouts: biases of q, k and v, relative position biases, positions, heads.

Only :func:`resize_positions` and :func:`resize_bias_table` compute; everything else keeps every bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dmjd.errors import CheckpointError
from dmjd.interop.names import BIAS_TABLE, SHARED_TABLE

Grid = tuple[int, int]

CLS_ROWS = 3
"""Last rows of a ViT's bias table: cls to patch, patch to cls, cls to cls."""


def join_qv_bias(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``X.q_bias`` and ``X.v_bias`` ``[D]`` -> ``X.qkv.bias`` ``[3 D]``, with zeros for k; a lone bias is kept.

    Raises:
        CheckpointError: if the shapes of a pair differ.
    """
    joined = dict(state)
    for name in state:
        stem = name.removesuffix("q_bias")
        if stem != name and f"{stem}v_bias" in state:
            q, v = joined.pop(name), joined.pop(f"{stem}v_bias")
            if q.ndim != 1 or q.shape != v.shape:
                raise CheckpointError(
                    f"{name} and {stem}v_bias are of shapes {list(q.shape)} and {list(v.shape)}, not both [width]"
                )
            joined[f"{stem}qkv.bias"] = torch.cat((q, torch.zeros_like(q), v))
    return joined


def split_qv_bias(state: Mapping[str, Tensor], stem: str) -> tuple[dict[str, Tensor], list[str]]:
    """The inverse of :func:`join_qv_bias` for blocks whose name begins with ``stem``.

    Returns:
        The state, and the names of nonzero biases of k. Dropping them does not change the model: they add the same
        number to a query's score with every key, and softmax is invariant to that.
    """
    split: dict[str, Tensor] = {}
    dropped = []
    for name, value in state.items():
        if name.startswith(stem) and name.endswith(".attn.qkv.bias"):
            q, k, v = value.chunk(3)
            attention = name.removesuffix("qkv.bias")
            split |= {f"{attention}q_bias": q.clone(), f"{attention}v_bias": v.clone()}
            if k.any():
                dropped.append(name)
        else:
            split[name] = value
    return split, dropped


def expand_bias_table(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace the table shared by all blocks by a copy in each block. A state without one is returned unchanged."""
    expanded = dict(state)
    shared = expanded.pop(SHARED_TABLE, None)
    if shared is not None:
        expanded |= {f"encoder.blocks.{index}.{BIAS_TABLE}": shared.clone() for index in range(depth_of(state))}
    return expanded


def share_bias_table(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`expand_bias_table`. Raises CheckpointError if the blocks' tables differ."""
    names = [f"encoder.blocks.{index}.{BIAS_TABLE}" for index in range(depth_of(state))]
    tables = [state[name] for name in names if name in state]
    if not tables:
        return dict(state)
    for name, table in zip(names, tables, strict=True):
        if not torch.equal(table, tables[0]):
            raise CheckpointError(
                f"{name} differs from block 0's, as after fine-tuning, so they cannot be shared; "
                "set bias_tables=per_block"
            )
    return {name: value for name, value in state.items() if name not in names} | {SHARED_TABLE: tables[0]}


def depth_of(state: Mapping[str, Tensor]) -> int:
    """Number of blocks of a ViT encoder."""
    start = "encoder.blocks."
    return 1 + max((int(name.split(".")[2]) for name in state if name.startswith(start)), default=-1)


def square(count: int) -> Grid | None:
    """(s, s) with s * s = count, or None."""
    side = math.isqrt(max(0, count))
    return (side, side) if side and side * side == count else None


def grids_of(rows: int, prefix: int, new: Grid | None) -> list[Grid]:
    """Grids with as many tokens as a position table has rows: a square, ``new``, or both.

    A table with the model's own prefix is preferred to one with a row more or less for the class token.
    """
    other = new if new and rows - math.prod(new) in (0, 1) else None
    grids = [grid for grid in (square(rows - prefix), other, square(rows - 1 + prefix)) if grid]
    return list(dict.fromkeys(grid for grid in grids if math.prod(grid) == math.prod(grids[0])))


def align_positions(name: str, table: Tensor, prefix: int, old: Grid | None) -> tuple[Tensor, Grid]:
    """The table ``[1, rows, D]`` as ``[1, prefix + h * w, D]``, and its grid.

    A missing row of the class token is added as zeros, which gives the same features; a row without a class token is
    dropped.

    Args:
        name: of the table, for the error.
        prefix: 1 for a model with a class token, else 0.
        old: the grid; None if no grid fits, which is an error.

    Raises:
        CheckpointError: if the rows are not those of ``old``.
    """
    rows = table.shape[1]
    if old is not None:
        tokens = math.prod(old)
        if rows == prefix + tokens:
            return table, old
        if prefix and rows == tokens:
            return torch.cat((table.new_zeros(1, 1, table.shape[2]), table), dim=1), old
        if not prefix and rows == 1 + tokens:
            return table[:, 1:].clone(), old
    wanted = f"a grid of {old[0]}x{old[1]}" if old else "a square grid; set another with source_grid=[h,w]"
    raise CheckpointError(f"{name} has {rows} rows, which are not {wanted}")


def resize_positions(table: Tensor, prefix: int, old: Grid, new: Grid) -> Tensor:
    """``[1, prefix + h * w, D]`` from grid ``old`` to ``new``, bicubic as in MAE's and BEiT's fine-tuning."""
    if old == new:
        return table
    maps = table[:, prefix:].transpose(1, 2).unflatten(2, old)
    resized = F.interpolate(maps.float(), size=new, mode="bicubic", align_corners=False).to(table.dtype)
    return torch.cat((table[:, :prefix], resized.flatten(2).transpose(1, 2)), dim=1)


def resize_bias_table(
    table: Tensor, old: Grid, new: Grid, cls_rows: int = CLS_ROWS, *, geometric: bool = False
) -> Tensor:
    """``[(2h - 1)(2w - 1) + 3, heads]`` from grid ``old`` to ``new``, bicubic; the rows of the class token are copied.

    Args:
        cls_rows: 3 for a ViT, 0 for the windows of a Swin.
        geometric: as in the fine-tuning of BEiT and SimMIM: neighbours stay neighbours, and the farther apart two
            tokens are, the more their distance grows. Cubic splines in place of the bicubic kernel.

    Raises:
        CheckpointError: if the rows are not those of ``old``.
    """
    spans, wanted = ((2 * old[0] - 1, 2 * old[1] - 1), (2 * new[0] - 1, 2 * new[1] - 1))
    if table.ndim != 2 or table.shape[0] != bias_rows(old, cls_rows):
        raise CheckpointError(
            f"a bias table of {table.shape[0]} rows is not of a grid of {old[0]}x{old[1]}; set its grid with "
            "source_grid=[h,w]"
        )
    if old == new:
        return table
    end = table.shape[0] - cls_rows
    maps = table[:end].T.unflatten(1, spans).unsqueeze(0)
    if geometric:
        rows, columns = (_geometric(was, becomes) for was, becomes in zip(spans, wanted, strict=True))
        resized = (rows @ maps.double() @ columns.T).to(table.dtype)
    else:
        resized = F.interpolate(maps.float(), size=wanted, mode="bicubic", align_corners=False).to(table.dtype)
    return torch.cat((resized[0].flatten(1).T, table[end:]))


def _geometric(old: int, new: int) -> Tensor:
    """``[new, old]``: the cubic spline (not-a-knot) through values at distances that grow geometrically, read at
    integer distances. Both are odd numbers of positions around 0."""
    lower, upper = 1.01, 1.5
    while upper - lower > 1e-6:
        ratio = (lower + upper) / 2
        if (1 - ratio ** (old // 2)) / (1 - ratio) > new // 2:
            upper = ratio
        else:
            lower = ratio
    distances = torch.tensor(ratio, dtype=torch.float64).pow(torch.arange(old // 2)).cumsum(0)
    known = torch.cat((-distances.flip(0), torch.zeros(1), distances))
    read = torch.arange(-(new // 2), new // 2 + 1).double().clamp(known[0], known[-1])
    known, read = known / distances[-1], read / distances[-1]

    def basis(at: Tensor) -> Tensor:
        knots = known[2:-2] if old > 3 else known[:0]
        return torch.cat((at[:, None] ** torch.arange(min(4, old)), (at[:, None] - knots).clamp(min=0) ** 3), dim=1)

    return torch.linalg.solve(basis(known), basis(read), left=False)


def bias_rows(grid: Grid, cls_rows: int = CLS_ROWS) -> int:
    """Rows of a bias table for ``grid``."""
    return (2 * grid[0] - 1) * (2 * grid[1] - 1) + cls_rows


def grid_of_bias_table(table: Tensor, cls_rows: int = CLS_ROWS) -> Grid | None:
    """The square grid of a bias table ``[rows, heads]``, or None."""
    span = square(table.shape[0] - cls_rows)
    return ((span[0] + 1) // 2, (span[0] + 1) // 2) if span and span[0] % 2 else None


def channels_last(head: Tensor, channels: int) -> Tensor:
    """Rows of a head from PixelShuffle's order (channel, row, column) to ours (row, column, channel).

    ``[channels * p * p, ...]`` both.
    """
    side = math.isqrt(head.shape[0] // channels)
    return head.unflatten(0, (channels, side, side)).movedim(0, 2).flatten(0, 2)


def channels_first(head: Tensor, channels: int) -> Tensor:
    """The inverse of :func:`channels_last`."""
    side = math.isqrt(head.shape[0] // channels)
    return head.unflatten(0, (side, side, channels)).movedim(2, 0).flatten(0, 2)
