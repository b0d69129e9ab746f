"""An exponential moving average of the encoder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ENCODER = "model.encoder."
"""What the names of the encoder's parameters begin with in the objective."""


class EncoderEma:
    """``average = decay * average + (1 - decay) * encoder`` after every step that moved the encoder, in float32 on its
    device.

    Each rank averages what it owns; an element-wise average does not ask how parameters are divided. The average starts
    as the encoder itself, so no bias has to be corrected.

    Args:
        shards: an engine's ``local_shards()``.
    """

    def __init__(self, shards: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        sources = {name: shard for name, shard in shards.items() if name.startswith(ENCODER)}
        self._sources = list(sources.values())  # views that follow the training
        self.averages = {name: source.clone() for name, source in sources.items()}
        """By the objective's names, as an engine saves and loads them."""

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Take in the encoder as it is now, if ``applied``, a scalar on its device, is 1; with 0 nothing changes."""
        weight = (1 - self._decay) * applied
        torch._foreach_lerp_(list(self.averages.values()), self._sources, [weight] * len(self._sources))
