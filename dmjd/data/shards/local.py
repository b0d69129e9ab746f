"""Samples of shards that lie on a disk, or a network disk: one ``pread`` each, from files that stay open."""

from __future__ import annotations

import errno
import os
import resource
from collections import OrderedDict

from dmjd.data.shards.index import ShardSet
from dmjd.data.shards.location import is_remote
from dmjd.errors import DataError
from dmjd.files import open_descriptor

_MOST_OPEN = 1024


class OpenFiles:
    """Reads parts of files by path, and keeps the files last read open.

    Processes may share them by fork, for ``pread`` moves no position; one that gets this by pickle opens its own.

    Args:
        capacity: files open at a time; by default 1024 or half of what the system allows, whichever is less.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity or min(_MOST_OPEN, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 1))
        self._files: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Bytes ``offset .. offset + size - 1``, or fewer where the file ends before. Raises OSError."""
        try:
            return read_part(self._open(path), offset, size)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        # A network disk says so when the file was replaced behind an open one; the new one has the path now.
        os.close(self._files.pop(path))
        return read_part(self._open(path), offset, size)

    def _open(self, path: str) -> int:
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        while len(self._files) >= self._capacity:
            os.close(self._files.popitem(last=False)[1])
        file = open_descriptor(path)
        self._files[path] = file
        return file

    def __getstate__(self) -> int:
        return self._capacity

    def __setstate__(self, capacity: int) -> None:
        self.__init__(capacity)  # type: ignore[misc]


def check_files(shards: ShardSet) -> None:
    """See that every tar on a disk is there and has its size.

    Raises:
        DataError: naming the first that has not.
    """
    for number, shard in enumerate(shards.manifest.shards):
        path = shards.location(number)
        if is_remote(path):
            continue
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}), though the manifest lists it") from error
        if size != shard.bytes:
            raise DataError(f"{path} has {size} bytes, and the manifest says {shard.bytes}; restore it")


def read_part(file: int, offset: int, size: int) -> bytes:
    """As :meth:`OpenFiles.read`, from a file descriptor."""
    data = os.pread(file, size, offset)
    if len(data) == size:
        return data
    parts = [data]  # a system may give less than it has
    while data and (size := size - len(data)):
        offset += len(data)
        data = os.pread(file, size, offset)
        parts.append(data)
    return b"".join(parts)
