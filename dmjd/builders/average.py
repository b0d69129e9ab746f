"""Exponential moving average (EMA) of weights, and a teacher whose weights are that average."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor

from dmjd.models.masked_image_model import Encoder
from dmjd.models.recompute import recompute

ENCODER = "model.encoder."
"""Prefix of the encoder's parameters in the objective."""


class Ema:
    """``average = decay * average + (1 - decay) * weights`` after every applied step, in float32 on the device.

    Each rank averages the shards that it owns. The average starts as the weights, so it needs no bias correction.

    Args:
        shards: an engine's ``local_shards()``.
        prefix: of the names of the parameters that are averaged.
    """

    def __init__(self, shards: Mapping[str, Tensor], decay: float, prefix: str = "") -> None:
        self._decay = decay
        sources = {name: shard for name, shard in shards.items() if name.startswith(prefix)}
        self._sources = list(sources.values())  # views of the parameters
        self.averages = {name: source.clone() for name, source in sources.items()}
        """Keyed by parameter name in the objective, as an engine saves and loads them."""

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Average the current weights in if ``applied``, a scalar on the device, is 1; 0 changes nothing."""
        weight = (1 - self._decay) * applied
        torch._foreach_lerp_(list(self.averages.values()), self._sources, [weight] * len(self._sources))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of the average and of the parameters, bit by bit; a second call undoes it."""
        for average, source in zip(self.averages.values(), self._sources, strict=True):
            held = source.clone()
            source.copy_(average)
            average.copy_(held)


class EmaTeacher:
    """A frozen encoder that shares its parameters' memory with the average, so it is never copied.

    ``teacher(images [B, C, H, W])`` returns the outputs of the last ``layers`` blocks for whole images, ``[B, N, D]``
    each, computed under autocast to bfloat16 on CUDA.
    """

    def __init__(self, encoder: Encoder, ema: Ema, layers: int) -> None:
        self._encoder = deepcopy(encoder).requires_grad_(False).eval()
        self._outputs: list[Tensor] = []
        average = {name.removeprefix(ENCODER): value for name, value in ema.averages.items()}
        for name, parameter in self._encoder.named_parameters():
            parameter.data = average[name]
        self.blocks = list(self._encoder.blocks)
        for block in self.blocks:
            recompute(block, enable=False)  # there is no backward pass
        for block in self.blocks[-layers:]:
            block.register_forward_hook(lambda module, inputs, output: self._outputs.append(output))

    def __call__(self, images: Tensor) -> list[Tensor]:
        prefix = self._encoder.num_prefix_tokens
        cuda = images.device.type == "cuda"
        with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=cuda):
            self._encoder(images)
        found, self._outputs = self._outputs, []
        return [output[:, prefix:] for output in found]
