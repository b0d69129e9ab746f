"""Who looks at the model while a run is under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from dmjd.errors import StopRequested
from dmjd.models.objective import Objective
from dmjd.parallel.engine import Engine
from dmjd.parallel.world import World
from dmjd.train.journal import Journal


class Judge(Protocol):
    """Looks at the encoder at the end of every epoch, on rank 0, and says something for the log or nothing."""

    def __call__(self, encoder: nn.Module, step: int, epoch: float) -> Mapping[str, float] | None: ...

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Forget what it knows and take in these rows: what earlier launches logged, up to where the run goes on."""


@contextmanager
def on_view(engine: Engine) -> Iterator[Objective | None]:
    """The whole model, for rank 0 to look at; None on the others. Collective."""
    # Compiled for a few images, and for evaluation, it would keep the GPUs waiting for a minute.
    with torch.compiler.set_stance("force_eager"), engine.gathered() as objective:
        yield objective


class Jury:
    """The judges of a run. What they say goes into its journal."""

    def __init__(self, judges: Sequence[Judge], engine: Engine, journal: Journal, world: World) -> None:
        self._judges, self._engine, self._journal, self._world = judges, engine, journal, world

    def __bool__(self) -> bool:
        return bool(self._judges)

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """As :meth:`Judge.restore`, of all of them; rank 0 calls it."""
        for judge in self._judges:
            judge.restore(rows)

    def judge(self, step: int, epoch: float) -> bool:
        """Let every judge look at the encoder, and log what they say: all of it, or nothing and False if the run was
        asked to stop meanwhile. Collective."""

        def hear(encoder: nn.Module) -> bool:
            try:
                verdicts = [judge(encoder, step, epoch) for judge in self._judges]
            except StopRequested:
                return False
            for verdict in verdicts:
                if verdict is not None:
                    self._journal.note(step, verdict)
            return True

        with on_view(self._engine) as objective:
            return self._world.on_main(lambda: objective is None or hear(objective.model.encoder))
