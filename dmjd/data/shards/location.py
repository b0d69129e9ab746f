"""Where a file of a shard set is: a path, or a URL that fsspec opens (http, s3, gs, ...)."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from dmjd.data.regular import open_regular
from dmjd.data.shards.network import PATIENCE, download, persist
from dmjd.errors import DataError


def is_remote(location: str) -> bool:
    """Whether it is a URL and not a path."""
    return "://" in location


def join(folder: str, name: str) -> str:
    """``name`` below ``folder``, or ``name`` itself where it is a URL or an absolute path."""
    return name if is_remote(name) or name.startswith("/") else f"{folder.rstrip('/') or '/'}/{name}"


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
def local_copy(location: str) -> Iterator[Path]:
    """A path to the file, or to a copy that goes with the end of the block.

    Raises:
        FileNotFoundError: if the server says that there is none.
        OSError: if the disk has no room for it. DataError: if it may not be read, or every attempt failed.
    """
    if not is_remote(location):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "copy"
        persist(location, lambda: download(location, path, PATIENCE), PATIENCE)
        yield path


def sha256(file: BinaryIO) -> str:
    """Digest of what is left to read."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
