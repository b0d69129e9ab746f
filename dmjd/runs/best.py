"""The best checkpoint of a fine-tuning, by the main score of its validations. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dmjd.errors import CheckpointError
from dmjd.files import read_file, replace_file
from dmjd.runs.paths import RunPaths
from dmjd.safe_load import parse_json


class Validated(NamedTuple):
    """The score, in per cent, of the weights after ``step`` optimizer steps."""

    step: int
    score: float


class Best:
    """The best validations so far, each better than those before it: part of the loop's state, the same on every rank.

    A checkpoint holds those up to its step, so a rollback forgets later ones.
    """

    def __init__(self) -> None:
        self.history: list[Validated] = []

    @property
    def step(self) -> int:
        """Steps of the best weights; 0 before the first validation."""
        return self.history[-1].step if self.history else 0

    def add(self, step: int, score: float) -> None:
        """Add the score after ``step`` steps. Of equal scores the earliest is the best."""
        if not self.history or score > self.history[-1].score:
            self.history.append(Validated(step, score))

    def state_dict(self) -> dict[str, Any]:
        return {"history": [tuple(each) for each in self.history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = [Validated(*each) for each in state["history"]]


def best_steps(history: Sequence[Validated], steps: Iterable[int]) -> set[int]:
    """Steps of the best checkpoints at ``steps``, to any of which a run may return."""
    found = set()
    for step in steps:
        found.update([each.step for each in history if each.step <= step][-1:])
    return found


def write_best(run: Path, history: Sequence[Validated]) -> None:
    """Write ``best.json`` (step, score) into the run folder atomically; without validations remove it."""
    file = RunPaths(run).best
    if history:
        replace_file(file, json.dumps(history[-1]._asdict()))
    else:
        file.unlink(missing_ok=True)


def read_best(run: Path) -> Validated:
    """The best validation of a run. Raises CheckpointError if there is none, or ``best.json`` cannot be read."""
    file = RunPaths(run).best
    try:
        record = parse_json(read_file(file))
        step, score = record["step"], record["score"]
        if type(step) is not int or not 0 <= step < 1 << 53 or type(score) not in (int, float):
            raise ValueError(f"step={str(step)[:20]}, score={str(score)[:20]}")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{run} has no best checkpoint: {file.name} is written by validations of a fine-tuning"
        ) from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); use the newest checkpoint, which=newest") from error
    return Validated(step, score)
