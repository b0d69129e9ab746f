"""The student's average as a teacher that runs forward."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor

from dmjd.models.masked_image_model import Encoder
from dmjd.models.recompute import recompute
from dmjd.train.ema import ENCODER, EncoderEma


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
