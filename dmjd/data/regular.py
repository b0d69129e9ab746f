"""Kinds of files: entries of a listing that are not regular files are skipped and counted. Imports no torch."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Mapping

from dmjd.files import FILE, FOLDER, kind_of_mode

LOOP = "links to a folder above them"

_MOST_KINDS = 8  # in one line

_log = logging.getLogger("dmjd")


def kind_of(path: str | os.PathLike[str]) -> str:
    """:data:`FILE` or :data:`FOLDER`, links followed, or the plural of another kind. Raises OSError if stat fails."""
    try:
        kind = kind_of_mode(os.stat(path).st_mode)
        return kind if kind in (FILE, FOLDER) else f"{kind}s"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "links to themselves"
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            return "dangling links"
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


def counts(skipped: Mapping[str, int]) -> str:
    """Kinds and numbers of skipped entries, the most frequent first: ".txt files: 3, empty folders: 1"."""
    kinds = [f"{kind}: {count}" for kind, count in sorted(skipped.items(), key=lambda item: (-item[1], item[0]))]
    return ", ".join([*kinds[:_MOST_KINDS], *[f"{len(kinds) - _MOST_KINDS} more kind(s)"] * (len(kinds) > _MOST_KINDS)])


def log_skipped(place: str, skipped: Mapping[str, int]) -> None:
    """Log the number of entries of ``place`` that were skipped, by kind; nothing if there are none."""
    if skipped:
        total = sum(skipped.values())
        _log.info("%s: skipped %d %s (%s)", place, total, "entry" if total == 1 else "entries", counts(skipped))
