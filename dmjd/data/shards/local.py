"""Read samples of shards on a local or network disk: one ``pread`` each, from files that stay open."""

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
    """Reads parts of files by path, and keeps the most recently used files open.

    Forked processes share the files, since ``pread`` does not move the position; an unpickled copy opens its own.

    Args:
        capacity: open files; by default 1024 or half the process's limit, whichever is less.
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
        # A network disk returns ESTALE where an open file was replaced; open the new one.
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
    """Check that every local tar exists and has its size.

    Raises:
        DataError: naming the first that does not.
    """
    for number, shard in enumerate(shards.manifest.shards):
        path = shards.location(number)
        if is_remote(path):
            continue
        try:
            size = os.stat(path).st_size
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}), but is in the manifest; restore it") from error
        if size != shard.bytes:
            raise DataError(f"{path} has {size} bytes, not the {shard.bytes} of the manifest; restore it")


def read_part(file: int, offset: int, size: int) -> bytes:
    """As :meth:`OpenFiles.read`, from a file descriptor."""
    data = os.pread(file, size, offset)
    if len(data) == size:
        return data
    parts = [data]  # pread may return less than asked for
    while data and (size := size - len(data)):
        offset += len(data)
        data = os.pread(file, size, offset)
        parts.append(data)
    return b"".join(parts)
