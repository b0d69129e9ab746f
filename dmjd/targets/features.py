"""Shared by targets made of a frozen network's features: normalisation, precision and picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

NORMS = ("layernorm", "none")

_SHOWN_SIGMA = 2.5


def normalise_features(values: Tensor, norm: str) -> Tensor:
    """float32 ``[..., D]``: as they are, or with mean 0 and variance 1 over D (LayerNorm without parameters)."""
    values = values.float()
    return F.layer_norm(values, values.shape[-1:]) if norm == "layernorm" else values


@contextmanager
def frozen_on(module: nn.Module, device: torch.device, half: bool = True) -> Iterator[None]:
    """``module`` on ``device``, without gradients, in bfloat16 where that is CUDA and ``half`` allows it."""
    if next(module.parameters()).device != device:
        module.to(device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=half and device.type == "cuda"):
        yield


def render_features(values: Tensor, grid: tuple[int, int], patch: int) -> NDArray[np.uint8]:
    """A colour per token, uint8 RGB ``[h * patch, w * patch, 3]``.

    Three fixed directions of feature space are shown as red, green and blue. They are the same for every picture, so a
    target and its prediction, or two steps of a run, can be compared; +-2.5 deviations of normalised features span a
    colour. NaN is drawn as zero.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(values.shape[-1], 3, generator=generator) / values.shape[-1] ** 0.5
    colours = values.detach().float().cpu().nan_to_num() @ directions
    return paint(colours / (2 * _SHOWN_SIGMA) + 0.5, grid, patch)


def paint(colours: Tensor, grid: tuple[int, int], patch: int) -> NDArray[np.uint8]:
    """``[h * w, 3]`` in 0..1, clipped -> uint8 ``[h * patch, w * patch, 3]``, a square per token."""
    squares = (colours.clamp(0, 1) * 255).round().to(torch.uint8).unflatten(0, grid)
    return squares.repeat_interleave(patch, 0).repeat_interleave(patch, 1).numpy()
