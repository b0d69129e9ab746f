"""What a linear probe trains on: features kept from one pass, or computed anew from augmented images each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from dmjd.data.batch import Batch
from dmjd.evaluate.features import Features, require_labels
from dmjd.ops.philox import Domain, keyed_bits, make_key

_CHUNK = 4096


class FeatureSource(Protocol):
    """Labelled features, epoch by epoch; how they are cut into chunks does not matter to the probe."""

    def __len__(self) -> int:
        """Images per epoch."""

    def epoch_features(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of (values float32 ``[n, D]``, labels int64 ``[n]``), in the order of this epoch."""


class CachedFeatures:
    """Features of one pass without augmentation, in a new order each epoch that depends on (seed, epoch) alone."""

    def __init__(self, features: Features, *, seed: int) -> None:
        self._features = features
        self._seed = seed

    def __len__(self) -> int:
        return len(self._features)

    def epoch_features(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image once, in the order of ``epoch``."""
        rows = torch.arange(len(self))
        bits = keyed_bits(rows, 2, key=make_key(self._seed, epoch), domain=Domain.ORDER)
        order = (bits[:, 0] << 31 | bits[:, 1] >> 1).argsort()  # 63 bits: no ties, even among a billion images
        for chunk in order.split(_CHUNK):
            yield self._features.values[chunk], self._features.labels[chunk]


class RecomputedFeatures:
    """Features of freshly augmented images, as the published recipes probe.

    Args:
        epoch_batches: epoch -> that epoch's batches, in an order of the loader's own.
        encode: (batch, epoch) -> float32 ``[B, D]``; flips, normalisation, pooling and the device are its business.
        images_per_epoch: how many images an epoch's batches hold together.
    """

    def __init__(
        self,
        epoch_batches: Callable[[int], Iterable[Batch]],
        encode: Callable[[Batch, int], Tensor],
        *,
        images_per_epoch: int,
    ) -> None:
        self._epoch_batches = epoch_batches
        self._encode = encode
        self._images_per_epoch = images_per_epoch

    def __len__(self) -> int:
        return self._images_per_epoch

    def epoch_features(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One chunk per batch. DataError if an image has no label."""
        for batch in self._epoch_batches(epoch):
            require_labels(batch.labels)
            yield self._encode(batch, epoch), batch.labels
