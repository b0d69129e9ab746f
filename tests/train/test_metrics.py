from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmjd.train.guard import StepNumbers
from dmjd.train.metrics import RunLog, StepMeans, workers_needed
from dmjd.train.stopwatch import Stopwatch


def numbers(value: float, vis: float | None = None) -> StepNumbers:
    losses = {"loss": value, "mim": 2 * value} | ({} if vis is None else {"vis": vis})
    return StepNumbers({**losses, "m_corr": 0.6, "m_pred": 1.0}, 3 * value, applied=1.0)


def test_a_window_gives_means_and_starts_again() -> None:
    window = StepMeans()
    for value in (1.0, 2.0, 6.0):
        window.add(numbers(value, vis=10 * value))
    assert window.steps == 3
    expected = {"loss": 3.0, "mim": 6.0, "vis": 30.0, "grad_norm": 9.0, "m_corr": 0.6, "m_pred": 1.0}
    assert window.flush() == pytest.approx(expected, rel=1e-12)
    window.add(numbers(5.0, vis=1.0))
    assert window.flush()["loss"] == 5.0


def test_a_window_has_no_visible_loss_where_there_is_none() -> None:
    window = StepMeans()
    window.add(numbers(1.0))
    assert "vis" not in window.flush()


def test_a_window_goes_on_exactly_from_its_state() -> None:
    values = [0.1, 0.2, 0.3, 1e-9, 7.7]
    straight, first, second = StepMeans(), StepMeans(), StepMeans()
    for value in values:
        straight.add(numbers(value, vis=value))
    for value in values[:2]:
        first.add(numbers(value, vis=value))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for value in values[2:]:
        second.add(numbers(value, vis=value))
    assert second.steps == straight.steps
    assert second.flush() == straight.flush()


def test_the_state_of_a_window_is_a_copy() -> None:
    window = StepMeans()
    window.add(numbers(1.0))
    state = window.state_dict()
    window.add(numbers(2.0))
    assert (state["steps"], state["sums"]["loss"]) == (1, 1.0)


def test_the_log_goes_on_from_an_offset_and_drops_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    log.write({"step": 1})
    offset = log.offset
    log.write({"step": 2, "name": "a longer row"})
    log.close()
    assert offset == len('{"step": 1}\n')

    log = RunLog(path, offset)
    log.write({"step": 3})
    assert log.offset == path.stat().st_size, "a row is on its way to the disk as soon as it is written"
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_new_log_forgets_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 99}\n')
    log = RunLog(path)
    log.write({"step": 1})
    log.close()
    assert path.read_text() == '{"step": 1}\n'


def test_the_offset_counts_bytes_and_not_characters(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.jsonl")
    log.write({"name": "été"})
    log.close()
    assert log.offset == (tmp_path / "log.jsonl").stat().st_size


@pytest.mark.parametrize("left", [None, b'{"step": 99}\n'], ids=["removed", "replaced"])
def test_a_log_that_is_removed_while_it_is_written_is_put_back(tmp_path: Path, left: bytes | None) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    log.write({"step": 1})
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    log.write({"step": 2})
    log.sync()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    inode = path.stat().st_ino
    log.write({"step": 3})
    log.sync()
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert log.offset == path.stat().st_size
    assert path.stat().st_ino == inode, "a log in its place is left there"


@pytest.mark.parametrize("left", [None, b"", b'{"step": 1}\n{"st'], ids=["deleted", "emptied", "cut short"])
def test_a_log_shorter_than_the_offset_is_not_filled_up_with_zeros(tmp_path: Path, left: bytes | None) -> None:
    path = tmp_path / "log.jsonl"
    if left is not None:
        path.write_bytes(left)
    log = RunLog(path, offset=1000)
    log.write({"step": 3})
    assert log.offset == path.stat().st_size
    log.close()
    assert b"\0" not in path.read_bytes()
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 3}


class Clock:
    """A perf_counter that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_laps_tell_working_from_waiting_and_leave_evaluations_out(clock: Clock) -> None:
    def loader() -> Iterator[int]:
        for item in range(4):
            clock.now += 2.0
            yield item

    watch = Stopwatch()
    watch.resume(50.0, {})
    seen = []
    for item in watch.waiting(loader()):
        seen.append(item)
        clock.now += 3.0
        watch.mark()
        if item == 1:
            watch.enter("evaluate")
            clock.now += 100.0
            assert watch.lap() == (10.0, 4.0)
    assert seen == [0, 1, 2, 3]
    assert watch.lap() == (10.0, 4.0)
    assert watch.lap() == (0.0, 0.0)
    assert watch.elapsed == 170.0


def test_waiting_passes_a_loaders_error_on(clock: Clock) -> None:
    def loader() -> Iterator[int]:
        yield 1
        raise ValueError("broken image")

    items = Stopwatch().waiting(loader())
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken image"):
        next(items)


def test_a_disk_that_takes_half_a_row_leaves_whole_rows(tmp_path: Path) -> None:
    # In a process of its own, whose files may not grow beyond 100 bytes: the write is cut short without an error.
    program = """
import resource, signal, sys
from pathlib import Path
from dmjd.errors import StorageError
from dmjd.train.metrics import RunLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
log = RunLog(Path(sys.argv[1]))
try:
    while True:
        log.write({"step": 1, "text": "x" * 20})
except StorageError as error:
    print(log.offset, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "log.jsonl")], capture_output=True, text=True, check=True
    )
    content = (tmp_path / "log.jsonl").read_bytes()
    assert content.endswith(b"}\n")
    assert done.stdout.startswith(f"{len(content)} cannot write")


@pytest.mark.parametrize(
    ("workers", "seconds", "waited", "needed"),
    [
        (2, 10.0, 5.0, 4),  # two workers deliver in 10 s what 5 s of work ask for
        (4, 10.0, 1.0, 5),
        (8, 10.0, 0.0, 8),
        (0, 10.0, 9.0, 9),  # 9 s of loading within this process, for 1 s of work
        (0, 10.0, 2.0, 1),
    ],
)
def test_workers_that_would_hide_the_loading(workers: int, seconds: float, waited: float, needed: int) -> None:
    assert workers_needed(workers, seconds, waited) == needed


def test_skipped_steps_are_counted_and_in_no_mean() -> None:
    window, bad = StepMeans(), numbers(float("nan"))._replace(applied=0.0)
    for step in (numbers(1.0), bad, numbers(3.0), bad):
        window.add(step)
    restored = StepMeans()
    restored.load_state_dict(json.loads(json.dumps(window.state_dict())))
    row = restored.flush()
    assert (row["loss"], row["skipped"]) == (2.0, 2)
    assert not restored.flush()
