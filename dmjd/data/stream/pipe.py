"""What a shell command writes, as a file that is read once."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import Any

_groups: set[int] = set()
"""Process groups of the commands that this process has started and not ended."""


def end_commands() -> None:
    """Kill what every :class:`Pipe` of this process has started, for one that is about to leave without closing any."""
    for group in tuple(_groups):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


class Pipe(io.RawIOBase):
    """The output of ``command``, which is killed with all that it has started when this is closed before its end.

    Args:
        command: for the shell, as webdataset's ``pipe:`` has it.
        stall: seconds without a byte after which it counts as dead.

    Reading raises TimeoutError for a dead one, and OSError at the end of one that ended with another exit code than 0:
    what it wrote is then not all.
    """

    def __init__(self, command: str, stall: float) -> None:
        self._stall = stall
        self._process = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        _groups.add(self._process.pid)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """See :meth:`io.RawIOBase.readinto`."""
        if not self._poll.poll(self._stall * 1000):
            raise TimeoutError(f"gave nothing for {self._stall:.0f} s")
        count = os.readv(self._output.fileno(), [buffer])
        if not count:
            self._check_exit()
        return count

    def _check_exit(self) -> None:
        try:
            code = self._process.wait(self._stall)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"did not end within {self._stall:.0f} s of its output's end") from error
        if code:
            raise OSError(f"ended with exit code {code}")

    def close(self) -> None:
        """See :meth:`io.IOBase.close`."""
        if self.closed:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._output.close()
        _groups.discard(self._process.pid)  # before it is waited for, when another may get its number
        self._process.wait()
        super().close()
