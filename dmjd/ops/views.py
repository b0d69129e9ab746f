"""The masked views of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Views(NamedTuple):
    """Masked views: K views of B images of N tokens in raster order; V tokens are visible and M masked in each view.

    visible: int64 ``[K, B, V]``, ascending token ids.
    masked: int64 ``[K, B, M]``, ascending token ids.
    restore: int64 ``[K, B, N]``, token -> slot in ``cat(visible, masked)``; slots >= V are masked.
    mask: bool ``[K, B, N]``, true where masked.
    """

    visible: Tensor
    masked: Tensor
    restore: Tensor
    mask: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Views:
        """Apply ``change`` to every field, such as a slice of the batch or a copy to another device."""
        return Views(*(change(field) for field in self))
