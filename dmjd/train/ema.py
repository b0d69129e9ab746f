"""An exponential moving average of the encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class EncoderEma:
    """``average = decay * average + (1 - decay) * encoder`` after every step, in float32 on the encoder's device.

    The average starts as the encoder itself, so no bias has to be corrected.
    """

    def __init__(self, encoder: nn.Module, decay: float) -> None:
        self._decay = decay
        self._names = [name for name, _ in encoder.named_parameters()]
        self._sources = [parameter.detach() for parameter in encoder.parameters()]  # views that follow the training
        self._averages = [source.clone() for source in self._sources]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the encoder as it is now."""
        torch._foreach_lerp_(self._averages, self._sources, 1 - self._decay)

    def encoder_state(self) -> dict[str, Tensor]:
        """The averaged parameters under the encoder's names."""
        return dict(zip(self._names, self._averages, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {name: value.cpu() for name, value in self.encoder_state().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, average in self.encoder_state().items():
            average.copy_(state[name])
