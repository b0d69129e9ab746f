"""A run that is killed and started again ends as one that was left alone: same weights, moments, state and log."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmjd.parallel import store
from dmjd.train.checkpoint import read_loop_state

WORDS = (
    "batch_size=64",
    "log_every=4",
    "checkpoint_every=6",
    "keep_every=12",
    "backbone.drop_path=0.2",
    "ema_decay=0.9",
    "engine.accumulation=2",
)
LAST = "checkpoints/step-00000022"
# Pictures take longer than all the rest of so small a run.
NO_PICTURES = "import dmjd.train.loop as loop; loop.write_pictures = lambda *arguments: {}"


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., list[str]], launch: Callable[..., Any]
) -> Path:
    folder: Path = tmp_path_factory.mktemp("undisturbed") / "run"
    process = launch(["pretrain", *tiny(folder, *WORDS)])
    process.join(120)
    assert process.exitcode == 0
    return folder


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_equal_runs(one: Path, other: Path) -> None:
    assert (one / "log.jsonl").read_bytes() == (other / "log.jsonl").read_bytes()
    assert sorted(path.name for path in (one / "checkpoints").iterdir()) == sorted(
        path.name for path in (other / "checkpoints").iterdir()
    )
    assert same(*(store.read(run / LAST) for run in (one, other)))
    states = [read_loop_state(run / LAST) for run in (one, other)]
    for state in states:  # wall time, and the length of the file that holds it, are the machine's
        del state["journal"]["seconds"], state["journal"]["offsets"]["timing"]
    assert same(*states)


def test_equality_has_power(undisturbed: Path) -> None:
    state = store.read(undisturbed / LAST)
    poked = {name: value.clone() for name, value in state.items()}
    next(iter(poked.values())).view(-1)[0] += 1e-7
    assert same(state, state)
    assert not same(state, poked)


@pytest.mark.parametrize(("seed", "workers"), [(0, 0), (1, 2)])
def test_random_kills(
    seed: int,
    workers: int,
    tmp_path: Path,
    undisturbed: Path,
    tiny: Callable[..., list[str]],
    launch: Callable[..., Any],
) -> None:
    # Workers outlive their killed parent by seconds, and must not keep its folder from the next launch.
    command = ["pretrain", *tiny(tmp_path / "run", *WORDS, f"workers={workers}")]
    moments = random.Random(seed)
    kills = 0
    while True:
        process = launch(command)
        process.join(moments.uniform(0.3, 3.0) if kills < 5 else 120)
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        kills += 1
    assert process.exitcode == 0
    assert kills >= 2
    assert_equal_runs(tmp_path / "run", undisturbed)


KILL = "os.kill(os.getpid(), 9)"
FAULTS = {
    "in the first step": f"""
from dmjd.parallel.single import SingleEngine
SingleEngine.step = lambda self, lr, wd: {KILL}
""",
    "while it writes tensors": f"""
import torch.distributed.checkpoint.filesystem as filesystem
streams = []
write = filesystem._write_item
def fault(transforms, stream, *rest):
    if stream not in streams:
        streams.append(stream)
    # Halfway through the file of the second checkpoint.
    {KILL} if len(streams) == 2 and stream.tell() > 200_000 else None
    return write(transforms, stream, *rest)
filesystem._write_item = fault
""",
    "before the manifest is safe": f"""
import dmjd.train.checkpoint as checkpoint
flush = checkpoint._flush
flushed = []
def fault(path):
    flushed.append(path)
    {KILL} if len(flushed) == 12 else flush(path)
checkpoint._flush = fault
""",
    "before the rename": f"""
from pathlib import Path
Path.rename = lambda self, target: {KILL}
""",
    "while dropping an old checkpoint": f"""
import dmjd.train.checkpoint as checkpoint
remove = checkpoint.shutil.rmtree
def fault(path, **options):
    {KILL} if path.suffix != ".tmp" and path.exists() else remove(path, **options)
checkpoint.shutil.rmtree = fault
""",
    "in the middle of a log line": f"""
from dmjd.train.metrics import RunLog
def fault(self, row):
    self._file.write(b'{{"step": 4, "ep')
    {KILL}
RunLog.write = fault
""",
    "while drawing pictures": f"""
import dmjd.train.loop as loop
loop.write_pictures = lambda *arguments: {KILL}
""",
}


@pytest.mark.parametrize("moment", FAULTS)
def test_a_kill_at_this_moment(
    moment: str, tmp_path: Path, undisturbed: Path, tiny: Callable[..., list[str]], launch: Callable[..., Any]
) -> None:
    command = ["pretrain", *tiny(tmp_path / "run", *WORDS)]
    first = launch(command, prelude=f"{NO_PICTURES}\n{FAULTS[moment]}")
    first.join(60)
    assert first.exitcode == -9, "the fault was not reached"
    second = launch(command, prelude=NO_PICTURES)
    second.join(120)
    assert second.exitcode == 0
    assert_equal_runs(tmp_path / "run", undisturbed)
