"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dmjd.errors import ConfigError, StorageError


class FolderGone(StorageError):
    """The run's folder was removed, and what stands in its place may be another run's."""


@contextmanager
def only_run_in(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold ``folder`` for this process; the kernel lets go of it however the process ends.

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
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigError(f"run={folder} is in use by {holder}; stop it, or name another folder") from error
        except OSError as error:
            raise StorageError(f"run={folder}: this file system cannot lock files ({error.strerror})") from error
        # A forked loader worker shares the lock and outlives a killed run by seconds.
        os.register_at_fork(after_in_child=file.close)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield check
