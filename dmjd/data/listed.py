"""The lists of a run's training and test images: the run keeps its images when files are added to the folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dmjd.data.folder import ImageFolder
from dmjd.files import read_file, replace_file

FILE = "images.u64"
"""The list in a run folder: the first 8 bytes of the SHA-256 of each image's path below its split, in order."""
TEST_FILE = "test_images.u64"
"""That of the test images of a fine-tuning."""

_MOST = 1 << 24


def write_list(dataset: ImageFolder, file: Path) -> None:
    """Write the list of ``dataset``, unless it has more images than can be read back. Raises OSError."""
    if len(dataset) <= _MOST:
        replace_file(file, _digests(dataset).tobytes())


def leave_out_added(dataset: ImageFolder, file: Path) -> int:
    """Leave out the images that are not in the list ``file``; returns their number. Without a list all are kept.

    Images that are in the list and not in the folder are found by :class:`~dmjd.data.identity.DataIdentity`.
    """
    if not file.is_file():
        return 0
    content = read_file(file)
    keep = np.isin(_digests(dataset), np.frombuffer(content[: len(content) // 8 * 8], dtype="<u8"))
    if not keep.any() or keep.all():
        return 0
    dataset.restrict(keep)
    return int((~keep).sum())


def _digests(dataset: ImageFolder) -> npt.NDArray[np.uint64]:
    joined = b"".join(hashlib.sha256(path).digest()[:8] for path in dataset.paths())
    return np.frombuffer(joined, dtype="<u8")
