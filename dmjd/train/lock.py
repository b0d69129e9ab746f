"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dmjd.errors import ConfigError


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; the kernel lets go of it however the process ends.

    Raises:
        ConfigError: naming who holds it.
    """
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigError(f"run={folder} is in use by {holder}; stop it, or name another folder") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield
