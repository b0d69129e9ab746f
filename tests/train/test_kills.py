"""A run that is killed and started again ends as one that was left alone: same weights, moments, state and log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmjd.parallel import store
from tests.compare import KILL, PICTURES, same

WORDS = (
    "batch_size=64",
    "log_every=4",
    "checkpoint_every=6",
    "keep_every=12",
    "backbone.drop_path=0.2",
    "ema_decay=0.9",
    "engine.grad_accum_steps=2",
)
LAST = "checkpoints/step-00000022"


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., list[str]], launch: Callable[..., Any]
) -> Path:
    folder: Path = tmp_path_factory.mktemp("undisturbed") / "run"
    process = launch(["pretrain", *tiny(folder, *WORDS)])
    process.join(120)
    assert process.exitcode == 0
    return folder


def test_equality_has_power(undisturbed: Path) -> None:
    state = store.read(undisturbed / LAST)
    poked = {name: value.clone() for name, value in state.items()}
    next(iter(poked.values())).view(-1)[0] += 1e-7
    assert same(state, state)
    assert not same(state, poked)


def assert_as_undisturbed(run: Path, undisturbed: Path, assert_same_run: Callable[..., None]) -> None:
    assert_same_run(run, undisturbed, "journal", "guard")
    kept = [sorted(path.name for path in (folder / "checkpoints").iterdir()) for folder in (run, undisturbed)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(("seed", "workers", "kills"), [pytest.param(0, 0, 5, marks=pytest.mark.long), (1, 2, 2)])
def test_random_kills(
    seed: int,
    workers: int,
    kills: int,
    tmp_path: Path,
    undisturbed: Path,
    tiny: Callable[..., list[str]],
    launch: Callable[..., Any],
    finish_through_kills: Callable[..., None],
    assert_same_run: Callable[..., None],
) -> None:
    # Workers outlive their killed parent by seconds, and must not keep its folder from the next launch.
    command = ["pretrain", *tiny(tmp_path / "run", *WORDS, f"workers={workers}")]
    finish_through_kills(lambda: launch(command, PICTURES), seed, 0.3, 1.5, kills)
    assert_as_undisturbed(tmp_path / "run", undisturbed, assert_same_run)


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
import dmjd.runs.checkpoint as checkpoint
flush = checkpoint._flush
flushed = []
def fault(path):
    flushed.append(path)
    {KILL} if len(flushed) == 12 else flush(path)
checkpoint._flush = fault
""",
    "before the rename": f"""
from pathlib import Path
rename = Path.rename
Path.rename = lambda self, target: {KILL} if "step-" in Path(target).name else rename(self, target)
""",
    "while dropping an old checkpoint": f"""
import dmjd.runs.checkpoint as checkpoint
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
    moment: str,
    tmp_path: Path,
    undisturbed: Path,
    tiny: Callable[..., list[str]],
    launch: Callable[..., Any],
    finish_through_fault: Callable[..., None],
    assert_same_run: Callable[..., None],
) -> None:
    command = ["pretrain", *tiny(tmp_path / "run", *WORDS)]
    finish_through_fault(lambda fault: launch(command, fault), FAULTS[moment])
    assert_as_undisturbed(tmp_path / "run", undisturbed, assert_same_run)
