"""The layout of MAE's, ConvMAE's and DMJD's own checkpoints, which differ from ours in names alone.

Their files hold ``{"model": state, ...}`` with the encoder's parameters at the top, the decoder's behind ``decoder_``,
and the fixed positions as tensors. Shapes are the same, so a tensor goes in and comes out bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

RENAMED = {
    "decoder_embed.": "decoder.embed.",
    "mask_token": "decoder.mask_token",
    "decoder_blocks.": "decoder.blocks.",
    "decoder_norm.": "decoder.norm.",
    "decoder_pred.": "head.",
    "proj_embed.": "visible_branch.projector.",
    "predictor.0.": "visible_branch.predictor.",
}
"""Prefixes there and in :class:`~dmjd.models.masked_image_model.MaskedImageModel`; any other name is the encoder's."""

POSITIONS = ("pos_embed", "decoder_pos_embed")
"""Functions of the grid, which we do not store."""


def from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Official names -> those of ``MaskedImageModel.state_dict()``. An encoder-only file gives the encoder's."""
    return {_ours(name): value for name, value in state.items() if name not in POSITIONS}


def to_official(
    state: Mapping[str, Tensor], positions: Tensor | None, decoder_positions: Tensor | None = None
) -> dict[str, Tensor]:
    """The inverse of :func:`from_official`, with the position tensors that the official code expects.

    Args:
        state: of a ``MaskedImageModel`` with a ViT or ConViT encoder.
        positions, decoder_positions: ``[N, D]``, the ``positions`` buffers of encoder and decoder. A model with a cls
            token gets MAE's row of zeros for it.

    Raises:
        ValueError: if the encoder has mask tokens, which these layouts have no name for.
    """
    if "encoder.mask_token" in state:
        raise ValueError("the layouts of MAE, ConvMAE and DMJD have no place for an encoder's mask token")
    prefix = int("encoder.cls_token" in state)
    official = {_theirs(name): value for name, value in state.items()}
    for name, table in zip(POSITIONS, (positions, decoder_positions), strict=True):
        if table is not None:
            rows = table.new_zeros(1, prefix + table.shape[0], table.shape[1])
            rows[:, prefix:] = table
            official[name] = rows
    return official


def _ours(name: str) -> str:
    for theirs, ours in RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return f"encoder.{name}"


def _theirs(name: str) -> str:
    for theirs, ours in RENAMED.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name.removeprefix("encoder.")
