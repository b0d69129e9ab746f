"""Many like jobs on several processes, and a line that says how far they are."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from multiprocessing import util
from typing import TypeVar

from dmjd.errors import ConfigError, DataError

Job = TypeVar("Job")
Result = TypeVar("Result")

LINE_SECONDS = 15.0
LONGEST_SOCKET = 107
"""Bytes of a socket's path, <sys/un.h>."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")

_log = logging.getLogger("dmjd")


def available_workers() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def each(work: Callable[[Job], Result], jobs: Sequence[Job], workers: int, label: str) -> Iterator[tuple[int, Result]]:
    """(number, ``work(jobs[number])``) as they finish. The first failure ends all of it, once what runs has ended.

    Args:
        work: a function of a module, which workers import; it must not mind being killed.
        jobs: what can be pickled.
        workers: processes; 1 is this one.
        label: what the line of progress begins with.
    """
    progress = _Progress(label, len(jobs))
    workers = min(workers, len(jobs))
    if workers <= 1:
        try:
            for number, job in enumerate(jobs):
                yield number, work(job)
                progress.advance()
        finally:
            progress.end()
        return
    shorten_socket_paths()
    # Not forked: the threads of this process could hold a lock at that moment.
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, context, initializer=_join_parent)
    try:
        futures = {pool.submit(work, job): number for number, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()
            progress.advance()
    except BrokenProcessPool as error:
        raise DataError(f"a worker was killed, perhaps for want of memory; try less than workers={workers}") from error
    finally:
        progress.end()
        pool.shutdown(cancel_futures=True)


def shorten_socket_paths() -> None:
    """Have multiprocessing, here and in processes begun later, put its sockets where their paths are short enough.

    It puts them into TMPDIR, as pymp-XXXXXXXX/listener-XXXXXXXX.

    Raises:
        ConfigError: if TMPDIR is too long and no folder with a short path can be written to.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(f"{folder}/pymp-XXXXXXXX/listener-XXXXXXXX")) <= LONGEST_SOCKET:
        return
    short = next((path for path in SHORT_FOLDERS if os.access(path, os.W_OK | os.X_OK)), None)
    if short is None:
        raise ConfigError(f"TMPDIR={folder} is too long for the sockets of workers; set TMPDIR=/tmp, or workers=0")
    before, tempfile.tempdir = tempfile.tempdir, short
    try:
        util.get_temp_dir()  # made on the first call, kept, and removed at exit
    finally:
        tempfile.tempdir = before


def _join_parent() -> None:
    """Leave an interruption to the parent, and end with it however it ends: a killed one cannot tell its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Progress:
    """A line that renews itself on a terminal; now and then a new one elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._begin = self._last = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        left = timedelta(seconds=round((now - self._begin) / self._done * (self._total - self._done)))
        line = f"{self._label} {self._done}/{self._total}  ETA {left}"
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif now - self._last >= LINE_SECONDS:
            self._last = now
            _log.info(line)

    def end(self) -> None:
        """Leave the line, so that what is said next has one of its own."""
        if self._done and sys.stderr.isatty():
            print(file=sys.stderr)
