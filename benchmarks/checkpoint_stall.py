"""Time that checkpoints stall training: asynchronous and synchronous, the first of a run and the second."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dmjd.builders.step import Step
from dmjd.errors import UserError
from dmjd.parallel.staging import HostCopies
from dmjd.parallel.world import World
from dmjd.runs.saver import Saver

SAVES = 4


def measure_saves(step: Step, world: World, parent: Path, train: Callable[[], object]) -> dict[str, Any]:
    """Save :data:`SAVES` times below ``parent``, where nothing stays. Collective.

    ``async``: files are written during further steps; ``sync``: training waits. For each, the first save, which
    allocates pinned memory, and the second: ``stall_ms`` of the slowest rank (the device is idle before, so no step
    counts), and seconds until the commit. ``gib``: size of the files.

    Args:
        train: runs some steps and waits for them.
    """
    folder = Path(world.on_main(lambda: _scratch(parent)))
    saves: dict[str, Any] = {}
    try:
        for way, number in (("async", 1), ("sync", 3)):
            forget_copies(step.engine)
            saver = Saver(folder, world, keep=1, keep_every=None, asynchronous=way == "async")
            try:
                saves[way] = [_save(step, world, saver, number + index, train) for index in range(2)]
            finally:
                saver.close()
        saves["gib"] = (
            world.on_main(lambda: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())) / 2**30
        )
    except UserError as error:
        return saves | {"refused": str(error)}
    finally:
        world.on_main(lambda: shutil.rmtree(folder))
    return saves


def _scratch(parent: Path) -> str:
    parent.mkdir(parents=True, exist_ok=True)
    return tempfile.mkdtemp(prefix="engines-", dir=parent)


def _save(step: Step, world: World, saver: Saver, number: int, train: Callable[[], object]) -> dict[str, float]:
    stall = saver.save(number, lambda draft: step.engine.save(draft, step.averages), {})
    train()
    saver.wait()
    saved = saver.finished()
    assert saved is not None
    return {
        "stall_ms": 1000 * max(world.gather(stall)),
        "seconds": max(world.gather(saved)),
    }


def forget_copies(engine: Any) -> None:
    """Have the next save be the first: engines keep the memory of a copy, and torch what was pinned for another."""
    engine._copies = HostCopies(engine.device)
    if engine.device.type == "cuda":
        torch._C._host_emptyCache()
