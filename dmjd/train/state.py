"""What a resumed run needs besides the engine's own state, registered in one place so that nothing is forgotten."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from dmjd.data.detour import Windows, batch_of
from dmjd.errors import CheckpointError, UserError
from dmjd.parallel.world import World
from dmjd.safe_load import one_line


@runtime_checkable
class Stateful(Protocol):
    """Something whose state must survive a restart."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings, and lists, tuples and dicts of them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""


class Registry:
    """Named stateful parts of a run."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}

    def add(self, name: str, part: Stateful) -> None:
        """Register ``part``; names are keys of the checkpoint."""
        assert name not in self._parts, f"{name} is registered already"
        self._parts[name] = part

    def check_complete(self, owner: object) -> None:
        """Fail if an attribute of ``owner`` has state that no checkpoint would hold."""
        registered = {id(self), *map(id, self._parts.values())}
        forgotten = [
            name for name, part in vars(owner).items() if isinstance(part, Stateful) and id(part) not in registered
        ]
        assert not forgotten, f"{type(owner).__name__}.{forgotten[0]} has state and is not registered"

    def state_dict(self) -> dict[str, Any]:
        """One entry a part."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """As :meth:`load_state_dict`, of what the file ``path`` held. Raises CheckpointError if it is another state."""
        try:
            self.load_state_dict(state)
        except UserError:
            raise
        except Exception as error:  # parts take what they need, and fail as it happens
            raise CheckpointError(f"{path} does not hold the state of this run: {one_line(error)}") from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give every part its own state back."""
        since = self._parts.keys() - ({"data"} - state.keys())  # which checkpoints of folders did not have once
        assert state.keys() == since, f"state of {sorted(state)} for parts {sorted(self._parts)}"
        for name in state:
            self._parts[name].load_state_dict(state[name])


class Position:
    """Where a run stands: ``step`` optimizer steps are done, and batches in ``passed_over`` are not read.

    The loader's whole state follows from it. ``evaluated`` is false from an epoch's end to that of its evaluation.
    """

    evaluated = True

    def __init__(self) -> None:
        self.step = 0
        self.passed_over: Windows = ()

    def batch(self, step: int) -> int:
        """The number of the batch that optimizer step ``step`` reads, both counted from 0."""
        return batch_of(step, self.passed_over)

    def state_dict(self) -> dict[str, Any]:
        state = {"step": self.step, "passed_over": self.passed_over}
        return state if self.evaluated else {**state, "evaluated": False}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.passed_over = state["step"], state["passed_over"]
        self.evaluated = state.get("evaluated", True)


class RandomState:
    """Global generators of every rank, seeded apart. A step draws from none of them; what a user adds to one may."""

    def __init__(self, seed: int, world: World) -> None:
        self._world = world
        own = (seed + world.rank) % 2**32
        random.seed(own)
        np.random.seed(own)  # noqa: NPY002 -- the global one is what users' code draws from
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
        # At another world size ranks share the saved ones in turn.
        own = state["ranks"][self._world.rank % len(state["ranks"])]
        random.setstate(own["python"])
        name, keys, *rest = own["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
        torch.set_rng_state(own["torch"])
        if own["cuda"] is not None and self._world.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], self._world.device)
