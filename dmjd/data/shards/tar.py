"""The layout of webdataset tars: the members of a sample lie side by side and share a key, ``KEY.cls`` and ``KEY.jpg``.

Tars are written here with the standard library and not by webdataset's own writer, which does not tell at what offset
an image comes to lie; its reader takes them. Equal samples give equal bytes: no times, no owners, a fixed order.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from dmjd.errors import DataError
from dmjd.files import open_regular

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "avif", "jp2", "img", "image")

_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # webdataset's: up to the first dot after the last slash
_MOST_LABEL_BYTES = 64  # of a cls member; what is longer is no class number
_META = re.compile(r"__[^/]*__($|/)")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}

END_MARK = bytes(2 * tarfile.BLOCKSIZE)
"""What a whole tar ends in, but for more zeros."""


class TarSample(NamedTuple):
    """``offset`` and ``size`` of the image, -1 where a sample has none; ``label`` is the text of its cls member.

    ``left_out`` names members that look like images as well: links, and images behind the first.
    """

    key: str
    offset: int
    size: int
    label: bytes | None
    left_out: tuple[str, ...] = ()


def compression(head: bytes) -> str | None:
    """What a file that begins with these bytes is compressed with."""
    return next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)


class TarWriter:
    """Context manager that puts a whole tar at ``path``, or nothing.

    Args:
        path: of the tar.
        drafts: a folder of the same file system, where a killed process may leave a draft.

    Raises:
        OSError: if it cannot be written.
    """

    def __init__(self, path: Path, drafts: Path) -> None:
        self._path = path
        self._draft = drafts / f"{path.name}.{os.getpid()}.tmp"
        self._file = _HashingFile(self._draft)
        self._tar = tarfile.open(fileobj=cast(BinaryIO, self._file), mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115

    def __enter__(self) -> TarWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        try:
            with closing(self._file):
                if kind is None:
                    self._tar.close()
            if kind is None:
                self._draft.replace(self._path)
        finally:
            self._draft.unlink(missing_ok=True)

    def add(self, key: str, label: int, image: bytes, ending: str) -> int:
        """Append a sample, with a cls member unless ``label`` is -1; returns the offset of the image's bytes."""
        if label >= 0:
            self._add(f"{key}.cls", str(label).encode())
        return self._add(f"{key}.{ending}", image)

    @property
    def size(self) -> int:
        """Bytes of the file, once the block has ended."""
        return self._file.size

    @property
    def sha256(self) -> str:
        """Digest of the file, once the block has ended."""
        return self._file.digest.hexdigest()

    def _add(self, name: str, content: bytes) -> int:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o444
        offset = self._file.size + tarfile.BLOCKSIZE
        self._tar.addfile(member, io.BytesIO(content))
        return offset


class _HashingFile:
    """What tarfile needs of a file that it writes from front to back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, block: bytes) -> int:
        self.digest.update(block)
        self.size += len(block)
        return self._file.write(block)

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        """Once this returns, a machine that loses its power keeps the file."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def tar_samples(path: str) -> Iterator[TarSample]:
    """The samples of a tar in order, grouped as webdataset does.

    Raises:
        DataError: if it is compressed, no tar, or ends before its end mark, where webdataset would say nothing.
    """
    with open_regular(path) as file:
        packed = compression(file.read(6))
        if packed:
            raise DataError(
                f"{path} is compressed with {packed}, so no sample can be read by offset; unpack it to a .tar"
            )
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                yield from _group(_members(tar))
                end = tar.offset
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:  # of odd headers
            raise DataError(f"{path} is truncated, or is no tar ({error}); fetch it again") from error
        except OSError as error:  # also of an offset in a header that no file has
            raise DataError(f"{path} cannot be read, or is damaged ({error.strerror}); fetch it again") from error
        file.seek(end)
        if file.read(len(END_MARK)) != END_MARK:
            raise DataError(f"{path} is truncated or damaged at byte {end}: its end mark is missing; fetch it again")


def is_content(info: tarfile.TarInfo) -> bool:
    """Whether a member is a file that may belong to a sample."""
    return info.isreg() and not info.issparse() and not _META.match(info.name)


class _Member(NamedTuple):
    """``offset`` and ``size`` are -1 of a link, which has no content where it lies."""

    name: str
    offset: int
    size: int
    content: bytes  # of cls members only


def _members(tar: tarfile.TarFile) -> Iterator[_Member]:
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # it would keep every header
        if (info.islnk() or info.issym()) and not _META.match(info.name):
            yield _Member(info.name, -1, -1, b"")
        if not is_content(info):
            continue
        content = b""
        if info.name.lower().endswith(".cls") and (stream := tar.extractfile(info)):
            content = stream.read(_MOST_LABEL_BYTES)
        yield _Member(info.name, info.offset_data, info.size, content)


def _group(members: Iterator[_Member]) -> Iterator[TarSample]:
    sample: TarSample | None = None
    for member in members:
        match = _KEY.match(member.name)
        if match is None:
            continue
        key, ending = match[1], match[2].lower()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = TarSample(key, -1, -1, None)
        if ending == "cls":
            sample = sample._replace(label=member.content)
        elif ending.rpartition(".")[2] in IMAGE_ENDINGS:
            if sample.offset < 0 <= member.offset:
                sample = sample._replace(offset=member.offset, size=member.size)
            else:
                sample = sample._replace(left_out=(*sample.left_out, member.name))
    if sample is not None:
        yield sample
