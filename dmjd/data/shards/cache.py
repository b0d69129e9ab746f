"""Shards from elsewhere on a disk of this node, each fetched once for all processes.

A file is named by the sha256 of its content, so splits, data sets and addresses cannot be confused, and a file that has
its name is whole. A draft is locked by who fetches it, and the lock goes with its process, so a killed one blocks
nobody, and its draft goes when somebody else fetches. What is evicted is the oldest: shards are fetched in the order in
which the plan comes to them.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dmjd.data.shards.index import Shard
from dmjd.data.shards.local import read_part
from dmjd.data.shards.network import PATIENCE, Patience
from dmjd.data.shards.remote import fetch
from dmjd.data.waiting import progress_mark
from dmjd.errors import DataError

GIB = 1 << 30
LOCK_POLL_SECONDS = 0.05

_ENDING, _DRAFT = ".tar", ".part"


class ShardCache:
    """A folder of whole shards.

    Args:
        folder: on a disk of this node; made if it is not there.
        budget: bytes that the shards may take, to which comes what is being fetched.
        patience: with the network.
    """

    def __init__(self, folder: Path, budget: int, patience: Patience = PATIENCE) -> None:
        self._folder = folder
        self.budget = budget
        self._patience = patience

    def read(self, url: str, shard: Shard, offset: int, size: int) -> bytes:
        """Bytes of a shard, fetched if it is not here; fewer where it ends before.

        The file is not kept open, or the space of an evicted one would not come back.

        Raises:
            DataError: as :meth:`fetch` does.
            OSError: if the disk of this node cannot be read.
        """
        while True:
            try:
                with _opened(self._path(shard), os.O_RDONLY) as file:
                    data = read_part(file, offset, size)
                    if len(data) == size or os.fstat(file).st_size == shard.bytes:
                        return data
                self._path(shard).unlink(missing_ok=True)  # somebody has cut it; what is here shall be whole
            except FileNotFoundError:
                self.fetch(url, shard)  # and somebody may evict it at once

    def fetch(self, url: str, shard: Shard, keep: Callable[[], Collection[Shard]] = tuple) -> None:
        """Have a shard here, evicting others, but none of those that ``keep`` then gives if others suffice.

        Raises:
            DataError: if it cannot be fetched, or the folder cannot be written to.
        """
        path = self._path(shard)
        if path.exists():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(_DRAFT)) as draft:
                if path.exists():  # somebody was faster
                    return
                self._evict(shard.bytes, keep())
                fetch(url, shard, draft, self._patience)
                with _opened(draft, os.O_RDONLY) as file:
                    os.fsync(file)  # else a node that loses power may keep the name without the bytes
                draft.replace(path)
                self._evict(0, [shard, *keep()])  # what others have fetched in the meantime counts as well
        except OSError as error:
            raise DataError(
                f"{self._folder} cannot be written to ({error.strerror or error}); set data.cache to a folder that can"
            ) from error

    def _path(self, shard: Shard) -> Path:
        return self._folder / f"{shard.sha256}{_ENDING}"

    def _evict(self, room: int, keep: Collection[Shard]) -> None:
        """Make room for so many bytes. Who reads an evicted file reads on."""
        for draft in self._folder.glob(f"*{_DRAFT}"):
            _sweep(draft)
        found, kept = [], {self._path(shard) for shard in keep}
        for path in self._folder.glob(f"*{_ENDING}"):
            with suppress(FileNotFoundError):  # another process evicts as well
                status = path.stat()
                found.append((path in kept, status.st_mtime_ns, path, status.st_size))
        excess = sum(size for *_, size in found) + room - self.budget
        for _, _, path, size in sorted(found):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


@contextmanager
def _locked(draft: Path) -> Iterator[Path]:
    """A draft that no other process, or thread, writes until the end of the block, where it goes if it is still there.

    One left by a killed process serves.
    """
    while True:
        with _opened(draft, os.O_WRONLY | os.O_CREAT) as file:
            _wait_for_lock(file)
            if not _is_same(file, draft):
                continue
            try:
                yield draft
                return
            finally:
                if _is_same(file, draft):
                    draft.unlink()


def _wait_for_lock(file: int) -> None:
    """The bytes that another process writes meanwhile are progress of this one's loader as well."""
    arrived, size = progress_mark(), -1
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if size != (size := os.fstat(file).st_size):
                arrived()
            time.sleep(LOCK_POLL_SECONDS)


def _sweep(draft: Path) -> None:
    """Remove what nobody is writing: who did was killed."""
    with suppress(FileNotFoundError, BlockingIOError), _opened(draft, os.O_WRONLY) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same(file, draft):
            draft.unlink()


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield file
    finally:
        os.close(file)


def _is_same(file: int, path: Path) -> bool:
    """Whether ``path`` still leads to the open file: who held the lock before may have renamed it."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
