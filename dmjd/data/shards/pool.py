"""Run jobs on several processes and show their progress."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import util
from typing import TypeVar

from dmjd.errors import ConfigError, DataError
from dmjd.progress import track

Job = TypeVar("Job")
Result = TypeVar("Result")

LONGEST_SOCKET = 107
"""Greatest length of a socket's path in bytes, <sys/un.h>."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def available_workers() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def each(work: Callable[[Job], Result], jobs: Sequence[Job], workers: int, label: str) -> Iterator[tuple[int, Result]]:
    """Yield (number, ``work(jobs[number])``) as they finish. After a failure no further job starts.

    Args:
        work: a module-level function; a worker that runs it may be killed at any time.
        jobs: picklable arguments.
        workers: number of processes; 1 runs the jobs in this one.
        label: beginning of the progress line.
    """
    workers = min(workers, len(jobs))
    if workers <= 1:
        yield from track(((number, work(job)) for number, job in enumerate(jobs)), label, len(jobs))
        return
    shorten_socket_paths()
    # Not forked, since a thread of this process could hold a lock at that moment.
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(workers, context, initializer=_join_parent)
    try:
        futures = {pool.submit(work, job): number for number, job in enumerate(jobs)}
        for future in track(as_completed(futures), label, len(jobs)):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise DataError(f"a worker was killed, perhaps for lack of memory; set fewer than workers={workers}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def shorten_socket_paths() -> None:
    """Make multiprocessing, here and in child processes, create its sockets in a folder with a short path.

    By default they are TMPDIR/pymp-XXXXXXXX/listener-XXXXXXXX.

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
        util.get_temp_dir()  # created by the first call, cached, and removed at exit
    finally:
        tempfile.tempdir = before


def _join_parent() -> None:
    """Ignore SIGINT, which the parent handles, and exit when the parent exits or is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
