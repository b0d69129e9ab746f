"""Read the images of a tar sequentially, grouped as in :mod:`dmjd.data.shards.tar`.

A tar that is cut between two members, or has a damaged header, looks complete to tarfile and webdataset, which raise
no error. A whole tar has its end mark, 1024 zeros, after the last member, and nothing but zeros after that.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, cast

from dmjd.data.shards.index import MOST_IMAGE_BYTES
from dmjd.data.shards.location import open_binary
from dmjd.data.shards.tar import END_MARK, IMAGE_ENDINGS, compression, group, images_of, is_content
from dmjd.data.stream.pipe import Pipe
from dmjd.data.waiting import progress_mark
from dmjd.errors import BadImage, DataError
from dmjd.redact import redact

PIPE = "pipe:"


class TarImage(NamedTuple):
    """An image. ``name``: location of the tar and key of the sample; ``data``: bytes of the image file."""

    name: str
    data: bytes


def tar_images(location: str, stall: float) -> Iterator[TarImage]:
    """The images of a tar in order.

    Args:
        location: a path, a URL that fsspec opens, or ``pipe:`` and a command that writes the tar.
        stall: seconds without a byte after which a command is considered dead.

    Raises:
        BadImage: for the tar (missing, unreadable, truncated), after the images before the damage were yielded.
        DataError: if fsspec lacks what the URL needs.
    """
    try:
        with _open(location, stall) as file:
            stream = _Stream(file)
            with tarfile.open(fileobj=cast(BinaryIO, stream), mode="r|") as tar:
                for key, found in group(_members(tar)):
                    for ending in images_of(found):
                        stem = ending.rpartition(".")[0]
                        name = f"{key}.{stem}" if stem else key
                        yield TarImage(f"{redact(location)}: {name}", found[ending][0])  # the first of equal names
                stream.finish(tar.offset)
    except DataError:
        raise
    except Exception as error:  # fsspec's protocols have no common base class
        raise BadImage(redact(location), *_describe(error)) from error


def _open(location: str, stall: float) -> BinaryIO:
    if location.startswith(PIPE):  # unbuffered, so that nothing before an error is lost
        return cast(BinaryIO, Pipe(location.removeprefix(PIPE), stall))
    return open_binary(location)


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Name and content of the members; without the content where it is no image."""
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # else tarfile keeps all headers in memory
        if not is_content(info):
            continue
        if info.size > MOST_IMAGE_BYTES:
            raise _Damage("unreadable", f"has a member of {info.size} bytes, more than {MOST_IMAGE_BYTES}")
        is_image = info.name.lower().rpartition(".")[2] in IMAGE_ENDINGS
        if file := tar.extractfile(info):
            yield info.name, file.read() if is_image else b""


class _Damage(Exception):
    def __init__(self, kind: str, fault: str) -> None:
        super().__init__(fault)
        self.kind = kind


class _Stream:
    """The file interface that tarfile needs, and the last bytes read: tarfile reads 10240 at a time, beyond the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._arrived = progress_mark()
        self._position = 0
        self._last = b""

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        self._arrived()
        packed = compression(block) if not self._position else None
        if packed:
            raise _Damage("unreadable", f"is compressed with {packed}, so its end cannot be verified; decompress it")
        self._position += len(block)
        self._last = (self._last + block)[-2 * tarfile.RECORDSIZE :]
        return block

    def finish(self, end: int) -> None:
        """Read the rest, so that a command can exit; it must be zeros from offset ``end`` on."""
        zeros = self._last[end - self._position :] if end < self._position else b""
        damaged = any(zeros)
        while block := self._file.read(1 << 16):
            damaged = damaged or any(block)
            zeros = (zeros + block)[: len(END_MARK)]
        if damaged:
            raise _Damage("unreadable", f"is damaged at byte {end}: data follows after its end mark")
        if len(zeros) < len(END_MARK):
            raise _Damage("truncated", f"ends at byte {end} without its end mark")


def _describe(error: Exception) -> tuple[str, str]:
    """Kind and fault of a :class:`BadImage`."""
    if isinstance(error, _Damage):
        return error.kind, str(error)
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, OSError):
        error = error.__cause__  # fsspec's, for a host that does not answer
    if isinstance(error, FileNotFoundError):
        return "missing", "does not exist"
    if isinstance(error, tarfile.TarError):
        return "truncated", f"is truncated or not a tar ({error})"
    strerror = error.strerror if isinstance(error, OSError) else None
    return "unreadable", f"cannot be read ({strerror or ' '.join(str(error).split()) or type(error).__name__})"
