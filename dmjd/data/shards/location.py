"""Where a file of a shard set is: a path, or a URL that fsspec opens (http, s3, gs, ...)."""

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
"""Of a tar: 16 TiB."""

_LONGEST = 4096
"""Characters of a path or a URL."""

_NETWORKS = ("http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oss", "oci", "hdfs", "webhdfs")
"""Protocols of URLs that a manifest may name wherever it is; fsspec has others that open files of this computer."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def is_remote(location: str) -> bool:
    """Whether it is a URL and not a path."""
    return "://" in location


def join(folder: str, name: str) -> str:
    """``name`` below ``folder``, or ``name`` itself where it is a URL or an absolute path."""
    return name if is_remote(name) or name.startswith("/") else f"{folder.rstrip('/') or '/'}/{name}"


def check_name(name: str, folder: str) -> None:
    """Require that ``name``, from a manifest in ``folder``, may be joined to it.

    It is the path of a file below the folder, or a URL of a network or of the folder's own protocol, or, where the
    folder is on a disk, an absolute path or a file:// URL.

    Raises:
        ValueError: saying what is allowed.
    """
    if not _is_line(name):
        raise ValueError(f"a path or a URL of 1 to {_LONGEST} printable characters")
    if is_remote(name):
        own = folder.partition("://")[0] if is_remote(folder) else "file"
        if name.partition("://")[0] not in (*_NETWORKS, own) or "::" in name:
            raise ValueError(f"a path or a URL of {', '.join(_NETWORKS)}")
        return
    if name.startswith("/") and is_remote(folder):
        raise ValueError("relative to the manifest, which is behind a URL")
    check_below(name.removeprefix("/"))


def check_below(name: object) -> str:
    """``name`` from a file, if joined to a folder it is below that folder, links aside.

    Raises:
        ValueError: saying what is allowed.
    """
    if not isinstance(name, str) or not _is_line(name):
        raise ValueError(f"a path of 1 to {_LONGEST} printable characters")
    if any(part in ("", ".", "..") or len(os.fsencode(part)) > 255 or "\\" in part for part in name.split("/")):
        raise ValueError("a path below the folder, without '.', '..', backslashes or a slash at an end")
    if name.startswith("-") or re.match("[A-Za-z]:", name):
        raise ValueError("a file name that begins with neither a dash nor a drive")
    return name


def is_plain(text: str) -> bool:
    """Whether it has no line breaks, escapes and the like, and can be part of a file name."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return not _CONTROL.search(text)


def _is_line(name: str) -> bool:
    return 0 < len(name) <= _LONGEST and is_plain(name)


def open_binary(location: str) -> BinaryIO:
    """The file, open for reading and seekable.

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
def local_copy(location: str, limit: int = MOST_BYTES) -> Iterator[Path]:
    """A path to the file, or to a copy, of at most ``limit`` bytes, that is removed at the end of the block.

    Raises:
        FileNotFoundError: if the server says that there is none.
        OSError: if the disk has no room for it. DataError: if it may not be read, or every attempt failed.
    """
    if not is_remote(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy"
        retry(location, lambda: download(location, path, PATIENCE, limit), PATIENCE)
        yield path


def sha256(file: BinaryIO, limit: int = MOST_BYTES) -> str:
    """Digest of what is left to read, or of its first bytes up to some more than ``limit``."""
    digest, read = hashlib.sha256(), 0
    while read <= limit and (block := file.read(1 << 20)):
        digest.update(block)
        read += len(block)
    return digest.hexdigest()
