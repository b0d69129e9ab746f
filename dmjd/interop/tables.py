"""Positions and relative position biases on the way from one model to another: which are stored, and on which grid."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.interop.names import BIAS_TABLE, DECODER_POSITIONS, POSITIONS, SHARED_TABLE
from dmjd.interop.tensors import (
    Grid,
    align_positions,
    expand_bias_table,
    grid_of_bias_table,
    resize_bias_table,
    resize_positions,
    share_bias_table,
)
from dmjd.models.positions import sincos_positions

FIXED_TOLERANCE = 1e-5
"""Largest difference of a stored table from the fixed sine-cosine one, which code bases compute in float32 or 64."""


def with_positions(
    weights: Mapping[str, Tensor], stored: Collection[str], old: Grid | None, new: Grid | None, target: str
) -> dict[str, Tensor]:
    """``weights`` with positions as ``target`` keeps them: fixed ones left out where it computes them.

    Args:
        stored: which of :data:`POSITIONS` and :data:`DECODER_POSITIONS` the target stores. Learned ones stay whichever
            they are, for whoever has no place for them to refuse.
        old: the grid of the tables, (h, w) tokens; None for a square one, or else for ``new`` if it has as many.
        new: the grid that they are interpolated to; None for their own.

    Raises:
        CheckpointError: if a table is of no such grid, or one has to be made and no grid is known.
    """
    weights = dict(weights)
    prefix = int("encoder.cls_token" in weights)
    relative = any(name.endswith(BIAS_TABLE) or name == SHARED_TABLE for name in weights)
    last_norm = "encoder.fc_norm.weight" if "encoder.fc_norm.weight" in weights else "encoder.norm.weight"
    for name, width_of in ((POSITIONS, last_norm), (DECODER_POSITIONS, "decoder.norm.weight")):
        table = weights.pop(name, None)
        if table is None:
            if name not in stored or relative or width_of not in weights:
                continue
            at = new or old
            if at is None:
                raise CheckpointError(
                    f"positions are computed in ours and stored in {target}: say for which grid of tokens, as "
                    "grid=[14,14] for 224 pixels in patches of 16"
                )
            width = weights[width_of]
            weights[name] = _fixed(at, width.shape[0], prefix).to(width.dtype)
            continue
        table, grid = align_positions(name, table, prefix, old, new)
        if name in stored or not _is_fixed(table, grid, prefix):
            weights[name] = resize_positions(table, prefix, grid, new or grid)
    return weights


def _fixed(grid: Grid, width: int, prefix: int) -> Tensor:
    """``[1, prefix + h * w, width]``, zeros for the prefix, as MAE stores it."""
    return torch.cat((torch.zeros(prefix, width), sincos_positions(grid, width))).unsqueeze(0)


def _is_fixed(table: Tensor, grid: Grid, prefix: int) -> bool:
    if table.shape[2] % 4:
        return False
    # A file in a half type has rounded its table.
    fixed = _fixed(grid, table.shape[2], prefix).to(table.dtype)
    return bool((table - fixed).abs().max() <= FIXED_TOLERANCE)


def with_bias_tables(weights: Mapping[str, Tensor], kind: str, old: Grid | None, new: Grid | None) -> dict[str, Tensor]:
    """``weights`` with a ViT's relative position biases as the target keeps them.

    Args:
        kind: "shared" by all blocks, "per_block", or "keep" as they are.
        old, new: as for :func:`with_positions`.

    Raises:
        CheckpointError: if blocks that differ are to share a table, or a table is of no such grid.
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
            weights[name] = resize_bias_table(table, old or grid_of_bias_table(table) or new, new)
    return weights
