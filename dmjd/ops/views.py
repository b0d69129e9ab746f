"""The masked views of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Views(NamedTuple):
    """Which tokens each of K views of B images hides; N tokens in raster order, V visible and M hidden per view.

    visible: int64 ``[K, B, V]``, ascending token ids.
    masked: int64 ``[K, B, M]``, ascending token ids.
    restore: int64 ``[K, B, N]``, token -> slot in ``cat(visible, masked)``; slots >= V are hidden.
    mask: bool ``[K, B, N]``, true where hidden.
    """

    visible: Tensor
    masked: Tensor
    restore: Tensor
    mask: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Views:
        """Every field under ``change``, such as a slice of the batch or a move to another device."""
        return Views(*(change(field) for field in self))
