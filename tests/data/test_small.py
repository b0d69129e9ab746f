from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dmjd.data.small import Digits, FashionMnist, has_fashion_mnist, read_idx
from dmjd.errors import DataError

IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([9, 0, 4], dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    """The format as its authors describe it: two zero bytes, type 8 (uint8), dimensions, big-endian sizes, data."""
    return bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", n) for n in array.shape) + array.tobytes()


def write_split(folder: Path, prefix: str, images: np.ndarray = IMAGES, labels: np.ndarray = LABELS) -> None:
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(images))
    (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels)))


def test_plain_and_gzipped_files_hold_the_array(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(idx_bytes(IMAGES))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(idx_bytes(IMAGES), mtime=0))
    np.testing.assert_array_equal(read_idx(tmp_path / "plain", ndim=3), IMAGES)
    np.testing.assert_array_equal(read_idx(tmp_path / "packed.gz", ndim=3), IMAGES)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("labels", idx_bytes(LABELS), "is not an IDX file of 3-d bytes"),  # right format, other rank
        ("page", b"<html>moved</html>", "is not an IDX file of 3-d bytes"),
        ("empty", b"", "is not an IDX file of 3-d bytes"),
        ("no_sizes", idx_bytes(IMAGES)[:9], "is not an IDX file of 3-d bytes"),
        ("short", idx_bytes(IMAGES)[:-1], "has 59 bytes, but its header 60"),
        ("long", idx_bytes(IMAGES) + b"x", "has 61 bytes, but its header 60"),
        ("cut.gz", gzip.compress(idx_bytes(IMAGES), mtime=0)[:-12], "cannot be read"),
        ("plain.gz", idx_bytes(IMAGES), "cannot be read"),
        ("flipped.gz", gzip.compress(idx_bytes(IMAGES), mtime=0)[:-8] + b"\0" * 8, "cannot be read"),  # wrong checksum
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_idx(path, ndim=3)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


def test_fashion_mnist_has_a_black_border_and_its_labels(tmp_path: Path) -> None:
    write_split(tmp_path, "train")
    write_split(tmp_path, "t10k", IMAGES[:2], LABELS[:2])
    assert has_fashion_mnist(tmp_path)
    train, test = FashionMnist(tmp_path, "train", pad=2), FashionMnist(tmp_path, "test", pad=0)
    assert (len(train), len(test), train.channels, train.num_classes) == (3, 2, 1, 10)
    for index in range(3):
        image = train.image(index)
        assert image.dtype == np.uint8
        assert image.shape == (8, 9, 1)
        np.testing.assert_array_equal(image[2:-2, 2:-2, 0], IMAGES[index])
        assert image.sum(dtype=int) == IMAGES[index].sum(dtype=int)  # so the border is 0
    np.testing.assert_array_equal(test.image(1)[..., 0], IMAGES[1])
    assert [train.label(index) for index in range(3)] == LABELS.tolist()
    assert train.name(2) == f"{tmp_path / 'train-images-idx3-ubyte'}[2]"


def test_a_missing_split_says_where_it_looked_and_what_to_do(tmp_path: Path) -> None:
    write_split(tmp_path, "train")
    assert not has_fashion_mnist(tmp_path)
    with pytest.raises(DataError, match=r"neither t10k-images-idx3-ubyte nor .*\.gz is in .*; set data\.root"):
        FashionMnist(tmp_path, "test")


def test_counts_that_disagree_are_refused(tmp_path: Path) -> None:
    write_split(tmp_path, "train", labels=LABELS[:2])
    with pytest.raises(DataError, match=r"has 3 images but .* has 2 labels"):
        FashionMnist(tmp_path, "train")


def test_a_label_outside_the_classes_is_refused(tmp_path: Path) -> None:
    write_split(tmp_path, "train", labels=LABELS + np.uint8(1))
    with pytest.raises(DataError, match="has a label 10"):
        FashionMnist(tmp_path, "train")


def test_both_splits_together_are_scikit_learns_digits_once_each() -> None:
    splits = [Digits("train"), Digits("test")]
    assert [len(split) for split in splits] == [1437, 360]
    ours = []
    for split in splits:
        for index in range(len(split)):
            image = split.image(index)
            assert image.dtype == np.uint8
            assert image.shape == (32, 32, 1)
            blocks = image.reshape(8, 4, 8, 4)
            assert (blocks == blocks[:, :1, :, :1]).all()
            ours.append((*np.rint(blocks[:, 0, :, 0].ravel() * (16 / 255)).astype(int), split.label(index)))
    pixels, labels = load_digits(return_X_y=True)
    assert sorted(ours) == sorted((*row.astype(int), label) for row, label in zip(pixels, labels, strict=True))


def test_full_ink_is_white() -> None:
    assert max(Digits("test").image(index).max() for index in range(360)) == 255


def test_the_split_is_fixed_and_has_every_class() -> None:
    test = Digits("test")
    again = Digits("test")
    assert all(np.array_equal(test.image(index), again.image(index)) for index in range(360))
    counts = np.bincount([test.label(index) for index in range(360)], minlength=test.num_classes)
    assert counts.min() >= 20
