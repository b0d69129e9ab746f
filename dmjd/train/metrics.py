"""Means of step numbers over a logging window, and the JSON-lines log of a run."""

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
    """The number of loader processes that hides data loading, if every added one loads as fast as the present ones.

    Args:
        workers: the present number; 0 loads in the training process.
        seconds, waited: from :meth:`~dmjd.train.stopwatch.Stopwatch.lap`, of a lap that waited for data in many steps.
    """
    busy = max(seconds - waited, 1e-9)
    # `workers` load one batch per `seconds`; without waiting a step takes `busy`.
    return math.ceil(workers * seconds / busy) if workers else math.ceil(waited / busy)


_ORDER = ("loss", "mim", "vis", "grad_norm")
"""The first columns of a row; others follow in the task's order."""


class StepMeans:
    """Means over the steps since the last row of the log. Saved in checkpoints, so a resumed log has equal rows.

    Skipped steps are counted and are not part of the means.
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
        values = {**numbers.values, "grad_norm": numbers.grad_norm}
        for name in sorted(values, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER)):
            self.sums[name] = self.sums.get(name, 0.0) + values[name]

    def flush(self) -> dict[str, float]:
        """The means, and the number of skipped steps if there are any; empties the window."""
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
    """Append-only file of JSON lines; ``offset`` is its length in bytes. Opening truncates the file to ``offset``."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)  # unbuffered: after an error close() must not write again
        if self._file.tell() < offset:
            # truncate() to more bytes than the file has would append zero bytes.
            logger.warning("%s has lost rows since the checkpoint was written; new rows follow those left", path)
            offset = path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(offset)
        self.offset = offset

    def write(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row) + "\n").encode()
        try:
            written = self._file.write(line)
            if written != len(line):  # on a nearly full disk a write may be partial, without an error
                self._file.truncate(self.offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._unwritable(error) from error
        self.offset += len(line)

    def sync(self) -> None:
        """Flush to disk, before a checkpoint stores ``offset``: a crash must not remove rows before it.

        A file that was removed or replaced meanwhile, as editors do, is written again.
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
        return StorageError(
            f"cannot write {self._path}: {error.strerror}; fix the cause and run the same command to continue"
        )

    def close(self) -> None:
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
