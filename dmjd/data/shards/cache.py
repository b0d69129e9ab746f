"""Shards from elsewhere on a disk of this node, each fetched once for all processes.

A file is named by the sha256 of its content, so splits, data sets and addresses cannot be confused. A name proves
nothing: a file is read once its content was compared with the name, after the download or, for one that was found here,
before its first read. A stamp beside it records which file that was, by inode, size and times of change (ctime, which
no program sets). A stamp counts if it belongs to this user and nobody else can write to it; a file that is not the one
of the stamp is compared again, and fetched again where it differs.

The process that downloads a draft holds a lock on it. The lock ends with the process, and the next download removes the
draft of a killed one. Eviction takes the oldest shards: they are fetched in the order of the plan.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dmjd.data.shards.index import Shard
from dmjd.data.shards.local import read_part
from dmjd.data.shards.location import sha256
from dmjd.data.shards.network import PATIENCE, Patience
from dmjd.data.shards.remote import fetch
from dmjd.data.waiting import progress_mark
from dmjd.errors import DataError

GIB = 1 << 30
LOCK_POLL_SECONDS = 0.05

_ENDING, _DRAFT, _STAMP = ".tar", ".part", ".stamp"

_LOSSES = 20  # of one shard in a row, after which the folder counts as unusable

_log = logging.getLogger("dmjd")


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
        self._checked: dict[str, str] = {}  # sha256 -> identity of the file that has it

    def read(self, url: str, shard: Shard, offset: int, size: int) -> bytes:
        """Bytes of a shard, fetched if it is not here; fewer where it ends before.

        The file is not kept open, or the space of an evicted one would not come back.

        Raises:
            DataError: as :meth:`fetch` does.
            OSError: if the disk of this node cannot be read.
        """
        for _ in range(_LOSSES):
            try:
                with _opened(self._path(shard), os.O_RDONLY) as file:
                    if self._is_checked(shard, file):
                        data = read_part(file, offset, size)
                        if len(data) == size or offset + size > shard.bytes:
                            return data
            except FileNotFoundError:
                pass
            self.fetch(url, shard)  # and somebody may evict it at once
        raise DataError(
            f"{self._path(shard)} was removed or changed {_LOSSES} times before it could be read; raise "
            "data.cache_gib, or set data.cache to a folder that nobody else writes to"
        )

    def fetch(self, url: str, shard: Shard, keep: Callable[[], Collection[Shard]] = tuple) -> None:
        """Have a shard here, checked, evicting others, but none of those that ``keep`` then gives if others suffice.

        Raises:
            DataError: if it cannot be fetched, or the folder cannot be written to.
        """
        path = self._path(shard)
        try:
            if self._is_here(shard):
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(_DRAFT)) as draft:
                if self._is_here(shard) or self._admit(shard):  # somebody was faster, or an earlier run fetched it
                    return
                self._evict(shard.bytes, keep())
                fetch(url, shard, draft, self._patience)
                with _opened(draft, os.O_RDONLY) as file:
                    os.fsync(file)  # else a node that loses power may keep the name without the bytes
                    draft.replace(path)  # a change of name changes ctime, so the stamp comes after it
                    self._stamp(shard, file)
                self._evict(0, [shard, *keep()])  # what others have fetched in the meantime counts as well
        except OSError as error:
            raise DataError(
                f"{self._folder} cannot be written to ({error.strerror or error}); set data.cache to a folder that can"
            ) from error

    def _is_here(self, shard: Shard) -> bool:
        try:
            with _opened(self._path(shard), os.O_RDONLY) as file:
                return self._is_checked(shard, file)
        except FileNotFoundError:
            return False

    def _is_checked(self, shard: Shard, file: int) -> bool:
        """Whether the content of the open file was compared with its name, by this process or another of this user."""
        identity = _identity(file)
        if os.fstat(file).st_size != shard.bytes:
            return False
        if self._checked.get(shard.sha256) == identity:
            return True
        with suppress(OSError), _opened(self._stamp_path(shard), os.O_RDONLY | os.O_NOFOLLOW) as stamp:
            status = os.fstat(stamp)
            own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if own and os.read(stamp, 1024) == _stamp_of(shard, identity):
                self._checked[shard.sha256] = identity
                return True
        return False

    def distrust(self, shard: Shard) -> None:
        """Have the content of a shard compared again before its next read."""
        self._checked.pop(shard.sha256, None)
        with suppress(OSError):
            self._stamp_path(shard).unlink()

    def _admit(self, shard: Shard) -> bool:
        """Compare the content of a file that was found here with its name, and remove the file if it is another."""
        path = self._path(shard)
        try:
            with _opened(path, os.O_RDONLY) as file:
                before, whole, status = _identity(file), False, os.fstat(file)
                if stat.S_ISREG(status.st_mode) and status.st_size == shard.bytes:
                    os.fsync(file)
                    with os.fdopen(os.dup(file), "rb") as content:
                        whole = sha256(content, shard.bytes) == shard.sha256
                if whole and _identity(file) == before:
                    self._stamp(shard, file)
                    return True
        except FileNotFoundError:
            return False
        _log.warning("%s is not what its name says: a crash or another program changed it; it is fetched again", path)
        path.unlink(missing_ok=True)
        return False

    def _stamp(self, shard: Shard, file: int) -> None:
        self._checked[shard.sha256] = identity = _identity(file)
        path = self._stamp_path(shard)
        with suppress(OSError):  # without one the content is compared again
            path.unlink(missing_ok=True)
            stamp = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(stamp, _stamp_of(shard, identity))
            finally:
                os.close(stamp)

    def _stamp_path(self, shard: Shard) -> Path:
        return self._folder / f"{shard.sha256}.{os.geteuid()}{_STAMP}"

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
            for stamp in self._folder.glob(f"{path.stem}.*{_STAMP}"):
                with suppress(OSError):
                    stamp.unlink()
            excess -= size


@contextmanager
def _locked(draft: Path) -> Iterator[Path]:
    """A draft that no other process, or thread, writes until the end of the block, where it goes if it is still there.

    One left by a killed process serves.
    """
    while True:
        try:
            with _opened(draft, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as file:
                _wait_for_lock(file)
                if not _is_same(file, draft):
                    continue
                try:
                    yield draft
                    return
                finally:
                    if _is_same(file, draft):
                        draft.unlink()
        except _NotADraft:
            draft.unlink(missing_ok=True)


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
    lost = suppress(FileNotFoundError, BlockingIOError, _NotADraft)
    with lost, _opened(draft, os.O_WRONLY | os.O_NOFOLLOW) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same(file, draft):
            draft.unlink()


class _NotADraft(Exception):
    """A symbolic link or a named pipe in the place of a draft."""


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)  # a named pipe is not waited for
    except OSError as error:
        if flags & os.O_WRONLY and error.errno in (errno.ELOOP, errno.ENXIO):
            raise _NotADraft from error
        raise
    try:
        if flags & os.O_WRONLY and not stat.S_ISREG(os.fstat(file).st_mode):
            raise _NotADraft
        yield file
    finally:
        os.close(file)


def _stamp_of(shard: Shard, identity: str) -> bytes:
    return f"{shard.sha256} {identity}".encode()


def _identity(file: int) -> str:
    """Changes with every change of the open file, and no other file has it."""
    status = os.fstat(file)
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _is_same(file: int, path: Path) -> bool:
    """Whether ``path`` still leads to the open file: who held the lock before may have renamed it."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
