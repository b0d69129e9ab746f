"""An exponential moving average of the encoder, and a teacher that computes with it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor

from dmjd.models.masked_image_model import Encoder
from dmjd.models.recompute import recompute

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


class EmaTeacher:
    """An encoder whose parameters *are* the average's: what the average learns, the teacher knows at once.

    ``teacher(images [B, C, H, W]) -> `` the outputs of the last ``layers`` blocks for whole images, ``[B, N, D]`` each.
    """

    def __init__(self, encoder: Encoder, ema: EncoderEma, layers: int) -> None:
        self._encoder = deepcopy(encoder).requires_grad_(False).eval()
        self._outputs: list[Tensor] = []
        average = {name.removeprefix(ENCODER): value for name, value in ema.averages.items()}
        for name, parameter in self._encoder.named_parameters():
            parameter.data = average[name]
        for block in self._encoder.blocks:
            recompute(block, enable=False)  # there is no backward pass
        for block in list(self._encoder.blocks)[-layers:]:
            block.register_forward_hook(lambda module, inputs, output: self._outputs.append(output))

    def __call__(self, images: Tensor) -> list[Tensor]:
        prefix = self._encoder.num_prefix_tokens
        cuda = images.device.type == "cuda"
        with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=cuda):
            self._encoder(images)
        found, self._outputs = self._outputs, []
        return [output[:, prefix:] for output in found]
