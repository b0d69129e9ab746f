"""The output of a shell command as a file."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import Any

_groups: set[int] = set()
"""Process groups of the running commands of this process."""


def end_commands() -> None:
    """Kill the command of every open :class:`Pipe` of this process, which exits without closing them."""
    for group in tuple(_groups):
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


class Pipe(io.RawIOBase):
    """The output of ``command``; closing it before the end kills the command and its children.

    Args:
        command: shell command, as after webdataset's ``pipe:``.
        stall: seconds without a byte after which the command is considered dead.

    Reading raises TimeoutError for a dead command, and OSError at the end if the exit code is not 0, since the output
    may then be incomplete.
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
        if not self._poll.poll(self._stall * 1000):
            raise TimeoutError(f"no output for {self._stall:.0f} s")
        count = os.readv(self._output.fileno(), [buffer])
        if not count:
            self._check_exit()
        return count

    def _check_exit(self) -> None:
        try:
            code = self._process.wait(self._stall)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"did not exit within {self._stall:.0f} s after its output ended") from error
        if code:
            raise OSError(f"ended with exit code {code}")

    def close(self) -> None:
        if self.closed:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._output.close()
        _groups.discard(self._process.pid)  # before wait(), after which the number may be reused
        self._process.wait()
        super().close()
