"""The lock of a run folder: one run at a time."""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from dmjd.errors import ConfigError, FolderGone, StorageError
from dmjd.parallel.launch import in_slurm_job, is_elastic, slurm_step

POLL_SECONDS = 1.0

logger = logging.getLogger("dmjd")


class RunLock:
    """Context manager that locks the existing run folder ``folder`` for this process, with flock on its ``.lock``.

    The kernel releases the lock however the process ends.

    Args:
        lock_wait: seconds that a Slurm job or an elastic launch waits for another process to release the lock: it may
            run on a node that was cut off, and nobody would start the run again. Other launches do not wait.

    Raises:
        ConfigError: on entering, if another process holds the lock; the error names it.
        StorageError: on entering, if the file system has no locks.
    """

    def __init__(self, folder: Path, lock_wait: float = 0.0) -> None:
        self._folder, self._path, self._lock_wait = folder, folder / ".lock", lock_wait
        self._file: IO[str] | None = None

    def __enter__(self) -> RunLock:
        with ExitStack() as failing:
            file = failing.enter_context(self._path.open("a+"))
            try:
                _acquire(file, self._folder, self._lock_wait if in_slurm_job() or is_elastic() else 0.0)
            except OSError as error:
                raise StorageError(
                    f"run={self._folder}: this file system cannot lock files ({error.strerror})"
                ) from error
            failing.pop_all()
        # A forked loader worker shares the lock and lives for seconds after the run was killed.
        os.register_at_fork(after_in_child=file.close)
        file.truncate(0)
        file.write(", ".join(filter(None, (f"process {os.getpid()} on {platform.node()}", slurm_step()))))
        file.flush()
        self._file = file
        return self

    def check(self) -> None:
        """Raise FolderGone if the folder or its ``.lock`` was removed or replaced."""
        assert self._file is not None
        if not (self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))):
            raise FolderGone(
                f"run={self._folder}: the folder, or its .lock, which keeps other runs out, was removed while this run "
                "was under way; nothing more is written there"
            )

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


def _acquire(file: IO[str], folder: Path, seconds: float) -> None:
    began, warned = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            if slurm_step() and holder.endswith(slurm_step()):
                raise ConfigError(
                    f"run={folder} is in use by {holder}, which is in the same Slurm step and not in the same process "
                    "group; start the processes of a run with torchrun, one agent on each node, as launchers/slurm does"
                ) from error
            if time.monotonic() - began >= seconds:
                waited = f", after waiting {seconds:.0f} s" if seconds else ""
                raise ConfigError(
                    f"run={folder} is in use by {holder}{waited}; stop it, or name another folder"
                ) from error
        if not warned:
            logger.warning("run=%s is in use by %s; waiting up to %.0f s for it to end", folder, holder, seconds)
            warned = True
        time.sleep(POLL_SECONDS)
