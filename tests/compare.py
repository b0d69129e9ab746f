"""Runs in tests: what a child process is told, what a run leaves, and when two things are one, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dmjd.config import PretrainConfig

# Preludes for `launch` (tests/conftest.py).
NO_PICTURES = "import dmjd.train.loop as loop; loop.write_pictures = lambda *arguments: {}\n"
"""Pictures take longer than all the rest of so small a run; what `launch` starts draws none, but for the next line."""
PICTURES = "from dmjd.train import loop, preview; loop.write_pictures = preview.write_pictures\n"
KILL = "os.kill(os.getpid(), 9)"


def telling(file: Path) -> str:
    """A prelude under which a child's errors go to ``file``: its own stderr is the server's."""
    return f"sys.stderr = open({str(file)!r}, 'a', buffering=1)\n"


def configure(words: list[str]) -> PretrainConfig:
    """The configuration of ``dmjd pretrain`` with these words."""
    from dmjd.compose import compose

    config: PretrainConfig = compose("pretrain", words)
    return config


def pretrain(words: list[str]) -> Path:
    """Run it in this process; the run folder."""
    from dmjd.train import loop

    return loop.pretrain(configure(words)).path


def checkpoints(run: Path) -> list[int]:
    """Steps of the checkpoints that count."""
    return [int(path.name.removeprefix("step-")) for path in sorted((run / "checkpoints").glob("step-????????"))]


def rows(run: Path, name: str = "log") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def reason(run: Path) -> dict[str, Any]:
    """Why the run stopped."""
    record: dict[str, Any] = json.loads((run / "STOP_REASON").read_text())
    return record


def same(one: Any, other: Any) -> bool:
    """Bit for bit, through containers."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def stopped_and_resumed(launch: Callable[..., Any], arguments: list[str], run: Path, place: str, calls: int) -> int:
    """Send SIGTERM to a run in call ``calls`` of ``place``, "MODULE:CLASS.METHOD", and launch it again, to its end.
    Returns the step at which it stopped."""
    module, _, path = place.partition(":")
    kind, _, name = path.partition(".")
    fault = f"""
import os, signal, time
from {module} import {kind}
inner, done = {kind}.{name}, []
def fault(*arguments):
    done.append(1)
    if len(done) == {calls}:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)  # a thread takes the signal
    return inner(*arguments)
{kind}.{name} = fault
"""
    first = launch(arguments, fault)
    first.join(120)
    assert first.exitcode == 0
    assert reason(run)["reason"] == "signal"
    step: int = reason(run)["step"]
    second = launch(arguments)
    second.join(120)
    assert second.exitcode == 0
    return step
