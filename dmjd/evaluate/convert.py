"""``dmjd convert``: convert a checkpoint between the layouts of code bases."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dmjd.builders import token_grid
from dmjd.builders.weights import model_in
from dmjd.builders.weights import read_file as read_weights_file
from dmjd.compose import from_yaml_of_run
from dmjd.config import ConvertConfig
from dmjd.errors import CheckpointError, ConfigError
from dmjd.evaluate.output import check_output
from dmjd.files import read_file
from dmjd.interop.layout import Layout
from dmjd.interop.layouts import LAYOUTS
from dmjd.interop.names import DECODER_POSITIONS, POSITIONS, summary
from dmjd.interop.state_file import GRID, SUFFIXES, write_state
from dmjd.interop.tables import with_bias_tables, with_positions
from dmjd.interop.tensors import Grid
from dmjd.interop.weights_file import require_positions
from dmjd.runs.checkpoint import weights_at
from dmjd.runs.paths import CONFIG

logger = logging.getLogger("dmjd")


@dataclass(frozen=True)
class Converted:
    """source, target: names of layouts. left_out: our names of weights that the target layout does not have."""

    path: Path
    source: str
    target: str
    tensors: int
    left_out: list[str]


def convert(config: ConvertConfig) -> Converted:
    """Write ``config.input`` in the layout ``config.to`` to ``config.output``, atomically.

    Raises:
        ConfigError: if the output has another suffix or cannot be written.
        CheckpointError: if the input cannot be read, has unknown or missing names, or does not fit the target.
    """
    output = Path(config.output)
    check_output(output, SUFFIXES, Path(config.input))
    with _naming(config.input):
        weights, source, grid = _read(config)
        target, new = LAYOUTS[config.to], _pair(config.grid)
        if new is not None and any(name.startswith("encoder.layers.") for name in weights):
            raise ConfigError("grid=[h,w] is for ViTs; timm resizes the windows of a Swin when it loads the file")
        weights = with_positions(weights, _stored(config.to, weights), grid, new, config.to)
        kind = config.bias_tables
        if kind == "auto":
            kind = "per_block" if config.to == "timm" else "keep"
        weights = with_bias_tables(weights, kind, grid, new)
        written, left_out = target.write(weights)
    if left_out:
        logger.info("left out, not in the layout of %s: %s", target.name, _branches(left_out))
    header = {"format": "pt", "layout": target.name, "from": source.name}
    if at := new or grid:
        header[GRID] = f"{at[0]}x{at[1]}"
    write_state(output, written, target.container, header)
    if target.name == "timm" and "norm.weight" in written:
        logger.info(
            "timm normalises after pooling by default, these weights before: create the model with "
            "global_pool='token', or with 'avg' and fc_norm=False (of BEiT use_fc_norm=False)"
        )
    return Converted(output, source.name, target.name, len(written), left_out)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Put ``path`` in front of an error about names and shapes."""
    try:
        yield
    except CheckpointError as error:
        if path in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def _branches(names: list[str]) -> str:
    """Left-out weights for the log: parts of pre-training with a count, weights of the encoder by name."""
    counts = Counter(name.partition(".")[0] for name in names if not name.startswith("encoder."))
    encoder = [name for name in names if name.startswith("encoder.")]
    branches = [f"{branch} ({count} tensors)" for branch, count in counts.items()]
    return ", ".join(branches + ([summary(encoder)] if encoder else []))


def _read(config: ConvertConfig) -> tuple[dict[str, Tensor], Layout, Grid | None]:
    """The weights under our names, the layout of the input, and the grid of its positions if it is known."""
    grid, keep = _pair(config.source_grid), config.nonfinite == "keep"
    found, drop = weights_at(config.input, "input"), config.unknown == "drop"
    if found.is_dir():
        source, ours = found / CONFIG, LAYOUTS["ours"]
        trained = from_yaml_of_run(read_file(source), source)
        weights = ours.read(model_in(found, config.weights), drop_unknown=drop, keep_nonfinite=keep)
        return weights, ours, token_grid(trained)
    file = read_weights_file(found, config.weights, config.source, drop_unknown=drop, keep_nonfinite=keep)
    require_positions(file)
    logger.info("%s", file.description)
    return file.weights, file.layout, grid or file.grid


def _stored(target: str, weights: dict[str, Tensor]) -> tuple[str, ...]:
    """Positions that files of ``target`` hold; ours, and timm's model of a ConvViT, compute them."""
    convit = "encoder.patch_embed1.proj.weight" in weights
    return () if target == "ours" or (target == "timm" and convit) else (POSITIONS, DECODER_POSITIONS)


def _pair(grid: list[int] | None) -> Grid | None:
    return None if grid is None else (grid[0], grid[1])
