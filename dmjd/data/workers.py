"""Worker processes of the loader: their shared memory, how they are forked and end, and errors that they send."""

from __future__ import annotations

import ctypes
import errno
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkContext
from multiprocessing.queues import Queue
from pathlib import Path
from threading import Thread
from typing import Any

from dmjd.data.stream.pipe import end_commands
from dmjd.data.waiting import Progress, Stacks
from dmjd.errors import ConfigError, DataError, StorageError, UserError

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PREFETCH = 2
"""Batches that each worker prefetches."""
SHARED_MEMORY = Path("/dev/shm")
"""Workers pass batches to the main process in files of this folder."""


def shared_memory_needed(batch_bytes: int, workers: int, processes: int = 1) -> int:
    """Bytes of shared memory that ``processes`` of a host need, each with ``workers`` workers."""
    in_use = 2  # by the current step and the previous one
    return batch_bytes * (PREFETCH * workers + in_use) * processes if workers else 0


def shared_memory_free() -> float:
    """Free bytes of shared memory; infinity where it is not limited."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize if status.f_blocks else float("inf")


def check_shared_memory(batch_bytes: int, workers: int, processes: int = 1) -> None:
    """Raise ConfigError if shared memory is too small; arguments as for :func:`shared_memory_needed`.

    Without this check workers fail or are killed once it is full.
    """
    needed, free = shared_memory_needed(batch_bytes, workers, processes), shared_memory_free()
    if needed > free:
        each = free / (batch_bytes * processes)
        fits = max(int(each - 2) // PREFETCH, 0)
        raise ConfigError(
            f"workers={workers} need {needed / 2**20:.0f} MiB of {SHARED_MEMORY} for their batches, and "
            f"{free / 2**20:.0f} MiB are free; set workers={fits}, or enlarge it (docker run "
            f"--shm-size={-(-2 * needed // 2**30)}g, or --ipc=host)"
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Objects that exist now are not collected by processes forked within: a CUDA graph's or event's destructor aborts
    there."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class WorkerContext(ForkContext):
    """Forks workers, whatever Python's default, so that they share the index and are children of this process."""

    def Queue(self, maxsize: int = 0) -> Queue[Any]:
        return _Queue(maxsize, ctx=self.get_context())


class _Queue(Queue):  # type: ignore[type-arg]  # not subscriptable at run time
    """Sends an error where a batch cannot be sent: nothing catches exceptions of the feeder thread."""

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:
        if isinstance(item, tuple) and not isinstance(item[1], UserError):
            self.put((item[0], _send_error(error)))
        else:  # the error cannot be sent either; the main process detects that the worker exited
            print(f"loader worker {os.getpid()}: {_send_error(error)}", file=sys.stderr, flush=True)
            os._exit(1)


def _send_error(error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    number = error.errno if isinstance(error, OSError) else None
    kind: type[UserError] = DataError
    if number == errno.ENOSPC or "shared memory" in reason or "No space left" in reason:
        kind = StorageError
        cure = f"set fewer workers, or workers=0, or enlarge {SHARED_MEMORY} (docker run --shm-size=8g, or --ipc=host)"
    elif "AF_UNIX" in reason:
        cure = "set TMPDIR to a shorter path, such as TMPDIR=/tmp"
    elif number == errno.EMFILE or "open files" in reason:
        cure = "raise the limit of open files (ulimit -n), or set fewer workers"
    elif number == errno.ENOMEM or isinstance(error, MemoryError):
        cure = "set fewer workers, or workers=0"
    else:
        cure = "set workers=0 to load in the main process and see where it fails"
    return kind(f"a loader worker cannot send a batch ({reason}); {cure}")


def begin_worker(progress: Progress, stacks: Stacks, worker: int) -> None:
    """Signals and the end of a worker, which calls this first; it is number ``worker``."""
    progress.follow()
    stacks.register()
    # Ctrl-C and the signals of launchers (Slurm's warning USR1, torchrun's TERM) reach every process of a job; only the
    # main process handles them. It needs its workers until its last checkpoint, and ends them by TERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # A killed parent cannot end its workers. Torch's poll for it every five seconds, or for ever if it died first. For
    # the kernel the parent is the thread that forked, so that thread has to outlive the loader.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None
    if os.getppid() != parent.pid:
        os._exit(1)
    Thread(target=_exit_on_parents_term, args=(parent.pid,), daemon=True).start()


def _exit_on_parents_term(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    end_commands()
    os._exit(0)
