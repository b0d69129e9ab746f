"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dmjd.errors import ConfigError, FolderGone, StorageError
from dmjd.parallel.launch import in_slurm_job, slurm_step

POLL_SECONDS = 1.0

logger = logging.getLogger("dmjd")


@contextmanager
def only_run_in(folder: Path, lock_wait: float = 0.0) -> Iterator[Callable[[], None]]:
    """Hold ``folder`` for this process; the kernel lets go of it however the process ends.

    Args:
        lock_wait: seconds that a job of Slurm waits for another process to let go. It may be one on a node that was cut
            off, and there is nobody to submit the job again. Elsewhere the answer comes at once.

    Yields:
        A check that it is still the folder that is held; raises FolderGone.

    Raises:
        ConfigError: naming who holds it. StorageError: where files cannot be locked.
    """
    lock = folder / ".lock"
    with lock.open("a+") as file:

        def check() -> None:
            if not (lock.exists() and os.path.samestat(lock.stat(), os.fstat(file.fileno()))):
                raise FolderGone(
                    f"run={folder}: the folder, or its .lock, which keeps other runs out, was removed while this run "
                    "was under way; nothing more is written there"
                )

        try:
            _acquire(file, folder, lock_wait if in_slurm_job() else 0.0)
        except OSError as error:
            raise StorageError(f"run={folder}: this file system cannot lock files ({error.strerror})") from error
        # A forked loader worker shares the lock and outlives a killed run by seconds.
        os.register_at_fork(after_in_child=file.close)
        file.truncate(0)
        file.write(", ".join(filter(None, (f"process {os.getpid()} on {platform.node()}", slurm_step()))))
        file.flush()
        yield check


def _acquire(file: IO[str], folder: Path, seconds: float) -> None:
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            if slurm_step() and holder.endswith(slurm_step()):
                raise ConfigError(
                    f"run={folder} is in use by {holder}, as this one is: none of them knows of the others. "
                    "Processes that shall train together are torchrun's to start, one agent on each node, as "
                    "launchers/slurm does"
                ) from error
            if time.monotonic() - began >= seconds:
                waited = f", after {seconds:.0f} s too" if seconds else ""
                raise ConfigError(
                    f"run={folder} is in use by {holder}{waited}; stop it, or name another folder"
                ) from error
        if not told:
            logger.warning("run=%s is in use by %s; waiting up to %.0f s for it to end", folder, holder, seconds)
            told = True
        time.sleep(POLL_SECONDS)
