"""How long checkpoints keep the training: beside it and in its way, the first of a run and later ones."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dmjd.errors import UserError
from dmjd.parallel.engine import Engine
from dmjd.parallel.staging import HostCopies
from dmjd.parallel.world import World
from dmjd.runs.saver import Saver

SAVES = 4


def measure_saves(engine: Engine, world: World, parent: Path, train: Callable[[], object]) -> dict[str, Any]:
    """Save :data:`SAVES` times below ``parent``, where nothing stays. Collective.

    ``async``: files are written beside further steps; ``sync``: nothing else is done meanwhile. Of either the first
    save, in which pinned memory is made, and the second: ``stall_ms`` that the slowest rank was kept (the device was
    idle, so no step is counted in), and the seconds until it was committed. ``gib`` are in files.

    Args:
        train: does some steps and waits for them.
    """
    folder = Path(world.on_main(lambda: _scratch(parent)))
    saves: dict[str, Any] = {}
    try:
        for way, step in (("async", 1), ("sync", 3)):
            forget_copies(engine)
            saver = Saver(folder, world, keep=1, keep_every=None, asynchronous=way == "async")
            try:
                saves[way] = [_save(engine, world, saver, step, train), _save(engine, world, saver, step + 1, train)]
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


def _save(engine: Engine, world: World, saver: Saver, step: int, train: Callable[[], object]) -> dict[str, float]:
    stall = saver.save(step, lambda draft: engine.save(draft, {}), {})
    train()
    saver.wait()
    saved = saver.finished()
    assert saved is not None
    return {
        "stall_ms": 1000 * max(world.gather(stall)),
        "seconds": max(world.gather(saved)),
    }


def forget_copies(engine: Engine) -> None:
    """Have the next save be the first: engines keep the memory of a copy, and torch what was pinned for another."""
    engine._copies = HostCopies(engine.device)
    if engine.device.type == "cuda":
        torch._C._host_emptyCache()
