"""A model of ours as a file of the official code, and back, through the layout that all three of MAE's line share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dmjd.interop.layouts import LAYOUTS
from dmjd.interop.names import DECODER_POSITIONS, POSITIONS
from dmjd.interop.tables import with_positions
from dmjd.models.masked_image_model import MaskedImageModel

TABLES = (POSITIONS, DECODER_POSITIONS)
OFFICIAL = LAYOUTS["dmjd"]


def to_official(model: MaskedImageModel) -> dict[str, Tensor]:
    """With the fixed positions, which these files store."""
    return OFFICIAL.write(with_positions(model.state_dict(), TABLES, model.encoder.grid, None, "dmjd")).state


def from_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of ``MaskedImageModel.state_dict()``, which has no fixed positions."""
    return {name: value for name, value in OFFICIAL.read(state, keep_nonfinite=True).items() if name not in TABLES}
