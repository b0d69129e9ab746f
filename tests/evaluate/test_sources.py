from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dmjd.data.batch import Batch
from dmjd.errors import DataError
from dmjd.evaluate.features import Features
from dmjd.evaluate.sources import CachedFeatures, FeatureSource, RecomputedFeatures

FEATURES = Features(torch.arange(5000.0)[:, None], torch.arange(5000))


def one_epoch(source: FeatureSource, epoch: int) -> tuple[Tensor, Tensor]:
    values, labels = zip(*source.epoch_features(epoch), strict=True)
    return torch.cat(values), torch.cat(labels)


def test_every_epoch_holds_every_image_once_with_its_own_label() -> None:
    source = CachedFeatures(FEATURES, seed=7)
    values, labels = one_epoch(source, 3)
    assert len(source) == 5000
    assert torch.equal(labels.sort().values, FEATURES.labels)
    assert torch.equal(values[:, 0], labels.float())


def test_order_is_a_function_of_seed_and_epoch() -> None:
    orders = {(s, e): one_epoch(CachedFeatures(FEATURES, seed=s), e)[1] for s in (7, 8) for e in (0, 1)}
    source = CachedFeatures(FEATURES, seed=7)
    one_epoch(source, 0)
    assert torch.equal(one_epoch(source, 1)[1], orders[7, 1]), "an earlier epoch must leave no trace"
    distinct = list(orders.values())
    for i, order in enumerate(distinct):
        for other in distinct[i + 1 :]:
            # Two unrelated orders of n images agree in one position on average (Poisson); twelve is beyond 1e-9.
            assert int((order == other).sum()) < 12


def test_recomputed_features_are_encoded_anew_each_epoch() -> None:
    def epoch_batches(epoch: int) -> Iterator[Batch]:
        for ids in torch.arange(6).split(4):
            yield Batch(torch.full((len(ids), 2, 2, 3), epoch, dtype=torch.uint8), ids, ids % 2)

    def encode(batch: Batch, epoch: int) -> Tensor:
        return batch.images[:, 0, 0].float() + 10 * epoch

    source = RecomputedFeatures(epoch_batches, encode, images_per_epoch=6)
    values, labels = one_epoch(source, 2)
    assert len(source) == 6
    assert torch.equal(values, torch.full((6, 3), 22.0))
    assert torch.equal(labels, torch.tensor([0, 1, 0, 1, 0, 1]))


def test_recomputing_without_labels_is_refused() -> None:
    batch = Batch(torch.zeros(2, 2, 2, 3, dtype=torch.uint8), torch.arange(2), torch.tensor([0, -1]))
    source = RecomputedFeatures(lambda epoch: [batch], lambda batch, epoch: torch.zeros(2, 3), images_per_epoch=2)
    with pytest.raises(DataError, match="no labels"):
        one_epoch(source, 0)
