"""Regular files alone: opening a named pipe waits for a writer, a device may do anything. Imports no torch."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import Counter
from typing import BinaryIO

FILE, FOLDER = "file", "folder"
LOOP = "link to a folder above it"

_KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}

_log = logging.getLogger("dmjd")


def kind_of(path: str | os.PathLike[str]) -> str:
    """:data:`FILE` or :data:`FOLDER`, links followed, or else what it is. Raises OSError if it cannot be looked at."""
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "device")
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "link to itself"
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            return "dangling link"
        raise


def kind_of_entry(entry: os.DirEntry[str]) -> str:
    """As :func:`kind_of`, without a look at the disk where the folder's listing tells."""
    if entry.is_file(follow_symlinks=False):
        return FILE
    return FOLDER if entry.is_dir(follow_symlinks=False) else kind_of(entry.path)


def only_files(paths: list[str], place: str) -> list[str]:
    """Those of ``paths`` that are regular files, or are not there; the others are counted in a line of the log."""
    kinds = {path: FILE if not os.path.lexists(path) else kind_of(path) for path in paths}
    log_skipped(place, Counter(kind for kind in kinds.values() if kind != FILE))
    return [path for path in paths if kinds[path] == FILE]


def log_skipped(place: str, skipped: Counter[str]) -> None:
    """A line that counts what was left out of ``place``, by kind; none if nothing was."""
    if skipped:
        kinds = [f"{count} {kind if count == 1 else _plural(kind)}" for kind, count in sorted(skipped.items())]
        _log.warning("%s: skipped %d: %s", place, skipped.total(), ", ".join(kinds))


def _plural(kind: str) -> str:
    first, *rest = kind.split(" ")
    if first in ("link", "socket", "device", "folder"):
        return " ".join([f"{first}s", *rest])
    return f"{kind}s"


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """``path`` open for reading. Never waits for a writer.

    Raises:
        OSError: as ``open`` does, and if it is no regular file.
    """
    return open(open_descriptor(path), "rb")


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """As :func:`open_regular`, a file descriptor."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = _KINDS.get(stat.S_IFMT(os.fstat(file).st_mode), "device")
    if kind != FILE:
        os.close(file)
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR)) if kind == FOLDER else OSError(errno.EINVAL, f"a {kind}")
    return file
