"""File names, bounded reads, atomic writes and private folders."""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dmjd.errors import StorageError

FILE, FOLDER = "file", "folder"
_KINDS = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}

_log = logging.getLogger("dmjd")

_MAX_RECORD_BYTES = 1 << 28
_PRIVATE_NAMES = 100  # tried in order before a random one


def at_home(path: str) -> str:
    """``path`` with a leading ``~`` or ``~USER`` expanded; unchanged if there is no such user.

    Shells differ in whether they expand ``run=~/x``, and none expands ``data.root=~/x``.
    """
    return os.path.expanduser(path)


def standing_place(path: Path) -> Path:
    """``path``, or the nearest of its parents that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def kind_of_mode(mode: int) -> str:
    """:data:`FILE`, :data:`FOLDER`, or another kind of file, from ``st_mode``."""
    return _KINDS.get(stat.S_IFMT(mode), "device")


def obstacle(path: Path, *, folder: bool = False) -> str:
    """The kind of ``path`` if it is no regular file (or no folder); empty if it is one or is absent. Follows links."""
    if not os.path.lexists(path) or (path.is_dir() if folder else path.is_file()):
        return ""
    if not path.exists():
        return "a link to nowhere"
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "a pipe, a socket or a device"


def printable(name: str) -> str:
    """A file name for pages and pictures: bytes that are not UTF-8 as ``\\xff``."""
    return os.fsencode(name).decode(errors="backslashreplace")


def replace_file(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Write ``content`` to ``path`` atomically; text as UTF-8, with surrogate escapes of file names as their bytes.

    ``mode``: permissions from the first byte on, minus the umask.
    """
    with drafted(path) as draft, open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content.encode(errors="surrogateescape") if isinstance(content, str) else content)


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; the file there replaces ``path`` after the block, and is removed if that
    raises. An OSError names ``path``: that of a full disk names nothing."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        yield draft
        draft.replace(path)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(draft)) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading and return its descriptor; never waits for the writer of a pipe.

    Raises:
        OSError: as ``open``, and if it is no regular file.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    kind = kind_of_mode(os.fstat(file).st_mode)
    if kind == FILE:
        return file
    os.close(file)
    if kind == FOLDER:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, f"a {kind}", str(path))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Same as :func:`open_descriptor`, but returns a file object."""
    return open(open_descriptor(path), "rb")


def read_file(path: Path) -> bytes:
    """The content of a regular file. Raises OSError for anything else, and for more than 256 MiB."""
    try:
        return read_at_most(path, _MAX_RECORD_BYTES)
    except ValueError as error:
        raise OSError(errno.EFBIG, str(error), str(path)) from error


def read_at_most(path: str | Path, limit: int) -> bytes:
    """The bytes of the regular file ``path``.

    Raises:
        OSError: as :func:`open_regular`.
        ValueError: if it has more than ``limit`` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"it has {size} bytes, more than the limit of {limit}")
        return file.read(size)


def private_folder(name: str) -> Path:
    """The folder ``NAME-UID`` in TMPDIR with mode 0700, created if it does not exist.

    A folder that belongs to another user, that others can write to, or that is a symbolic link is not used. The next of
    ``NAME-UID-1``, ``NAME-UID-2``, ... takes its place, and a warning names both. All processes of a user on a node try
    the names in this order and so agree. A warning is logged if TMPDIR lacks the sticky bit and all users can write.

    Raises:
        StorageError: if no folder can be created in TMPDIR.
    """
    try:
        first = Path(tempfile.gettempdir()) / f"{name}-{os.geteuid()}"
        names = (first, *(first.with_name(f"{first.name}-{number}") for number in range(1, _PRIVATE_NAMES)))
        if first.parent.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            _log.warning("every user can rename files in %s; set its sticky bit, or another TMPDIR", first.parent)
        path = next((path for path in names if make_private(path) is None), None)
        path = path or Path(tempfile.mkdtemp(prefix=f"{first.name}-"))
    except OSError as error:
        raise StorageError(
            f"no folder can be created in TMPDIR ({error.strerror or error}); set TMPDIR to a writable folder"
        ) from error
    if path != first:
        _log.warning("%s is not used, since %s; remove it. %s is used instead", first, make_private(first), path)
    return path


def make_private(path: Path) -> str | None:
    """Make ``path`` a folder of this user alone; returns the reason if that is not possible."""
    with suppress(FileExistsError):
        path.mkdir(0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return "it is a symbolic link or a file" if error.errno in (errno.ELOOP, errno.ENOTDIR) else str(error.strerror)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            return f"it belongs to user {status.st_uid}"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "other users can write to it"
        os.fchmod(folder, 0o700)
        return None
    finally:
        os.close(folder)
