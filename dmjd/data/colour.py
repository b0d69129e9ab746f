"""BEiT's colour jitter, for a batch on its device: every image has its own factors and its own order of changes."""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

_LUMA = (0.2989, 0.587, 0.114)
ORDERS = torch.tensor(list(permutations(range(3))))
"""``[6, 3]``: in which order brightness (0), contrast (1) and saturation (2) may follow each other."""


def colour_jitter(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Brightness, contrast and saturation of each image times its factors, as torchvision's functions change them.

    A change blends with black, with the image's mean grey or with its grey, and rounds towards zero.

    Args:
        images: uint8 ``[B, H, W, 3]``.
        factors: float ``[B, 3]``, at least 0; 1 leaves a property as it is.
        order: int64 ``[B]``, rows of :data:`ORDERS`.

    Returns:
        uint8 ``[B, H, W, 3]``.
    """
    x = images.float()
    wide = factors.float()[:, :, None, None, None]
    for which in ORDERS.to(order.device)[order].T:  # [B], the change whose turn it is
        grey = _grey(x)
        blends = torch.stack((torch.zeros_like(grey), grey.mean((1, 2, 3), keepdim=True).expand_as(grey), grey))
        rows = torch.arange(len(which), device=which.device)
        ratio = wide[rows, which]
        x = (ratio * x + (1 - ratio) * blends[which, rows]).clamp(0, 255).floor()
    return x.to(torch.uint8)


def _grey(x: Tensor) -> Tensor:
    """Whole numbers, ``[B, H, W, 1]``."""
    red, green, blue = x.unbind(-1)
    return (_LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue).floor().unsqueeze(-1)
