"""Saving a run's checkpoints while it goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dmjd.errors import UserError
from dmjd.parallel.engine import Write
from dmjd.parallel.world import World
from dmjd.runs import checkpoint

logger = logging.getLogger("dmjd")


class Saved(NamedTuple):
    """A committed checkpoint, and what it took."""

    path: Path
    seconds: float


class Saver:
    """Commits one checkpoint at a time, on a thread of its own unless ``asynchronous`` is off.

    A save in flight is finished before the next begins, before anything is loaded and before the run ends. The thread
    talks to those of other ranks over a group of its own: in one that it shared with the training, the two would meet
    each other's messages. Collective, but for :meth:`failure` and :meth:`finished`.

    Args:
        folder: the run's checkpoint folder.
    """

    def __init__(
        self, folder: Path, world: World, *, keep: int, keep_every: int | None, asynchronous: bool = True
    ) -> None:
        self._folder, self._world, self._beside = folder, world, world.new_group()
        self._keep, self._keep_every = keep, keep_every
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._flight: Future[Saved] | None = None
        self._saved: Saved | None = None

    def save(self, step: int, stage: Callable[[Path], Write], files: Mapping[str, bytes], spare: int = 0) -> float:
        """Save the state after ``step`` steps; the seconds that it kept the training waiting.

        Args:
            stage: copies this rank's state and returns what will write it into the folder it is given.
            files: further content by name, which rank 0 writes.
            spare: how many earlier checkpoints to keep besides.

        Raises:
            StorageError: if this save cannot begin, or the one before failed.
        """
        begin = time.perf_counter()
        self.wait()
        draft = self._world.on_main(lambda: checkpoint.begin(self._folder, step))
        write = stage(draft)
        commit = partial(self._commit, draft, write, files if self._world.is_main else {}, self._keep + spare, begin)
        if self._thread is None:
            self._saved = commit()
        else:
            self._flight = self._thread.submit(commit)
        return time.perf_counter() - begin

    def _commit(self, draft: Path, write: Write, files: Mapping[str, bytes], keep: int, begin: float) -> Saved:
        def write_all() -> list[Path]:
            # First what ranks do together: the others would wait there for a rank 0 whose own files found no room.
            written = write()
            for name, content in files.items():
                (draft / name).write_bytes(content)
            return [*written, *(draft / name for name in files)]

        path = checkpoint.commit(draft, write_all, keep, self._keep_every, self._beside)
        return Saved(path, time.perf_counter() - begin)

    def failure(self) -> UserError | None:
        """What a save in flight has failed with, once. Ranks hear of it at different moments."""
        if self._flight is None or not self._flight.done():
            return None
        error = self._flight.exception()
        if isinstance(error, UserError):
            self._flight = None
            return error
        return None

    def finished(self) -> Saved | None:
        """The newest checkpoint since the last call, if one was committed."""
        if self._flight is not None and self._flight.done() and self._flight.exception() is None:
            self.wait()
        saved, self._saved = self._saved, None
        return saved

    def wait(self) -> None:
        """Until no save is in flight. Raises StorageError if it failed."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._saved = flight.result()

    def close(self, kind: object = None, ending: BaseException | None = None, trace: object = None) -> None:
        """Let a save in flight come to its end, even if the run does not.

        Its failure is then said in the log, unless it is what the run ends with: ``ending``, as an exit stack has it.
        """
        flight, self._flight = self._flight, None
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        error = flight.exception() if flight is not None else None
        if error is not None and self._world.is_main and str(error) != str(ending):
            logger.warning("%s", error)
