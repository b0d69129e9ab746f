"""Read and write webdataset tars: the members of a sample are adjacent and share a key, ``KEY.cls`` and ``KEY.jpg``.

A key ends at the first dot of a file name, as in webdataset. Names with several dots, such as ``a.v0.jpg`` and
``a.v0.cls``, are also written with keys that end at the last dot: :func:`images_of` finds out which.

Tars are written with the standard library, since webdataset's writer does not return the offset of an image. Equal
samples give equal bytes: no times, no owners, a fixed order.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

from dmjd.config.data import ENDINGS
from dmjd.errors import DataError
from dmjd.files import open_regular

IMAGE_ENDINGS = (*(ending[1:] for ending in ENDINGS if ending != ".tga"), "img", "image")  # TGA has no signature

_KEY = re.compile(r"^((?:.*/|)[^./]+)[.]([^/]*)$")  # as in webdataset: up to the first dot after the last slash

LABEL = "cls"
"""Ending of a label."""

_MOST_LABEL_BYTES = 64  # of a cls member
_META = re.compile(r"__[^/]*__($|/)")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}

END_MARK = bytes(2 * tarfile.BLOCKSIZE)
"""End of a whole tar, before optional zero padding."""


class TarSample(NamedTuple):
    """A sample. ``offset`` and ``size`` of its image, -1 for none; ``label``: content of its cls member.

    ``left_out``: names of members of the key that are images and belong to no sample: links, and further images.
    """

    key: str
    offset: int
    size: int
    label: bytes | None
    left_out: tuple[str, ...] = ()


def compression(head: bytes) -> str | None:
    """The compression format of a file that begins with ``head``; None if it has none."""
    return next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)


class TarWriter:
    """Context manager that writes a whole tar to ``path``, or nothing.

    Args:
        path: path of the tar.
        drafts: a folder on the same file system for the unfinished tar, which a killed process leaves there.

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
        """Append a sample, with a cls member unless ``label`` is -1. Returns the offset of the image's bytes."""
        if label >= 0:
            self._add(f"{key}.cls", str(label).encode())
        return self._add(f"{key}.{ending}", image)

    @property
    def size(self) -> int:
        """Size of the file in bytes, after the block."""
        return self._file.size

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the file, after the block."""
        return self._file.digest.hexdigest()

    def _add(self, name: str, content: bytes) -> int:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o444
        offset = self._file.size + tarfile.BLOCKSIZE
        self._tar.addfile(member, io.BytesIO(content))
        return offset


class _HashingFile:
    """The file interface that tarfile needs for sequential writing, with a running SHA-256."""

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
        """Flush the file to the disk and close it."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def tar_samples(path: str) -> Iterator[TarSample]:
    """The samples of a tar in order, grouped as webdataset does.

    Raises:
        DataError: if it is compressed, not a tar, or has no end mark, which webdataset would not report.
    """
    with open_regular(path) as file:
        packed = compression(file.read(6))
        if packed:
            raise DataError(
                f"{path} is compressed with {packed}, so samples cannot be read by offset; unpack it to a .tar"
            )
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for key, found in group((member.name, member) for member in _members(tar)):
                    yield from _samples(key, found)
                end = tar.offset
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:  # of invalid headers
            raise DataError(f"{path} is truncated or not a tar ({error}); fetch it again") from error
        except OSError as error:  # also for an impossible offset in a header
            raise DataError(f"{path} cannot be read or is damaged ({error.strerror}); fetch it again") from error
        file.seek(end)
        if file.read(len(END_MARK)) != END_MARK:
            raise DataError(f"{path} is truncated or damaged at byte {end}: its end mark is missing; fetch it again")


def is_content(info: tarfile.TarInfo) -> bool:
    """Whether a member is a regular file that can belong to a sample."""
    return info.isreg() and not info.issparse() and not _META.match(info.name)


class _Member(NamedTuple):
    """A member of a tar. ``offset`` and ``size`` are -1 for a link."""

    name: str
    offset: int
    size: int
    content: bytes  # of cls members only


def _members(tar: tarfile.TarFile) -> Iterator[_Member]:
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # else tarfile keeps all headers in memory
        if (info.islnk() or info.issym()) and not _META.match(info.name):
            yield _Member(info.name, -1, -1, b"")
        if not is_content(info):
            continue
        content = b""
        if info.name.lower().endswith(".cls") and (stream := tar.extractfile(info)):
            content = stream.read(_MOST_LABEL_BYTES)
        yield _Member(info.name, info.offset_data, info.size, content)


Content = TypeVar("Content")


def group(members: Iterable[tuple[str, Content]]) -> Iterator[tuple[str, dict[str, list[Content]]]]:
    """The keys of adjacent (name, content) of members, and the contents of each key by ending, in order.

    An ending is what follows the key and its dot, in lower case: "jpg", "v0.jpg". Names without a dot are left out.
    """
    now, found = "", dict[str, list[Content]]()
    for name, content in members:
        match = _KEY.match(name)
        if match is None:
            continue
        if found and match[1] != now:
            yield now, found
            found = {}
        now = match[1]
        found.setdefault(match[2].lower(), []).append(content)
    if found:
        yield now, found


def images_of(endings: Iterable[str]) -> dict[str, str | None]:
    """The images among the ``endings`` of one key, each with the ending of its label; None for no label.

    Without a dot in an image's ending, the key is one sample: that image, and the first one if there are several. An
    image with a dot is a sample of its own if it has a label of its own (``v0.jpg`` and ``v0.cls``), or if no image
    of the key is without a dot; the label of the key itself (``cls``) is then that of all such images without one.
    """
    known = list(endings)
    images = [ending for ending in known if ending.rpartition(".")[2] in IMAGE_ENDINGS]
    whole = next((ending for ending in images if "." not in ending), None)
    found = {}
    for ending in images:
        stem = ending.rpartition(".")[0]
        own = f"{stem}.{LABEL}" if stem else LABEL
        if ending == whole or (stem and (own in known or whole is None)):
            found[ending] = next((label for label in (own, LABEL) if label in known), None)
    return found


def _samples(key: str, members: dict[str, list[_Member]]) -> Iterator[TarSample]:
    """The samples of one key; see :func:`images_of`."""
    files = {ending: [each for each in found if each.offset >= 0] for ending, found in members.items()}
    labels = images_of(ending for ending, found in files.items() if found)
    for ending, label in labels.items():
        stem = ending.rpartition(".")[0]
        image = files[ending][0]
        content = None if label is None else files[label][0].content
        yield TarSample(f"{key}.{stem}" if stem else key, image.offset, image.size, content)
    used = {files[ending][0] for ending in labels} | {files[label][0] for label in labels.values() if label}
    others = [each for found in members.values() for each in found if each not in used]
    images = tuple(each.name for each in others if each.name.lower().rpartition(".")[2] in IMAGE_ENDINGS)
    alone = [each for each in others if each.name.lower().endswith(f".{LABEL}")]
    if images:
        yield TarSample(key, -1, -1, None, images)
    for each in alone if labels else ():
        yield TarSample(each.name.rpartition(".")[0], -1, -1, each.content)
    if not labels and not images:
        yield TarSample(key, -1, -1, None)
