"""A cache of remote shards on a local disk, shared by the processes of a node; each shard is fetched once.

A file is named by the sha256 of its content, so splits, data sets and addresses cannot be confused. The name is not
trusted: the content is compared with it after the download or, for a file that was already there, before the first
read. A stamp beside the file records its identity then: inode, size, mtime and ctime, which no program can set. A stamp
is valid if this user owns it and nobody else can write to it. A file whose identity differs from its stamp is compared
again, and fetched again if it differs.

The process that downloads holds a lock on the draft. The lock ends with the process, and the next download removes the
draft of a killed one. Eviction removes the oldest shards, since shards are fetched in the order of their use.
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
from dmjd.data.shards.network import PATIENCE, Patience, download, retry
from dmjd.data.waiting import progress_mark
from dmjd.errors import DataError, TransientError

GIB = 1 << 30
LOCK_POLL_SECONDS = 0.05

_ENDING, _DRAFT, _STAMP = ".tar", ".part", ".stamp"

_MOST_LOSSES = 20  # of one shard in a row, before the folder is reported as unusable

_log = logging.getLogger("dmjd")


class ShardCache:
    """A folder of whole, verified shards.

    Args:
        folder: on a local disk; created if it does not exist.
        budget: bytes of finished shards; running downloads come on top.
        patience: retries of the network.
    """

    def __init__(self, folder: Path, budget: int, patience: Patience = PATIENCE) -> None:
        self._folder = folder
        self.budget = budget
        self._patience = patience
        self._checked: dict[str, str] = {}  # sha256 -> identity of the file that has it

    def read(self, url: str, shard: Shard, offset: int, size: int) -> bytes:
        """``size`` bytes of a shard, fetched if it is not cached; fewer where it ends before.

        The file is closed again, since an open file would keep its space after eviction.

        Raises:
            DataError: as :meth:`fetch` does.
            OSError: if the local disk cannot be read.
        """
        for _ in range(_MOST_LOSSES):
            try:
                with _opened(self._path(shard), os.O_RDONLY) as file:
                    if self._is_checked(shard, file):
                        data = read_part(file, offset, size)
                        if len(data) == size or offset + size > shard.bytes:
                            return data
            except FileNotFoundError:
                pass
            self.fetch(url, shard)  # another process may evict it at once
        raise DataError(
            f"{self._path(shard)} was removed or changed {_MOST_LOSSES} times before it could be read; raise "
            "data.cache_gib, or set data.cache to a folder that no other program writes to"
        )

    def fetch(self, url: str, shard: Shard, keep: Callable[[], Collection[Shard]] = tuple) -> None:
        """Make sure a verified shard is cached. Evicts others as needed, those in ``keep()`` last.

        Raises:
            DataError: if it cannot be fetched, or the folder cannot be written to.
        """
        path = self._path(shard)
        try:
            if self._is_here(shard):
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(path.with_suffix(_DRAFT)) as draft:
                if self._is_here(shard) or self._verify_found(shard):  # fetched by another process or run
                    return
                self._evict(shard.bytes, keep())
                fetch_shard(url, shard, draft, self._patience)
                with _opened(draft, os.O_RDONLY) as file:
                    os.fsync(file)  # else a power failure may keep the name and lose the bytes
                    draft.replace(path)  # renaming changes ctime, so the stamp comes after it
                    self._stamp(shard, file)
                self._evict(0, [shard, *keep()])  # counts the downloads of other processes as well
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
        """Whether this process or another one of this user has verified the content of the open file."""
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

    def recheck(self, shard: Shard) -> None:
        """Verify the content of a shard again before its next read."""
        self._checked.pop(shard.sha256, None)
        with suppress(OSError):
            self._stamp_path(shard).unlink()

    def _verify_found(self, shard: Shard) -> bool:
        """Verify the content of a file that was found in the folder; remove it if it differs from its name."""
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
        _log.warning(
            "%s has another sha256 than its name: a crash or another program changed it; it is fetched again", path
        )
        path.unlink(missing_ok=True)
        return False

    def _stamp(self, shard: Shard, file: int) -> None:
        self._checked[shard.sha256] = identity = _identity(file)
        path = self._stamp_path(shard)
        with suppress(OSError):  # without a stamp the content is verified again
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

    def _evict(self, needed: int, keep: Collection[Shard]) -> None:
        """Remove shards until ``needed`` bytes more fit the budget. A process that has one open can still read it."""
        for draft in self._folder.glob(f"*{_DRAFT}"):
            _sweep(draft)
        found, kept = [], {self._path(shard) for shard in keep}
        for path in self._folder.glob(f"*{_ENDING}"):
            with suppress(FileNotFoundError):  # another process may evict it first
                status = path.stat()
                found.append((path in kept, status.st_mtime_ns, path, status.st_size))
        excess = sum(size for *_, size in found) + needed - self.budget
        for _, _, path, size in sorted(found):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            for stamp in self._folder.glob(f"{path.stem}.*{_STAMP}"):
                with suppress(OSError):
                    stamp.unlink()
            excess -= size


def fetch_shard(url: str, shard: Shard, path: Path, patience: Patience) -> None:
    """Download the tar at ``url`` to ``path``, which is overwritten, and verify its size and sha256.

    Raises:
        DataError: if it does not exist or may not be read, every attempt failed, or the disk is full.
    """
    retry(url, lambda: _fetch_once(url, shard, path, patience), patience)


def _fetch_once(url: str, shard: Shard, path: Path, patience: Patience) -> None:
    try:
        download(url, path, patience, shard.bytes)
    except FileNotFoundError as error:
        raise DataError(f"{url} cannot be fetched: it does not exist") from error
    except OSError as error:
        raise DataError(
            f"{path.parent} has no space left for {url} ({error.strerror}); lower data.cache_gib or set data.cache"
        ) from error
    size = path.stat().st_size
    if size != shard.bytes:
        raise TransientError(f"received {size} bytes, not the {shard.bytes} of the manifest")
    with path.open("rb") as file:
        if sha256(file) != shard.sha256:
            raise TransientError("the download has another sha256 than in the manifest")


@contextmanager
def _locked(draft: Path) -> Iterator[Path]:
    """Lock ``draft`` against other processes and threads; remove it at the end of the block unless it was renamed.

    The draft of a killed process is reused.
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
    """Wait for the lock. Bytes that its holder writes meanwhile count as progress of this process's loader."""
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
    """Remove ``draft`` if it is not locked, so its process was killed."""
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
        file = os.open(
            path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666
        )  # O_NONBLOCK: do not wait for the writer of a named pipe
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
    """Inode, size and times: unique to the open file, and changed by every write."""
    status = os.fstat(file)
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _is_same(file: int, path: Path) -> bool:
    """Whether ``path`` is still the open file; the previous holder of the lock may have renamed it."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
