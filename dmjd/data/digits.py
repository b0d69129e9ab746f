"""scikit-learn's handwritten digits: always there, and so easy that scores on them say little."""

from __future__ import annotations

import numpy as np

from dmjd.data.dataset import ArrayDataset, Split
from dmjd.errors import DataError

_TEST_IMAGES = 360
_ENLARGE = 4


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
        chosen = order[:-_TEST_IMAGES] if split == "train" else order[-_TEST_IMAGES:]
        grey = (pixels.reshape(-1, 8, 8)[chosen].astype(np.int64) * 255 + 8) // 16  # 0..16 -> 0..255, rounded
        images = grey.astype(np.uint8).repeat(_ENLARGE, axis=1).repeat(_ENLARGE, axis=2)[..., None]
        super().__init__(images, labels[chosen], num_classes=10, source=f"digits.{split}")
