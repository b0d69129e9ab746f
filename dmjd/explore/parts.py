"""The parts of a file of embeddings, which are written while its images are encoded."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from dmjd.errors import ConfigError, DataError
from dmjd.explore.embeddings import Embeddings, read_embeddings, write_embeddings

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from dmjd.data.dataset import Split

Array: TypeAlias = "npt.NDArray[Any]"

PART_SECONDS = 30.0
PART_BYTES = 1 << 27
"""A part of the file is written once it took so long or is so large; this bounds the memory."""

logger = logging.getLogger("dmjd")


class View(NamedTuple):
    """How an encoder reads an image."""

    channels: int
    size: tuple[int, int]
    crop_pct: float


class Decoded(NamedTuple):
    """Images of one split. images: view -> uint8 ``[b, H, W, C]``; left_out: name -> reason."""

    split: Split
    ids: list[int]
    names: list[str]
    labels: list[int]
    images: dict[View, Tensor]
    thumbnails: list[bytes]
    left_out: dict[str, str]


class Pending:
    """Batches ``start .. stop - 1``, which are not written yet."""

    def __init__(self, start: int) -> None:
        self.start = self.stop = start
        self.batches: list[tuple[Decoded, dict[str, Array]]] = []
        self._began, self._bytes = time.monotonic(), 0

    def add(self, batch: Decoded, features: dict[str, Array]) -> None:
        self.batches.append((batch, features))
        self.stop += 1
        self._bytes += sum(map(len, batch.thumbnails)) + sum(values.nbytes for values in features.values())

    @property
    def due(self) -> bool:
        """Whether to write a part now; a part has at least one image."""
        full = self._bytes >= PART_BYTES or time.monotonic() - self._began >= PART_SECONDS
        return full and any(batch.ids for batch, _ in self.batches)


class Part(NamedTuple):
    """A file of the images of the batches before ``stop``. left_out: name -> reason, of images of these batches."""

    path: Path
    stop: int
    images: int
    left_out: dict[str, str]


class Parts:
    """The folder OUTPUT.parts, locked by this process while it is open; removed at the end, unless parts are left.

    Args:
        output: the file that the parts will make.
        classes: of the labels.
        dtype: of the features.
        identity: parts of another identity are removed.
    """

    def __init__(self, output: Path, classes: list[str], dtype: str, identity: str) -> None:
        self.folder = output.with_name(f"{output.name}.parts")
        self.done: list[Part] = []
        self._output, self._classes, self._dtype, self._identity = output, classes, dtype, identity

    def __enter__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / ".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigError(
                f"output={self._output}: another process writes it ({error.strerror}); wait for it, or name another "
                "file"
            ) from error
        os.register_at_fork(after_in_child=self._lock.close)  # loader workers may live longer than this process

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._lock.close()
        if kind is None or not self.done:
            for name in (".lock", *(part.path.name for part in self.done)):
                (self.folder / name).unlink()
            with suppress(OSError):  # it holds files of others
                self.folder.rmdir()

    def resume(self) -> int:
        """Find the parts of an earlier launch from the first batch on; returns the first batch without a part."""
        for draft in self.folder.glob(".part-*.tmp"):  # of a process that was killed
            draft.unlink()
        stop, others = 0, 0
        for file in sorted(self.folder.glob("part-*.npz")):
            part = self._read(file)
            if part is None or file.name != _part_name(stop):
                file.unlink()
                others += 1
            else:
                self.done.append(part)
                stop = part.stop
        if others:
            logger.info("%s: removed %d part(s) of other settings or damaged", self.folder, others)
        return stop

    def _read(self, path: Path) -> Part | None:
        try:
            found = read_embeddings(path)
            settings = found.settings
            if settings["identity"] != self._identity:
                return None
            return Part(path, int(settings["stop"]), len(found), dict(settings["left_out"]))
        except (DataError, KeyError, TypeError, ValueError):
            return None

    def write(self, pending: Pending) -> None:
        """Write a part; nothing if it would have no image."""
        import numpy as np

        batches = [batch for batch, _ in pending.batches if batch.ids]
        if not batches:
            return
        rows = [features for _, features in pending.batches if features]
        left_out = {name: why for batch, _ in pending.batches for name, why in batch.left_out.items()}
        part = Embeddings(
            names=[name for batch in batches for name in batch.names],
            ids=np.array([index for batch in batches for index in batch.ids]),
            splits=np.array([batch.split for batch in batches for _ in batch.ids]),
            labels=np.array([label for batch in batches for label in batch.labels]),
            classes=self._classes,
            features={name: np.concatenate([each[name] for each in rows]) for name in rows[0]},
            thumbnails=[each for batch in batches for each in batch.thumbnails] if batches[0].thumbnails[0] else None,
            settings={"identity": self._identity, "stop": pending.stop, "left_out": left_out},
        )
        path = self.folder / _part_name(pending.start)
        write_embeddings(path, part, self._dtype)
        self.done.append(Part(path, pending.stop, len(part), left_out))


def _part_name(start: int) -> str:
    return f"part-{start:08d}.npz"
