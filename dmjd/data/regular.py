"""Kinds of files: entries of a listing that are not regular files are skipped and counted. Imports no torch."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter

from dmjd.files import FILE, FOLDER, kind_of_mode

LOOP = "link to a folder above it"

_log = logging.getLogger("dmjd")


def kind_of(path: str | os.PathLike[str]) -> str:
    """:data:`FILE` or :data:`FOLDER`, links followed, or the name of another kind. Raises OSError if stat fails."""
    try:
        return kind_of_mode(os.stat(path).st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "link to itself"
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            return "dangling link"
        raise


def kind_of_entry(entry: os.DirEntry[str]) -> str:
    """As :func:`kind_of`, without a stat call where the listing has the kind."""
    if entry.is_file(follow_symlinks=False):
        return FILE
    return FOLDER if entry.is_dir(follow_symlinks=False) else kind_of(entry.path)


def only_files(paths: list[str], place: str) -> list[str]:
    """The ``paths`` that are regular files or do not exist; the others are counted in a log line."""
    kinds = {path: FILE if not os.path.lexists(path) else kind_of(path) for path in paths}
    log_skipped(place, Counter(kind for kind in kinds.values() if kind != FILE))
    return [path for path in paths if kinds[path] == FILE]


def log_skipped(place: str, skipped: Counter[str]) -> None:
    """Log the number of entries of ``place`` that were skipped, by kind; nothing if there are none."""
    if skipped:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(skipped.items()))
        _log.warning("%s: skipped %d entries (%s)", place, skipped.total(), kinds)
