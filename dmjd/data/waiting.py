"""Waiting for images: how long, how a request to stop ends it, and the stacks that are written when it lasts too long.

Imports no torch.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.process
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, Generic, TypeVar

from dmjd.errors import DataError, StopRequested

T = TypeVar("T")

POLL_SECONDS = 0.2
GRACE_SECONDS = 0.5
"""After a request to stop, for a batch that is about to arrive."""
END_SECONDS = 1.0
"""For workers to end after SIGTERM, before they are sent SIGKILL."""
STACKS_SIGNAL = signal.SIGUSR2
STACK_SECONDS = 0.5
"""For one worker to write its stacks."""

_stop_requested: Callable[[], bool] = lambda: False  # noqa: E731
_thread = threading.local()


@contextmanager
def interrupted_by(stop_requested: Callable[[], bool]) -> Iterator[None]:
    """Within it, waiting for data ends with :class:`StopRequested` once ``stop_requested()`` is true."""
    global _stop_requested
    before, _stop_requested = _stop_requested, stop_requested
    try:
        yield
    finally:
        _stop_requested = before


class Progress:
    """When data last arrived, in memory that processes forked afterwards share."""

    def __init__(self) -> None:
        self._last = memoryview(mmap(-1, 8)).cast("d")
        self.mark()

    def mark(self) -> None:
        """Data has arrived."""
        self._last[0] = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since."""
        return time.monotonic() - self._last[0]

    def follow(self) -> None:
        """From now on :func:`progress_mark` in this thread gives :meth:`mark`."""
        _thread.mark = self.mark


def progress_mark() -> Callable[[], None]:
    """The function to call when data arrives for the loader that this thread works for; other threads may call it."""
    mark: Callable[[], None] = getattr(_thread, "mark", lambda: None)
    return mark


@dataclass(frozen=True)
class Limit:
    """How long to wait for a batch.

    minutes: of ``data.timeout``, without progress.
    stacks: the file that gets the stacks of the workers; None for standard error.
    finishes: after a request to stop, batches that arrive in time are still handed out.
    """

    minutes: float
    stacks: Path | None = None
    finishes: bool = True


class Stacks:
    """A file in memory into which this process and its workers write the Python stacks of their threads."""

    def __init__(self) -> None:
        self._file = os.memfd_create("stacks")  # all processes share its offset, so they append

    def register(self) -> None:
        """This process, a worker, writes when it is sent :data:`STACKS_SIGNAL`, also from within a system call."""
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)

    def collect(self, workers: Sequence[multiprocessing.process.BaseProcess]) -> str:
        """Those of this process and of ``workers``."""
        self._write(f"process {os.getpid()}, which waits for data\n")
        faulthandler.dump_traceback(file=self._file, all_threads=True)
        for worker in workers:
            with suppress(OSError):  # it may end meanwhile
                assert worker.pid is not None
                state = Path(f"/proc/{worker.pid}/status").read_text().partition("State:")[2].partition("\n")[0].strip()
                self._write(f"\nloader worker {worker.pid}, state {state}\n")
                size, deadline = self._size, time.monotonic() + STACK_SECONDS
                os.kill(worker.pid, STACKS_SIGNAL)
                while time.monotonic() < deadline and (size == self._size or size != (size := self._size)):
                    time.sleep(0.02)
        return os.pread(self._file, self._size, 0).decode(errors="replace")

    def close(self) -> None:
        os.close(self._file)

    def _write(self, text: str) -> None:
        os.write(self._file, text.encode())

    @property
    def _size(self) -> int:
        return os.fstat(self._file).st_size


class Waiting(Generic[T]):
    """Takes items from an iterator in a thread of its own, so that waiting for one can end, whatever blocks it.

    Args:
        items: handed over: nothing else may keep a reference to it.
        workers: the processes that make the items, if any.
    """

    def __init__(
        self,
        items: Iterator[T],
        workers: Sequence[multiprocessing.process.BaseProcess],
        progress: Progress,
        stacks: Stacks,
        limit: Limit,
    ) -> None:
        self._workers, self._progress, self._stacks, self._limit = workers, progress, stacks, limit
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._came: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        arguments = items, self._wanted, self._came, progress
        self._thread = threading.Thread(target=_hand_over, args=arguments, name="batches", daemon=True)
        self._thread.start()

    def next(self) -> T:
        """The next item.

        Raises:
            StopRequested: see :func:`interrupted_by`.
            DataError: if nothing has arrived for as long as the limit says.
        """
        if not self._limit.finishes and _stop_requested():
            raise StopRequested
        requested: float | None = None
        self._progress.mark()
        self._wanted.put(True)
        while True:
            with suppress(queue.Empty):
                item, error = self._came.get(timeout=POLL_SECONDS)
                break
            if _stop_requested():
                requested = requested or time.monotonic()
                if time.monotonic() - requested >= GRACE_SECONDS * self._limit.finishes:
                    raise StopRequested
            if self._progress.idle > self._limit.minutes * 60:
                raise self._overdue()
        if error is not None:
            raise error
        result: T = item
        return result

    def close(self, finished: bool) -> None:
        """End the thread and the workers; unless all items were taken they may be busy or blocked, and are killed."""
        self._wanted.put(False)
        if not finished:
            _end(self._workers)
        self._thread.join(END_SECONDS if finished else POLL_SECONDS)  # it may be blocked as well

    def _overdue(self) -> DataError:
        text, place = self._stacks.collect(self._workers), self._limit.stacks
        try:
            if place is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
        except OSError:
            place = None
        if place is None:
            print(text, file=sys.stderr)
        return DataError(
            f"no data arrived for {self._limit.minutes:g} minute(s), which is data.timeout; "
            f"{'the lines above show' if place is None else f'{place} shows'} where the loader is blocked: repair the "
            "storage or remove the file it names, or raise data.timeout; the same command continues"
        )


def _hand_over(
    items: Iterator[Any],
    wanted: queue.SimpleQueue[bool],
    came: queue.SimpleQueue[tuple[Any, BaseException | None]],
    progress: Progress,
) -> None:
    progress.follow()
    while wanted.get():
        try:
            item = next(items)
        except BaseException as error:
            # A traceback keeps the locals of its frames alive, among them the loader, which ends its workers when it
            # is deleted.
            traceback.clear_frames(error.__traceback__)
            del items
            came.put((None, error))
            return
        came.put((item, None))
        del item


def _end(workers: Sequence[multiprocessing.process.BaseProcess]) -> None:
    main = threading.current_thread() is threading.main_thread()
    # Torch's handler would raise an error about every worker that is killed.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if main else None
    try:
        for end in (multiprocessing.process.BaseProcess.terminate, multiprocessing.process.BaseProcess.kill):
            for worker in workers:
                end(worker)
            deadline = time.monotonic() + END_SECONDS
            for worker in workers:
                worker.join(max(deadline - time.monotonic(), 0))
    finally:
        if main:
            signal.signal(signal.SIGCHLD, handler)
