"""Asynchronous saving of checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from dmjd.errors import UserError
from dmjd.parallel.engine import Write
from dmjd.parallel.world import World
from dmjd.runs import checkpoint
from dmjd.runs.best import Validated

logger = logging.getLogger("dmjd")


class Saver:
    """Saves one checkpoint at a time, on a thread unless ``asynchronous`` is false.

    A save in flight ends before the next one begins, before a checkpoint is loaded and before the run ends. The threads
    of the ranks communicate over a process group of their own, since the order of their collectives and of those of
    the training is not the same on every rank. Collective, except for :meth:`failure` and :meth:`finished`.

    Args:
        folder: the run's checkpoint folder.
    """

    def __init__(
        self, folder: Path, world: World, *, keep: int, keep_every: int | None, asynchronous: bool = True
    ) -> None:
        self._folder, self._world, self._beside = folder, world, world.new_group()
        self._keep, self._keep_every = keep, keep_every
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._flight: Future[float] | None = None
        self._saved: float | None = None

    def save(
        self,
        step: int,
        stage: Callable[[Path], Write],
        files: Mapping[str, bytes],
        spare: int = 0,
        best: Sequence[Validated] = (),
    ) -> float:
        """Save the state after ``step`` optimizer steps; returns the seconds that training waited.

        Args:
            stage: copies this rank's state and returns the function that writes it into the given folder.
            files: the content of further files by name, which rank 0 writes.
            spare: earlier checkpoints to keep in addition to ``keep``.
            best: the best validations until now, as for :func:`checkpoint.commit`.

        Raises:
            StorageError: if this save cannot begin, or the previous one failed.
        """
        begin = time.perf_counter()
        self.wait()
        draft = self._world.on_main(lambda: checkpoint.begin(self._folder, step))
        write = stage(draft)
        own, keep = files if self._world.is_main else {}, self._keep + spare
        commit = partial(self._commit, draft, write, own, keep, tuple(best), begin)
        if self._thread is None:
            self._saved = commit()
        else:
            self._flight = self._thread.submit(commit)
        return time.perf_counter() - begin

    def _commit(
        self,
        draft: Path,
        write: Write,
        files: Mapping[str, bytes],
        keep: int,
        best: Sequence[Validated],
        begin: float,
    ) -> float:
        def write_all() -> list[Path]:
            # The collective part first: other ranks would wait in it for rank 0 if the disk is full for its own files.
            written = write()
            for name, content in files.items():
                (draft / name).write_bytes(content)
            return [*written, *(draft / name for name in files)]

        checkpoint.commit(draft, write_all, keep, self._keep_every, self._beside, best)
        return time.perf_counter() - begin

    def failure(self) -> UserError | None:
        """The error of a failed save, once. The ranks get it at different steps."""
        if self._flight is None or not self._flight.done():
            return None
        error = self._flight.exception()
        if isinstance(error, UserError):
            self._flight = None
            return error
        return None

    def finished(self) -> float | None:
        """Seconds from :meth:`save` to the commit of the newest checkpoint, once; None if there is no new one."""
        if self._flight is not None and self._flight.done() and self._flight.exception() is None:
            self.wait()
        saved, self._saved = self._saved, None
        return saved

    def wait(self) -> None:
        """Wait for the save in flight, if any. Raises StorageError if it failed."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._saved = flight.result()

    def newest(self, until: float = math.inf) -> Path | None:
        """The newest complete checkpoint of at most ``until`` steps, on every rank; see :func:`checkpoint.newest`."""
        return self._world.on_main(lambda: checkpoint.newest(self._folder, until))

    def drop_after(self, step: int) -> None:
        """Remove the checkpoints of more than ``step`` steps; see :func:`checkpoint.drop_after`."""
        self._world.on_main(lambda: checkpoint.drop_after(self._folder, step))

    def close(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        """Wait for the save in flight; called as an ``__exit__``.

        If it failed, the failure is logged, unless it is ``error``, the exception that ends the run.
        """
        flight, self._flight = self._flight, None
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        failure = flight.exception() if flight is not None else None
        if failure is not None and self._world.is_main and str(failure) != str(error):
            logger.warning("%s", failure)
