"""Small data sets held in memory: Fashion-MNIST (or MNIST) in IDX files, and scikit-learn's digits."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from dmjd.data.dataset import ArrayDataset, Pixels, Split
from dmjd.errors import DataError

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Folder of the package ``dataset-fashion-mnist`` of Debian and Ubuntu."""

_PREFIX = {"train": "train", "test": "t10k"}
_REMEDY = "download Fashion-MNIST's four files again, or leave data.root empty to find or fetch them"
_CLASSES = 10
_DIGITS_TEST_IMAGES = 360
_DIGITS_ENLARGE = 4


def find_idx(folder: Path, stem: str) -> Path | None:
    """The path ``folder/stem`` or ``folder/stem.gz``; None if neither exists."""
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def has_fashion_mnist(folder: Path) -> bool:
    """Whether ``folder`` has the four files."""
    return all(find_idx(folder, stem) for prefix in _PREFIX.values() for stem in _stems(prefix))


def _stems(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def decompressed(path: Path, most: int = -1) -> bytes:
    """Read a file, decompressed if its name ends in .gz; at most ``most`` bytes, -1 for all.

    Raises:
        DataError: if it cannot be read, or is not gzip although named .gz.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content: bytes = file.read(most)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); {_REMEDY}") from error
    return content


def read_idx(path: Path, ndim: int) -> Pixels:
    """Read the uint8 array of an IDX file: big-endian magic ``0x0800 | ndim``, ``ndim`` uint32 sizes, then the bytes.

    Raises:
        DataError: if the file is not gzip although named .gz, has another magic number, or another size than in its
            header.
    """
    content = decompressed(path)
    start = 4 * (1 + ndim)
    magic = int.from_bytes(content[:4], "big")
    if len(content) < start or magic != 0x0800 | ndim:
        raise DataError(f"{path} is not an IDX file of {ndim}-d bytes (it begins with {content[:4]!r}); {_REMEDY}")
    shape = struct.unpack(f">{ndim}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(f"{path} has {len(content) - start} bytes, but its header {math.prod(shape)}; {_REMEDY}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


class FashionMnist(ArrayDataset):
    """70 000 grey 28x28 images of clothes in 10 classes (Xiao et al., 2017), held in memory with a black border.

    Args:
        folder: folder of the IDX files, plain or .gz.
        split: "train" (60 000 images) or "test" (10 000).
        pad: border on each side in pixels; 2 gives 32x32, divisible by patches of 4 and 8.

    Raises:
        DataError: if a file is missing or damaged, or the numbers of images and labels differ.
    """

    def __init__(self, folder: Path, split: Split, pad: int = 2) -> None:
        images_path, labels_path = (_locate(folder, stem) for stem in _stems(_PREFIX[split]))
        images, labels = read_idx(images_path, ndim=3), read_idx(labels_path, ndim=1)
        if len(images) != len(labels):
            raise DataError(
                f"{images_path} has {len(images)} images but {labels_path} has {len(labels)} labels; {_REMEDY}"
            )
        if labels.size and labels.max() >= _CLASSES:
            raise DataError(f"{labels_path} has a label {labels.max()}, but the classes are 0 to 9; {_REMEDY}")
        bordered = np.pad(images, ((0, 0), (pad, pad), (pad, pad)))[..., None]
        super().__init__(bordered, labels, num_classes=_CLASSES, source=str(images_path))


def _locate(folder: Path, stem: str) -> Path:
    path = find_idx(folder, stem)
    if path is None:
        raise DataError(
            f"Fashion-MNIST: neither {stem} nor {stem}.gz is in {folder}; set data.root to the folder that has them, "
            f"or {_REMEDY}"
        )
    return path


class Digits(ArrayDataset):
    """scikit-learn's 1797 grey 8x8 digits in 10 classes, each pixel repeated 4x4 to give 32x32.

    There is no official split: the last 360 of a fixed permutation are "test", the other 1437 "train".

    Raises:
        DataError: if scikit-learn is not installed.
    """

    def __init__(self, split: Split) -> None:
        try:
            from sklearn.datasets import load_digits  # only this data set needs scikit-learn
        except ModuleNotFoundError as error:
            raise DataError("data.name=digits needs scikit-learn: pip install scikit-learn") from error
        pixels, labels = load_digits(return_X_y=True)
        # RandomState, not Generator: numpy guarantees that its stream never changes, so the split does not either.
        order = np.random.RandomState(0).permutation(len(labels))
        chosen = order[:-_DIGITS_TEST_IMAGES] if split == "train" else order[-_DIGITS_TEST_IMAGES:]
        grey = (pixels.reshape(-1, 8, 8)[chosen].astype(np.int64) * 255 + 8) // 16  # 0..16 -> 0..255, rounded
        images = grey.astype(np.uint8).repeat(_DIGITS_ENLARGE, axis=1).repeat(_DIGITS_ENLARGE, axis=2)[..., None]
        super().__init__(images, labels[chosen], num_classes=10, source=f"digits.{split}")
