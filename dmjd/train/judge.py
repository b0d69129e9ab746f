"""Who looks at the encoder while a run is under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import nn


class Judge(Protocol):
    """Looks at the encoder at the end of every epoch, on rank 0, and says something for the log or nothing."""

    def __call__(self, encoder: nn.Module, step: int, epoch: float) -> Mapping[str, float] | None: ...

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Forget what it knows and take in these rows: what earlier launches logged, up to where the run goes on."""
