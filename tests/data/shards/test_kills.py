"""A run over shards behind a server, killed at any moment, ends as one that was left alone, and leaves no process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmjd.data.shards import cache
from tests.compare import telling
from tests.data.shards.http_server import Server

pytest.importorskip("aiohttp", reason="needs aiohttp, with which fsspec reads HTTP")

PRELUDE = """
os.setsid()
open(SESSIONS, "a").write(f"{os.getpid()}\\n")
MAIN = os.getpid()
KILL = lambda: os.kill(MAIN, 9)  # the run, though a worker may come to it first
"""
FAULTS = {
    "before the first byte of a download": """
import dmjd.data.shards.cache as cache
cache.fetch_shard = lambda *arguments: KILL()
""",
    "amid a download": """
import dmjd.data.shards.cache as cache
def fault(url, shard, path, patience):
    path.write_bytes(b"half of it")
    KILL()
cache.fetch_shard = fault
""",
    "between a download and its name": """
from pathlib import Path
replace = Path.replace
Path.replace = lambda self, target: KILL() if self.suffix == ".part" else replace(self, target)
""",
    "while evicting": """
from pathlib import Path
unlink = Path.unlink
def fault(self, missing_ok=False):
    unlink(self, missing_ok)
    if self.suffix == ".tar":
        KILL()
Path.unlink = fault
""",
    "amid the third checkpoint": """
import torch.distributed.checkpoint.filesystem as filesystem
streams, write = [], filesystem._write_item
def fault(transforms, stream, *rest):
    if stream not in streams:
        streams.append(stream)
    return KILL() if len(streams) == 3 else write(transforms, stream, *rest)
filesystem._write_item = fault
""",
    "when a worker has read its fifth batch": """
from dmjd.data.loader import StepBatches
load = StepBatches.load
def fault(self, step):
    if step == 4:
        KILL()
    return load(self, step)
StepBatches.load = fault
""",
}


@pytest.fixture
def words(server: Server, finished: Path, tmp_path: Path, tiny: Callable[..., list[str]]) -> list[str]:
    """Twelve steps in four epochs, whose cache holds about half of the shards."""
    server.root = finished
    return [
        "pretrain",
        *tiny(
            tmp_path / "run",
            "data=shards",
            f"data.root={server.url('').rstrip('/')}",
            f"data.cache={tmp_path / 'cache'}",
            "data.cache_gib=3e-5",
            "data.image_size=[16,16]",
            "epochs=4",
            "batch_size=8",
            "log_every=1",
            "checkpoint_every=2",
            "workers=1",
        ),
    ]


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, finished: Path, tiny: Callable[..., list[str]], launch: Callable[..., Any]
) -> Path:
    """The same run over the same shards on a disk, without a worker."""
    folder: Path = tmp_path_factory.mktemp("undisturbed") / "run"
    more = (
        "data=shards",
        f"data.root={finished}",
        "data.image_size=[16,16]",
        "epochs=4",
        "batch_size=8",
        "log_every=1",
    )
    process = launch(["pretrain", *tiny(folder, *more, "checkpoint_every=2")])
    process.join(120)
    assert process.exitcode == 0
    return folder


@pytest.fixture
def start(words: list[str], tmp_path: Path, launch: Callable[..., Any]) -> Callable[..., Any]:
    """``start(fault="")``: a run in a session of its own."""
    prelude = f"SESSIONS = {str(tmp_path / 'sessions')!r}\n{PRELUDE}"
    return lambda fault="": launch(words, prelude + fault)


def members(sessions: set[str]) -> list[str]:
    """Processes of some sessions that still run, with what they are."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                state = (process / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state[3] in sessions and state[0] != "Z":
                found.append(f"{process.name} {state}")
    return found


def assert_nothing_left(folder: Path) -> None:
    """No process of the run, no half of a download, and no image that a kill made look bad."""
    sessions = set((folder / "sessions").read_text().split())
    end = time.monotonic() + 20  # a worker looks for its parent every five seconds
    while left := members(sessions):
        assert time.monotonic() < end, left
        time.sleep(0.05)
    for draft in (folder / "cache").glob("*.part"):
        cache._sweep(draft)  # as the next download does: a worker of the killed run may have held it until the last one
    files = {path.suffix for path in (folder / "cache").iterdir()}
    assert files <= {
        ".tar",
        ".stamp",
    }  # two workers that run out of room at once may each evict what the other has fetched
    assert not (folder / "run" / "quarantine.jsonl").exists()


@pytest.mark.parametrize(("seed", "kills"), [(0, 2), pytest.param(1, 6, marks=pytest.mark.long)])
def test_random_kills(
    seed: int,
    kills: int,
    start: Callable[..., Any],
    undisturbed: Path,
    tmp_path: Path,
    finish_through_kills: Callable[..., None],
    assert_same_run: Callable[..., None],
) -> None:
    finish_through_kills(start, seed, 0.1, 0.6, kills)
    assert_same_run(tmp_path / "run", undisturbed, "data")
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("moment", FAULTS)
def test_a_kill_at_this_moment(
    moment: str,
    start: Callable[..., Any],
    undisturbed: Path,
    tmp_path: Path,
    finish_through_fault: Callable[..., None],
    assert_same_run: Callable[..., None],
) -> None:
    finish_through_fault(start, FAULTS[moment])
    assert_same_run(tmp_path / "run", undisturbed, "data")
    assert_nothing_left(tmp_path)


def test_a_worker_that_is_killed_is_one_sentence_and_the_run_continues(
    start: Callable[..., Any], undisturbed: Path, tmp_path: Path, assert_same_run: Callable[..., None]
) -> None:
    fault = f"""
{telling(tmp_path / "said")}
from dmjd.data.loader import StepBatches
load = StepBatches.load
StepBatches.load = lambda self, step: os.kill(os.getpid(), 9) if step == 8 else load(self, step)
"""
    first = start(fault)
    first.join(60)
    assert first.exitcode == 1
    said = (tmp_path / "said").read_text()
    assert "error: DataLoader worker" in said
    assert "use fewer workers" in said
    assert "Traceback" not in said
    second = start()
    second.join(120)
    assert second.exitcode == 0
    assert_same_run(tmp_path / "run", undisturbed, "data")
    assert_nothing_left(tmp_path)
