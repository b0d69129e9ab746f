"""A file of weights of any known code base, read to our names; all commands read such files here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.interop.describe import NOTHING, Noted, noted_at
from dmjd.interop.huggingface import official_names
from dmjd.interop.layout import Layout, lacks_positions
from dmjd.interop.layouts import LAYOUTS, detect, peel
from dmjd.interop.names import summary
from dmjd.interop.state_file import grid_noted, read_state
from dmjd.interop.tensors import Grid


class WeightsFile(NamedTuple):
    """description: path, layout and kind of weights, for messages. weights: under our names. layout: as it was read.

    grid: of its tables, if the file's header has it. noted: what the file or its folder states about the model.
    has_qv_bias: whether biases of q and v were separate, as in BEiT's blocks.
    """

    path: Path
    description: str
    weights: dict[str, Tensor]
    layout: Layout
    grid: Grid | None = None
    noted: Noted = NOTHING
    has_qv_bias: bool = False


def read_weights(
    path: Path,
    weights: str = "trained",
    source: str = "auto",
    *,
    drop_unknown: bool = False,
    keep_nonfinite: bool = False,
) -> WeightsFile:
    """Read the file ``path``; ``weights`` as for :func:`~dmjd.interop.state_file.read_state`.

    Args:
        source: a layout, or "auto" to detect it from the names.
        drop_unknown, keep_nonfinite: as for :meth:`~dmjd.interop.layout.Layout.read`.

    Raises:
        CheckpointError: if it cannot be read, or is in no known layout, or lacks weights. ConfigError: if it does not
            have ``weights``.
    """
    held = read_state(path, weights)
    official = official_names(held.tensors)
    state, beside = peel(held.tensors if official is None else official)
    if others := [name for name in beside if name.endswith("patch_embed.proj.weight")]:
        raise CheckpointError(
            f"{path} holds several encoders, one of them with {summary(others)}; save the weights of one to a file"
        )
    try:
        layout, fitting = detect(state, beside) if source == "auto" else (LAYOUTS[source], [source])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    origin = "" if official is None else ", from transformers' names"
    description = f"{path} in the layout of {' / '.join(fitting)}{origin}{held.note}"
    if beside := [*beside, *layout.left_out(state)]:
        description += f", without {summary(beside)}"
    try:
        found = layout.read(state, drop_unknown=drop_unknown, keep_nonfinite=keep_nonfinite)
    except CheckpointError as error:
        raise CheckpointError(f"{description}: {error}") from error
    has_qv_bias = any(name.endswith(".q_bias") for name in state)
    return WeightsFile(path, description, found, layout, grid_noted(path), noted_at(path), has_qv_bias)


def require_positions(file: WeightsFile) -> None:
    """Raise CheckpointError if the positions of a ViT are neither in the file nor, as in ours, computed."""
    if file.layout.name != "ours" and lacks_positions(file.weights):
        raise CheckpointError(
            f"{file.description}: read as {file.layout.name}, the file has 1 missing (pos_embed); if its positions are "
            "fixed sine-cosine ones, describe its model by experiment=NAME, such as mae_vit_base"
        )
