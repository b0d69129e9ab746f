"""Wait for batches with a time limit, an end on a stop request, and a dump of the workers' stacks. Imports no torch."""

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
"""Wait for the pending batch after a stop request."""
END_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL for workers."""
STACKS_SIGNAL = signal.SIGUSR2
STACK_SECONDS = 0.5
"""Wait for the stacks of one worker."""

_stop_requested: Callable[[], bool] = lambda: False  # noqa: E731
_thread = threading.local()


@contextmanager
def interrupted_by(stop_requested: Callable[[], bool]) -> Iterator[None]:
    """Within the block, waiting for data raises :class:`StopRequested` once ``stop_requested()`` is true."""
    global _stop_requested
    before, _stop_requested = _stop_requested, stop_requested
    try:
        yield
    finally:
        _stop_requested = before


class Progress:
    """Time of the last data, in memory shared with processes forked afterwards."""

    def __init__(self) -> None:
        self._last = memoryview(mmap(-1, 8)).cast("d")
        self.mark()

    def mark(self) -> None:
        """Record that data has arrived."""
        self._last[0] = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since data last arrived."""
        return time.monotonic() - self._last[0]

    def follow(self) -> None:
        """Make :func:`progress_mark` return :meth:`mark` in this thread."""
        _thread.mark = self.mark


def progress_mark() -> Callable[[], None]:
    """The function to call, from any thread, when data arrives for the loader of this thread."""
    mark: Callable[[], None] = getattr(_thread, "mark", lambda: None)
    return mark


@dataclass(frozen=True)
class Limit:
    """Limit of the wait for a batch.

    minutes: longest time without progress, ``data.timeout``.
    stacks: file for the stacks of the workers; None for standard error.
    finishes: after a stop request, a batch that arrives within :data:`GRACE_SECONDS` is still returned.
    """

    minutes: float
    stacks: Path | None = None
    finishes: bool = True


class Stacks:
    """A memory file to which this process and its workers write the Python stacks of their threads."""

    def __init__(self) -> None:
        self._file = os.memfd_create("stacks")  # processes share its offset, so they append

    def register(self) -> None:
        """Write the stacks of this worker on :data:`STACKS_SIGNAL`, also during a system call."""
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)

    def collect(self, workers: Sequence[multiprocessing.process.BaseProcess]) -> str:
        """The stacks of this process and of ``workers``."""
        self._write(f"process {os.getpid()}, waiting for data\n")
        faulthandler.dump_traceback(file=self._file, all_threads=True)
        for worker in workers:
            with suppress(OSError):  # the worker may have exited
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
    """Takes items from an iterator in another thread, so that waiting can end whatever blocks the iterator.

    Args:
        items: the caller must keep no reference to it.
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
        self._thread = threading.Thread(target=_serve, args=arguments, name="batches", daemon=True)
        self._thread.start()

    def next(self) -> T:
        """The next item.

        Raises:
            StopRequested: see :func:`interrupted_by`.
            DataError: if nothing has arrived for ``limit.minutes``.
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
        """End the thread and the workers; unless ``finished``, the workers may be blocked and are killed."""
        self._wanted.put(False)
        if not finished:
            _end(self._workers)
        self._thread.join(END_SECONDS if finished else POLL_SECONDS)  # the thread may be blocked too

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
            "storage or remove the file named there, or raise data.timeout; the same command continues"
        )


def _serve(
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
            # A traceback keeps the locals of its frames alive, and so the loader, whose deletion ends its workers.
            traceback.clear_frames(error.__traceback__)
            del items
            came.put((None, error))
            return
        came.put((item, None))
        del item


def _end(workers: Sequence[multiprocessing.process.BaseProcess]) -> None:
    main = threading.current_thread() is threading.main_thread()
    # Torch's handler would raise an error for every killed worker.
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
