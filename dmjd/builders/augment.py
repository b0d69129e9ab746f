"""Augmentation of a batch on its device: horizontal flip and BEiT's colour jitter, keyed by sample id."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dmjd.ops import Domain, keyed_bits, keyed_uniform
from dmjd.ops.images import horizontal_flip

_FLIP = cast(Domain, int(Domain.FLIP))
"""A plain integer: torch.compile before 2.12 cannot compare members of an enumeration."""

_LUMA = (0.2989, 0.587, 0.114)
ORDERS = 6
"""Permutations of brightness (0), contrast (1) and saturation (2), numbered in lexicographic order."""


def colour_jitter(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Multiply brightness, contrast and saturation of each image by its factors, as torchvision's functions do.

    A change blends with black, with the mean of the grey image or with the grey image, and rounds towards zero.

    Args:
        images: uint8 ``[B, H, W, 3]``.
        factors: float ``[B, 3]``, at least 0; 1 changes nothing.
        order: int64 ``[B]``, below :data:`ORDERS`.

    Returns:
        uint8 ``[B, H, W, 3]``.
    """
    x = images.float()
    wide = factors.float()[:, :, None, None, None]
    for which in _changes(order):
        grey = _grey(x)
        blends = torch.stack((torch.zeros_like(grey), grey.mean((1, 2, 3), keepdim=True).expand_as(grey), grey))
        rows = torch.arange(len(which), device=which.device)
        ratio = wide[rows, which]
        x = (ratio * x + (1 - ratio) * blends[which, rows]).clamp(0, 255).floor()
    return x.to(torch.uint8)


def _changes(order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First, second and third change of each permutation, int64 ``[B]``.

    Computed, because the copy of a table to the device would make the host wait.
    """
    first = order // 2
    second = torch.where(order % 2 == 0, (first == 0).long(), 2 - (first == 2).long())
    return first, second, 3 - first - second


def _grey(x: Tensor) -> Tensor:
    """Grey values, rounded down, ``[B, H, W, 1]``."""
    red, green, blue = x.unbind(-1)
    return (_LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue).floor().unsqueeze(-1)


_COLOURS = 1
"""Lane of ``Domain.FLIP`` for colours: independent random bits for flip and jitter."""


def flip_by_coin(images: Tensor, sample_ids: Tensor, key: Tensor) -> Tensor:
    """uint8 ``[B, H, W, C]``, each flipped with probability 1/2; a pure function of ``key`` and the sample id."""
    coin = keyed_bits(sample_ids, 1, key=key, domain=_FLIP).squeeze(1) & 1
    return horizontal_flip(images, coin.bool())


def jitter_colours(images: Tensor, sample_ids: Tensor, key: Tensor, strength: float) -> Tensor:
    """uint8 ``[B, H, W, 3]``, factors uniform in 1 +- ``strength``; a pure function of ``key`` and the sample id.

    BEiT jitters the whole image before the crop, which differs in the mean grey of a change of contrast alone.
    """
    uniform = keyed_uniform(sample_ids, 4, key=key, domain=_FLIP, lane=_COLOURS)
    order = (uniform[:, 3] * ORDERS).long()
    return colour_jitter(images, 1 + strength * (2 * uniform[:, :3] - 1), order)
