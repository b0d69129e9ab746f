"""Names of files, and files that a reader never meets half written. Knows nothing but the standard library."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def at_home(path: str) -> str:
    """``path`` with the home that ``~`` or ``~USER`` at its front stands for; as it is where there is no such user.

    Shells do this to ``run=~/x`` or leave it, each by rules of its own, and none does it to ``data.root=~/x``.
    """
    return os.path.expanduser(path)


def standing_place(path: Path) -> Path:
    """``path``, or the nearest of its parents that exists: what lets it be made, or is in the way."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def obstacle(path: Path, *, folder: bool = False) -> str:
    """What ``path`` is instead of a regular file, or of a folder; empty if it is one or is absent. Follows links."""
    if not os.path.lexists(path) or (path.is_dir() if folder else path.is_file()):
        return ""
    if not path.exists():
        return "a link to nowhere"
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "a pipe, a socket or a device"


def read_file(path: Path) -> bytes:
    """The content of a regular file. Raises OSError for all else: whoever opens a named pipe waits for ever."""
    if what := obstacle(path):
        raise OSError(errno.EINVAL, f"it is {what}", str(path))
    return path.read_bytes()


def printable(name: str) -> str:
    """``name`` of a file for pages and pictures, which take no bytes that are not UTF-8: these as ``\\xff``."""
    return os.fsencode(name).decode(errors="backslashreplace")


def replace_file(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Put ``content`` at ``path``, whole or not at all; text is written as UTF-8, and a name of a file as it is.

    ``mode``: permissions, from the first byte on, less the umask's.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
