"""Time that checkpoints stall training: asynchronous and synchronous, the first of a run and the second.

    python benchmarks/engines.py --simulated 2 --output saves.jsonl --save FOLDER --engines fsdp,zero2,zero3
        --models vit_large:64,vit_2b:16 engine.compile=block

measures the saves of rank 0 of two on one GPU; ``torchrun --standalone --nproc-per-node=2 benchmarks/engines.py``
without ``--simulated`` those of two.
"""

from __future__ import annotations

import shutil
import tempfile
import time
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

    ``async``: files are written during further steps; ``sync``: training waits. For each, the first save, whose host
    memory has been allocated as at the start of a run, and the second: ``stall_ms`` of the slowest rank (the device is
    idle before, so no step counts), ``slower_ms``: how much longer the steps beside it take in sum, and seconds until
    the commit. ``pin_seconds``: until the memory is allocated. ``gib``: size of the files.

    Args:
        train: runs some steps and waits for them; called ``SAVES + 1`` times.
    """
    folder = Path(world.on_main(lambda: _scratch(parent)))
    saves: dict[str, Any] = {}
    try:
        usual = _seconds(train)
        for way, number in (("async", 1), ("sync", 3)):
            forget_copies(step.engine)
            pinned = max(world.gather(_seconds(lambda: prepare(step))))
            saves.setdefault("pin_seconds", pinned)
            saver = Saver(folder, world, keep=1, keep_every=None, asynchronous=way == "async")
            try:
                saves[way] = [_save(step, world, saver, number + index, train, usual) for index in range(2)]
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


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _scratch(parent: Path) -> str:
    parent.mkdir(parents=True, exist_ok=True)
    return tempfile.mkdtemp(prefix="engines-", dir=parent)


def _save(
    step: Step, world: World, saver: Saver, number: int, train: Callable[[], object], usual: float
) -> dict[str, float]:
    stall = saver.save(number, lambda draft: step.engine.save(draft, step.averages), {})
    slower = _seconds(train) - usual
    saver.wait()
    saved = saver.finished()
    assert saved is not None
    return {
        "stall_ms": 1000 * max(world.gather(stall)),
        "slower_ms": 1000 * max(world.gather(slower)),
        "seconds": max(world.gather(saved)),
    }


def forget_copies(engine: Any) -> None:
    """Have the next save be the first: engines keep the memory of a copy, and torch what was pinned for another."""
    engine._copies = HostCopies(engine.device)
    if engine.device.type == "cuda":
        torch._C._host_emptyCache()


def prepare(step: Step) -> None:
    """Allocate the host memory of saves, as at the start of a run, and wait for it."""
    engine: Any = step.engine
    engine.prepare_save(step.averages)
    engine._copies._join()
