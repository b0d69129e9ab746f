"""The state of the loop in a checkpoint: the position, the random generators, and the registry of all its parts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from dmjd.compose import to_yaml
from dmjd.config import TrainConfig
from dmjd.data.skipped_batches import Windows, add_window, batch_of
from dmjd.errors import CheckpointError, UserError
from dmjd.parallel.world import World
from dmjd.runs.checkpoint import LOOP_STATE, pack_loop_state, read_loop_state
from dmjd.runs.paths import CONFIG
from dmjd.safe_load import one_line


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is saved in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings, and lists, tuples and dicts of these."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""


class Registry:
    """The stateful parts of a run by name; the names are the keys of ``loop.pt``."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}

    def add(self, name: str, part: Stateful) -> None:
        """Register ``part`` under ``name``."""
        assert name not in self._parts, f"{name} is registered already"
        self._parts[name] = part

    def check_complete(self, owner: object) -> None:
        """Assert that every attribute of ``owner`` with a state is registered."""
        registered = {id(self), *map(id, self._parts.values())}
        forgotten = [
            name for name, part in vars(owner).items() if isinstance(part, Stateful) and id(part) not in registered
        ]
        assert not forgotten, f"{type(owner).__name__}.{forgotten[0]} has state and is not registered"

    def state_dict(self) -> dict[str, Any]:
        """The state of every part by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def files(self, config: TrainConfig) -> dict[str, bytes]:
        """The loop's files in a checkpoint by name: its state, and ``config``."""
        return {LOOP_STATE: pack_loop_state(self.state_dict()), CONFIG: to_yaml(config).encode()}

    def restore(self, checkpoint: Path) -> None:
        """Load the state in the folder ``checkpoint``. Raises CheckpointError if it is the state of other parts."""
        state = read_loop_state(checkpoint)
        try:
            self.load_state_dict(state)
        except UserError:
            raise
        except Exception as error:  # a part reads its keys without checks
            file = checkpoint / LOOP_STATE
            raise CheckpointError(f"{file} does not hold the state of this run: {one_line(error)}") from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of every part."""
        expected = self._parts.keys() - ({"data"} - state.keys())  # early checkpoints of image folders have no "data"
        assert state.keys() == expected, f"state of {sorted(state)} for parts {sorted(self._parts)}"
        for name in state:
            self._parts[name].load_state_dict(state[name])


class Position:
    """The position of a run: ``step`` optimizer steps are done, and the batches in ``passed_over`` are skipped.

    The state of the data loader follows from it. ``evaluated`` is false from the end of an epoch to the end of its
    evaluation.
    """

    evaluated = True

    def __init__(self) -> None:
        self.step = 0
        self.passed_over: Windows = ()

    def batch(self, step: int) -> int:
        """The number of the batch that optimizer step ``step`` reads, both counted from 0."""
        return batch_of(step, self.passed_over)

    def with_skipped(self, begin: int, end: int) -> Windows:
        """``passed_over`` with batches ``begin .. end - 1`` added."""
        return add_window(self.passed_over, begin, end)

    def state_dict(self) -> dict[str, Any]:
        state = {"step": self.step, "passed_over": self.passed_over}
        return state if self.evaluated else {**state, "evaluated": False}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.passed_over = state["step"], state["passed_over"]
        self.evaluated = state.get("evaluated", True)


class RandomState:
    """The global random generators of every rank, with a seed per rank.

    A training step draws from none of them; code that a user adds may.
    """

    def __init__(self, seed: int, world: World) -> None:
        self._world = world
        own = (seed + world.rank) % 2**32
        random.seed(own)
        np.random.seed(own)  # noqa: NPY002 -- code that a user adds may draw from it
        torch.manual_seed(own)

    def state_dict(self) -> dict[str, Any]:
        name, keys, *rest = np.random.get_state()  # noqa: NPY002
        own = {
            "python": random.getstate(),
            "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self._world.device) if self._world.device.type == "cuda" else None,
        }
        return {"ranks": self._world.gather(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # With another number of ranks the saved states are assigned in turn.
        own = state["ranks"][self._world.rank % len(state["ranks"])]
        random.setstate(own["python"])
        name, keys, *rest = own["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
        torch.set_rng_state(own["torch"])
        if own["cuda"] is not None and self._world.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], self._world.device)
