"""Callbacks of a run: called with the whole encoder on rank 0 at the end of every epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from dmjd.models.objective import Trainable
from dmjd.parallel.engine import Engine


class Callback(Protocol):
    """An evaluation during training. Both methods run on rank 0."""

    def on_epoch_end(self, encoder: nn.Module, step: int, epoch: float) -> Mapping[str, float] | None:
        """Scores of ``encoder`` after ``step`` optimizer steps, which become columns of the log; None to log nothing.

        ``encoder`` is read, not trained; it must be returned in the mode it came in.
        """

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the callback's state by that after ``rows``: the log up to the step that the run continues from."""


@contextmanager
def gathered_uncompiled(engine: Engine) -> Iterator[Trainable | None]:
    """The objective with whole parameters on rank 0, run without compiled graphs; None on other ranks. Collective.

    Compilation for a few images, or for evaluation mode, would take a minute in which the GPUs wait.
    """
    with torch.compiler.set_stance("force_eager"), engine.gathered() as objective:
        yield objective
