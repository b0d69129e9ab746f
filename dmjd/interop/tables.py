"""Conversion of position tables and relative position biases between models: stored or not, and on which grid."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.interop.names import BIAS_TABLE, DECODER_POSITIONS, POSITIONS, REGISTERS, SHARED_TABLE
from dmjd.interop.tensors import (
    Grid,
    align_positions,
    bias_rows,
    expand_bias_table,
    grid_of_bias_table,
    grids_of,
    resize_bias_table,
    resize_positions,
    share_bias_table,
    square,
)
from dmjd.positions import sincos_positions

FIXED_TOLERANCE = 1e-5
"""Largest difference of a stored table from the fixed sine-cosine one, computed in float32 or float64."""


def with_positions(
    weights: Mapping[str, Tensor], stored: Collection[str], old: Grid | None, new: Grid | None, target: str
) -> dict[str, Tensor]:
    """``weights`` with positions as ``target`` stores them, without fixed ones that it computes.

    Args:
        stored: which of :data:`POSITIONS` and :data:`DECODER_POSITIONS` the target stores. Learned ones are kept in any
            case; a layout without them rejects them.
        old: the grid of the tables, (h, w) tokens; None to infer it: a square or ``new``, by the number of rows, or by
            the values of a fixed table if both have as many.
        new: the grid to interpolate to; None to keep the grid.

    Raises:
        CheckpointError: if a table fits no grid or two, or if a table has to be computed and no grid is known.
    """
    weights = dict(weights)
    prefix = int("encoder.cls_token" in weights)
    if REGISTERS in weights:
        return _beside_registers(weights, prefix, old, new)
    relative = any(name.endswith(BIAS_TABLE) or name == SHARED_TABLE for name in weights)
    norms = (f"encoder.{norm}.weight" for norm in ("fc_norm", "norm", "blocks.0.norm1", "blocks3.0.norm1"))
    norm = next(filter(weights.__contains__, norms), "")  # the encoder of a segmentation model has no last one
    for name, width_of in ((POSITIONS, norm), (DECODER_POSITIONS, "decoder.norm.weight")):
        table = weights.pop(name, None)
        if table is None:
            if name not in stored or relative or width_of not in weights:
                continue
            at = new or old
            if at is None:
                raise CheckpointError(
                    f"positions are computed in ours and stored in {target}: set the grid of tokens, such as "
                    "grid=[14,14] for 224 pixels in patches of 16"
                )
            width = weights[width_of]
            weights[name] = _fixed(at, width.shape[0], prefix).to(width.dtype)
            continue
        if table.ndim != 3 or table.shape[0] != 1:
            raise CheckpointError(f"{name} is of shape {list(table.shape)}, not [1, rows, width]")
        table, grid = align_positions(name, table, prefix, old or _grid_of(name, table, prefix, new))
        if name in stored or not is_fixed(table, grid, prefix):
            weights[name] = resize_positions(table, prefix, grid, new or grid)
    return weights


def _beside_registers(weights: dict[str, Tensor], prefix: int, old: Grid | None, new: Grid | None) -> dict[str, Tensor]:
    """``weights`` with positions on the grid ``new``. timm's ViTs with registers have rows for the class token, for it
    and the registers, or for patches alone; these rows stay."""
    table = weights.get(POSITIONS)
    if table is None or new is None:
        return weights
    for leading in (prefix, 0, prefix + weights[REGISTERS].shape[1]):
        rows = table.shape[1] - leading
        grid = old or square(rows)
        if grid and rows == grid[0] * grid[1]:
            return weights | {POSITIONS: resize_positions(table, leading, grid, new)}
    raise CheckpointError(f"{POSITIONS} has {table.shape[1]} rows, which are not a square grid; set source_grid=[h,w]")


def _grid_of(name: str, table: Tensor, prefix: int, new: Grid | None) -> Grid | None:
    """The grid by the number of rows; by the values of a fixed table if a square and ``new`` both fit."""
    grids = grids_of(table.shape[1], prefix, new)
    if len(grids) < 2:
        return grids[0] if grids else None
    for grid in grids:
        if is_fixed(*align_positions(name, table, prefix, grid), prefix):
            return grid
    raise CheckpointError(_undecided(f"{name} has {table.shape[1]} rows", grids))


def _undecided(table: str, grids: Sequence[Grid]) -> str:
    return (
        f"{table}, as a grid of {' has and one of '.join(f'{h}x{w}' for h, w in grids)}; set the input's grid with "
        "source_grid=[h,w]"
    )


def _fixed(grid: Grid, width: int, prefix: int) -> Tensor:
    """``[1, prefix + h * w, width]``, zeros for the prefix, as MAE stores it."""
    return torch.cat((torch.zeros(prefix, width), sincos_positions(grid, width))).unsqueeze(0)


def is_fixed(table: Tensor, grid: Grid, prefix: int) -> bool:
    """Whether ``table``, ``[1, prefix + h * w, width]``, is the sine-cosine one of ``grid``, zero for the prefix."""
    if table.shape[2] % 4:
        return False
    # A file in half precision has a rounded table.
    fixed = _fixed(grid, table.shape[2], prefix).to(table.dtype)
    return bool((table - fixed).abs().max() <= FIXED_TOLERANCE)


def with_bias_tables(
    weights: Mapping[str, Tensor], kind: str, old: Grid | None, new: Grid | None, *, geometric: bool = False
) -> dict[str, Tensor]:
    """``weights`` with a ViT's relative position biases as the target stores them.

    Args:
        kind: "shared" by all blocks, "per_block", or "keep".
        old, new: as for :func:`with_positions`.
        geometric: as for :func:`~dmjd.interop.tensors.resize_bias_table`.

    Raises:
        CheckpointError: if tables of blocks differ and kind is "shared", or if a table fits no grid or two.
    """
    weights = dict(weights)
    if kind == "per_block":
        weights = expand_bias_table(weights)
    elif kind == "shared":
        weights = share_bias_table(weights)
    if new is None:
        return weights
    for name, table in weights.items():
        if name == SHARED_TABLE or (name.startswith("encoder.blocks.") and name.endswith(BIAS_TABLE)):
            grid = grid_of_bias_table(table) or new
            if old is None and grid != new and table.shape[0] == bias_rows(new):
                raise CheckpointError(_undecided(f"{name} has {table.shape[0]} rows", [grid, new]))
            weights[name] = resize_bias_table(table, old or grid, new, geometric=geometric)
    return weights


def with_window_tables(weights: Mapping[str, Tensor], own: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """``weights`` with a Swin's relative position biases of the size that the target has.

    Args:
        own: shapes of the target's weights.
    """
    weights = dict(weights)
    for name, table in weights.items():
        rows = own.get(name, table.shape)[0]
        if name.startswith("encoder.layers.") and name.endswith(BIAS_TABLE) and table.shape[0] != rows:
            old, new = grid_of_bias_table(table, 0), grid_of_bias_table(table.new_empty(rows, 1), 0)
            if old is None or new is None:
                raise CheckpointError(
                    f"{name} has {table.shape[0]} rows and this model's {rows}, and only tables of square windows can "
                    "be interpolated"
                )
            weights[name] = resize_bias_table(table, old, new, 0, geometric=True)
    return weights
