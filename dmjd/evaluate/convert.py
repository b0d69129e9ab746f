"""``dmjd convert``: a checkpoint of one code base as a file for another."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dmjd.compose import from_yaml
from dmjd.config import ConvertConfig, PretrainConfig
from dmjd.errors import CheckpointError, ConfigError
from dmjd.interop.layouts import LAYOUTS, Layout, detect
from dmjd.interop.names import BIAS_TABLE, DECODER_POSITIONS, POSITIONS, SHARED_TABLE, summary
from dmjd.interop.state_file import SUFFIXES, read_state, write_state
from dmjd.interop.tensors import (
    Grid,
    align_positions,
    expand_bias_table,
    grid_of_bias_table,
    resize_bias_table,
    resize_positions,
    share_bias_table,
    square,
)
from dmjd.models.positions import sincos_positions
from dmjd.parallel.store import read_model
from dmjd.train import checkpoint
from dmjd.train.build import token_grid

logger = logging.getLogger("dmjd")

FIXED_TOLERANCE = 1e-5
"""Largest difference of a stored table from the fixed sine-cosine one, which code bases compute in float32 or 64."""


@dataclass(frozen=True)
class Converted:
    """source, target: names of layouts. left_out: our names of what the target has no place for."""

    path: Path
    source: str
    target: str
    tensors: int
    left_out: list[str]


def convert(config: ConvertConfig) -> Converted:
    """Write ``config.input`` in the layout ``config.to`` to ``config.output``, whole or not at all.

    Raises:
        ConfigError: if the output cannot be what it is called.
        CheckpointError: if the input cannot be read, has unknown or missing names, or does not fit the target.
    """
    output = Path(config.output)
    _check_output(output, Path(config.input))
    state, source, grid = _read(config)
    weights = source.read(state, drop_unknown=config.unknown == "drop")
    weights = _with_positions(weights, grid, config)
    weights = _with_bias_tables(weights, grid, config)
    target = LAYOUTS[config.to]
    written, left_out = target.write(weights)
    if left_out:
        logger.info("left out, for %s has no place for it: %s", target.name, _branches(left_out))
    write_state(output, written, target.container, {"format": "pt", "layout": target.name, "from": source.name})
    return Converted(output, source.name, target.name, len(written), left_out)


def _branches(names: list[str]) -> str:
    """What is left out for people: branches of pre-training with a count, weights of the encoder by name."""
    counts = Counter(name.partition(".")[0] for name in names if not name.startswith("encoder."))
    encoder = [name for name in names if name.startswith("encoder.")]
    words = [f"{branch} ({count} tensors)" for branch, count in counts.items()]
    return ", ".join(words + ([summary(encoder)] if encoder else []))


def _check_output(output: Path, source: Path) -> None:
    if output.suffix not in SUFFIXES:
        raise ConfigError(f"output={output} must end in one of {', '.join(SUFFIXES)}, which tells the format")
    if not output.parent.is_dir():
        raise ConfigError(f"output={output}: {output.parent} is not a folder; make it, or name another")
    if output.is_dir():
        raise ConfigError(f"output={output} is a folder; name a file")
    if output.exists() and source.exists() and output.samefile(source):
        raise ConfigError(f"output={output} is the input; name another file")


def _read(config: ConvertConfig) -> tuple[dict[str, Tensor], Layout, Grid | None]:
    """The state, its layout, and the grid of its positions as far as it is known."""
    path = Path(config.input)
    grid = _pair(config.source_grid)
    if path.is_dir():
        folder = checkpoint.resolve(path, "input")
        source = folder / checkpoint.CONFIG
        trained = from_yaml(PretrainConfig, source.read_text(), source)
        state = {name.removeprefix("model."): value for name, value in read_model(folder).items()}
        return state, LAYOUTS["ours"], token_grid(trained)
    state = read_state(path)
    if config.source != "auto":
        return state, LAYOUTS[config.source], grid
    layout, fitting = detect(state)
    same = f"; {', '.join(fitting[1:])} would be read alike" if len(fitting) > 1 else ""
    logger.info("%s: %s, by all of its %d names%s", path, layout.name, len(state), same)
    return state, layout, grid


def _pair(grid: list[int] | None) -> Grid | None:
    return None if grid is None else (grid[0], grid[1])


def _with_positions(weights: dict[str, Tensor], grid: Grid | None, config: ConvertConfig) -> dict[str, Tensor]:
    """Positions as the target keeps them: not at all where they are fixed and computed, else on its grid."""
    weights = dict(weights)
    prefix = int("encoder.cls_token" in weights)
    convit = "encoder.patch_embed1.proj.weight" in weights
    computed = config.to == "ours" or (config.to == "timm" and convit)
    new = _pair(config.grid)
    relative = any(name.endswith(BIAS_TABLE) or name == SHARED_TABLE for name in weights)
    for name, width_of in ((POSITIONS, "encoder.norm.weight"), (DECODER_POSITIONS, "decoder.norm.weight")):
        table = weights.pop(name, None)
        if table is None and (relative or computed or width_of not in weights):
            continue
        if table is None:
            at = new or grid
            if at is None:
                raise CheckpointError(
                    f"positions are computed in ours and stored in {config.to}: say for which grid of tokens, as "
                    "grid=[14,14] for 224 pixels in patches of 16"
                )
            width = weights[width_of]
            weights[name] = _fixed(at, width.shape[0], prefix).to(width.dtype)
            continue
        table = align_positions(table, prefix, grid)
        old = grid or square(table.shape[1] - prefix)
        assert old is not None, "align_positions has checked it"
        if computed and _is_fixed(table, old, prefix):
            continue
        weights[name] = resize_positions(table, prefix, old, new or old)
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


def _with_bias_tables(weights: dict[str, Tensor], grid: Grid | None, config: ConvertConfig) -> dict[str, Tensor]:
    """Relative position biases as ``bias_tables`` says, on the grid asked for."""
    kind = config.bias_tables
    if kind == "auto":
        kind = "per_block" if config.to == "timm" else "keep"
    if kind == "per_block":
        weights = expand_bias_table(weights)
    elif kind == "shared":
        weights = share_bias_table(weights)
    new = _pair(config.grid)
    if new is None:
        return weights
    if any(name.startswith("encoder.layers.") for name in weights):
        raise ConfigError("grid=[h,w] is for ViTs; the windows of a Swin are resized by timm when it loads the file")
    tables = {
        name: table
        for name, table in weights.items()
        if name == SHARED_TABLE or (name.startswith("encoder.blocks.") and name.endswith(BIAS_TABLE))
    }
    resized = dict(weights)
    for name, table in tables.items():
        old = grid or grid_of_bias_table(table)
        if old is None:
            raise CheckpointError(
                f"{name} has {table.shape[0]} rows, of no square grid; name it with source_grid=[h,w]"
            )
        resized[name] = resize_bias_table(table, old, new)
    return resized
