"""Averaging step numbers over a logging window, and the run's JSON-lines log."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dmjd.errors import StorageError
from dmjd.train.guard import StepNumbers

logger = logging.getLogger("dmjd")

T = TypeVar("T")


class Stopwatch:
    """Wall time of the run, restarts included, and how much of each lap went into waiting for data."""

    def __init__(self, elapsed: float = 0.0) -> None:
        self._begin = time.perf_counter() - elapsed
        self._lap = time.perf_counter()
        self._waited = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began, over all launches."""
        return time.perf_counter() - self._begin

    def lap(self) -> tuple[float, float]:
        """Seconds since the last lap, and those of them spent in :meth:`waiting`."""
        now = time.perf_counter()
        seconds, waited = now - self._lap, self._waited
        self._lap, self._waited = now, 0.0
        return seconds, waited

    def waiting(self, items: Iterable[T]) -> Iterator[T]:
        """``items``, counting the time that each takes to come."""
        iterator = iter(items)
        while True:
            begin = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - begin
            yield item


def workers_needed(workers: int, seconds: float, waited: float) -> int:
    """How many loader processes would hide the loading of data, if each added one is as fast as those there are.

    Args:
        workers: there were; 0 loads within the process that trains.
        seconds, waited: as :meth:`Stopwatch.lap` gives them, of a stretch that waited for data again and again.
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
        self._file = path.open("ab", buffering=0)  # nothing may stay behind to be written by close() after an error
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
            raise StorageError(f"cannot write {self._path}: {error.strerror}; checkpoints are intact") from error
        self.offset += len(line)

    def sync(self) -> None:
        """To disk, so that a checkpoint never knows of rows that a crash can take away."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self.sync()
        finally:
            self._file.close()
