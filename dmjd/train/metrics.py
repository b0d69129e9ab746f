"""Averaging step numbers over a logging window, and the run's JSON-lines log."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from dmjd.errors import StorageError
from dmjd.files import replace_file
from dmjd.train.guard import StepNumbers

logger = logging.getLogger("dmjd")


def workers_needed(workers: int, seconds: float, waited: float) -> int:
    """How many loader processes would hide the loading of data, if each added one is as fast as those there are.

    Args:
        workers: there were; 0 loads within the process that trains.
        seconds, waited: as :meth:`~dmjd.train.stopwatch.Stopwatch.lap` gives them, of a stretch that waited for data
            again and again.
    """
    busy = max(seconds - waited, 1e-9)
    # So many processes keep pace with a step of `seconds`; without waiting a step takes `busy`.
    return math.ceil(workers * seconds / busy) if workers else math.ceil(waited / busy)


class Window:
    """Means over the steps since the last log line. Its state is in checkpoints, so a resumed log has equal rows.

    Steps that were skipped are counted, and are in no mean.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.steps = 0
        self.skipped = 0

    def add(self, numbers: StepNumbers) -> None:
        if not numbers.finite:
            self.skipped += 1
            return
        self.steps += 1
        for name in ("loss", "mim", "vis", "grad_norm", "m_corr", "m_pred"):
            value = getattr(numbers, name)
            if value is not None:
                self.sums[name] = self.sums.get(name, 0.0) + value

    def flush(self) -> dict[str, float]:
        """The means, and how many steps were skipped if any were; the window is empty afterwards."""
        means = {name: total / self.steps for name, total in self.sums.items()}
        if self.skipped:
            means["skipped"] = self.skipped
        self.__init__()  # type: ignore[misc]
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self.sums), "steps": self.steps, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self.steps, self.skipped = dict(state["sums"]), state["steps"], state["skipped"]


class RunLog:
    """Append-only JSON lines. ``offset`` is its length in bytes; opening at an offset drops what came after it."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)  # nothing may stay behind to be written by close() after an error
        if self._file.tell() < offset:
            # Truncating to more than there is would pad with zero bytes.
            logger.warning("%s has lost rows since the checkpoint was written; it goes on after those left", path)
            offset = path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(offset)
        self.offset = offset

    def write(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row) + "\n").encode()
        try:
            written = self._file.write(line)
            if written != len(line):  # a nearly full disk takes a part and says nothing
                self._file.truncate(self.offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._unwritable(error) from error
        self.offset += len(line)

    def sync(self) -> None:
        """To disk, so that a checkpoint never knows of rows that a crash can take away.

        Whoever removed the file meanwhile, or put another in its place as editors do, finds all rows there again.
        """
        if not (self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))):
            logger.warning("%s was removed or replaced while the run wrote it; its rows are put back", self._path)
            try:
                replace_file(self._path, os.pread(self._file.fileno(), self.offset, 0))
                self._file.close()
                self._file = self._path.open("a+b", buffering=0)
            except OSError as error:
                raise self._unwritable(error) from error
        os.fsync(self._file.fileno())

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write {self._path}: {error.strerror}; mend that, and the same command goes on")

    def close(self) -> None:
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
