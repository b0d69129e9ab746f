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
"""Where Debian's and Ubuntu's package ``dataset-fashion-mnist`` puts the files."""

_PREFIX = {"train": "train", "test": "t10k"}
_REMEDY = "download Fashion-MNIST's four files again, or leave data.root empty to have them found or fetched"
_CLASSES = 10
_DIGITS_TEST_IMAGES = 360
_DIGITS_ENLARGE = 4


def find_idx(folder: Path, stem: str) -> Path | None:
    """``folder/stem`` or ``folder/stem.gz``, whichever is there."""
    return next((path for path in (folder / stem, folder / f"{stem}.gz") if path.is_file()), None)


def has_fashion_mnist(folder: Path) -> bool:
    """Whether ``folder`` holds the four files."""
    return all(find_idx(folder, stem) for prefix in _PREFIX.values() for stem in _stems(prefix))


def _stems(prefix: str) -> tuple[str, str]:
    return f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"


def decompressed(path: Path, most: int = -1) -> bytes:
    """The bytes of a file, of one named .gz those inside it; at most ``most`` of them, or all.

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
    """The uint8 array of an IDX file: big-endian magic ``0x0800 | ndim``, ``ndim`` uint32 sizes, then the bytes.

    Raises:
        DataError: if the file is not gzip although named .gz, has another magic number, or does not hold as many bytes
            as it says.
    """
    content = decompressed(path)
    start = 4 * (1 + ndim)
    magic = int.from_bytes(content[:4], "big")
    if len(content) < start or magic != 0x0800 | ndim:
        raise DataError(f"{path} is not an IDX file of {ndim}-d bytes (it begins with {content[:4]!r}); {_REMEDY}")
    shape = struct.unpack(f">{ndim}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(f"{path} holds {len(content) - start} bytes, but promises {math.prod(shape)}; {_REMEDY}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


class FashionMnist(ArrayDataset):
    """70 000 grey 28x28 pictures of clothes in 10 classes (Xiao et al., 2017), held in memory with a black border.

    Args:
        folder: the one with the IDX files, plain or .gz.
        split: the authors' 60 000 ("train") or 10 000 ("test").
        pad: pixels of border on each side; 2 makes 32x32, which patches of 4 and 8 divide.

    Raises:
        DataError: if a file is missing, damaged, or disagrees with its partner.
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
    """1797 grey 8x8 digits, each pixel repeated 4x4 to make 32x32, in 10 classes.

    There is no official split: the last 360 of one fixed permutation are "test", the other 1437 "train".

    Raises:
        DataError: if scikit-learn is not installed.
    """

    def __init__(self, split: Split) -> None:
        try:
            from sklearn.datasets import load_digits  # here, since no other data set needs scikit-learn
        except ModuleNotFoundError as error:
            raise DataError("data.name=digits needs scikit-learn: pip install scikit-learn") from error
        pixels, labels = load_digits(return_X_y=True)
        # RandomState and not Generator: numpy promises that its stream never changes, so neither does the split.
        order = np.random.RandomState(0).permutation(len(labels))
        chosen = order[:-_DIGITS_TEST_IMAGES] if split == "train" else order[-_DIGITS_TEST_IMAGES:]
        grey = (pixels.reshape(-1, 8, 8)[chosen].astype(np.int64) * 255 + 8) // 16  # 0..16 -> 0..255, rounded
        images = grey.astype(np.uint8).repeat(_DIGITS_ENLARGE, axis=1).repeat(_DIGITS_ENLARGE, axis=2)[..., None]
        super().__init__(images, labels[chosen], num_classes=10, source=f"digits.{split}")
