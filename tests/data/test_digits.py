from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from dmjd.data.digits import Digits


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
