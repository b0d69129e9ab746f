"""Locations of the files of a shard set: paths, or URLs that fsspec opens (http, s3, gs, ...)."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from dmjd.data.shards.network import PATIENCE, download, retry
from dmjd.errors import DataError
from dmjd.files import open_regular

MOST_BYTES = 1 << 44
"""Limit of a tar: 16 TiB."""

_LONGEST = 4096
"""Limit of a path or a URL, in characters."""

_NETWORKS = ("http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss", "oci", "hdfs", "webhdfs")
"""URL protocols that every manifest may use. Other fsspec protocols open local files."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def is_remote(location: str) -> bool:
    """Whether ``location`` is a URL, not a path."""
    return "://" in location


def join(folder: str, name: str) -> str:
    """``folder/name``, or ``name`` if it is a URL or an absolute path."""
    return name if is_remote(name) or name.startswith("/") else f"{folder.rstrip('/') or '/'}/{name}"


def check_name(name: str, folder: str) -> None:
    """Check a ``name`` from an untrusted manifest in ``folder``.

    Allowed are the path of a file below the folder, a URL of :data:`_NETWORKS` or of the folder's own protocol, and,
    for a local folder, an absolute path or a file:// URL.

    Raises:
        ValueError: naming what is allowed.
    """
    if not _is_line(name):
        raise ValueError(f"a path or a URL of 1 to {_LONGEST} printable characters")
    if is_remote(name):
        own = folder.partition("://")[0] if is_remote(folder) else "file"
        if name.partition("://")[0] not in (*_NETWORKS, own) or "::" in name:
            raise ValueError(f"a path or a URL of {', '.join(_NETWORKS)}")
        return
    if name.startswith("/") and is_remote(folder):
        raise ValueError("relative to the manifest, which is remote")
    check_below(name.removeprefix("/"))


def check_below(name: object) -> str:
    """``name``, checked to stay below a folder that it is joined to, except for links.

    Raises:
        ValueError: naming what is allowed.
    """
    if not isinstance(name, str) or not _is_line(name):
        raise ValueError(f"a path of 1 to {_LONGEST} printable characters")
    if any(part in ("", ".", "..") or len(os.fsencode(part)) > 255 or "\\" in part for part in name.split("/")):
        raise ValueError("a path below the folder, without '.', '..', backslashes or a slash at an end")
    if name.startswith("-") or re.match("[A-Za-z]:", name):
        raise ValueError("a file name that begins with neither a dash nor a drive")
    return name


def is_plain(text: str) -> bool:
    """Whether ``text`` has no control characters and can be part of a file name."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return not _CONTROL.search(text)


def _is_line(name: str) -> bool:
    return 0 < len(name) <= _LONGEST and is_plain(name)


def open_binary(location: str) -> BinaryIO:
    """Open ``location`` for reading and seeking.

    Raises:
        OSError: as ``open`` does; FileNotFoundError if there is none.
        DataError: if fsspec lacks what the URL needs.
    """
    if not is_remote(location):
        return open_regular(location)
    import fsspec  # comes with torch

    try:
        return cast(BinaryIO, fsspec.open(location, "rb").open())
    except (ImportError, ValueError) as error:
        raise DataError(f"{location} cannot be opened: {error}") from error


@contextmanager
def local_copy(location: str) -> Iterator[Path]:
    """The path of a local file, or of a copy of a remote one, which is removed at the end of the block.

    Raises:
        FileNotFoundError: if the remote file does not exist.
        OSError: if the disk is full. DataError: if it may not be read, or every attempt failed.
    """
    if not is_remote(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy"
        retry(location, lambda: download(location, path, PATIENCE, MOST_BYTES), PATIENCE)
        yield path


def sha256(file: BinaryIO, limit: int = MOST_BYTES) -> str:
    """Hex SHA-256 of the rest of ``file``; reads at most ``limit`` bytes and one block."""
    digest, read = hashlib.sha256(), 0
    while read <= limit and (block := file.read(1 << 20)):
        digest.update(block)
        read += len(block)
    return digest.hexdigest()
