"""Matching against detectron2's rule in plain loops; samples as pure functions of (seed, epoch, sample id)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_iou

from dmjd.models.dense.sampling import ANCHORS, PROPOSALS, Sample, best, match, sample
from dmjd.ops import Domain, make_key
from dmjd.ops.philox import keyed_bits
from tests.models.dense.test_boxes import random_boxes

KEY = make_key(3, 1)


def test_matches_are_detectron2s() -> None:
    candidates, boxes = random_boxes(200, 1), random_boxes(20, 2)
    candidates[50:60] = candidates[0]  # ties
    present = torch.ones(1, 20, dtype=torch.bool)
    present[0, [3, 11]] = False
    found = match(candidates.unsqueeze(0), boxes.unsqueeze(0), present)
    ious = box_iou(boxes, candidates)
    kept = present[0].nonzero().flatten().tolist()
    for place in range(200):
        column = [(ious[row, place].item(), -row) for row in kept]
        overlap, row = max(column)
        assert found.overlap[0, place] == overlap
        assert found.objects[0, place] == -row
        lowest = any(ious[row, place] == ious[row].max() for row in kept)
        assert found.closest[0, place] == lowest
    assert 5 < found.closest.sum() < 60


def test_without_objects_nothing_matches() -> None:
    found = match(random_boxes(9).unsqueeze(0), torch.zeros(1, 4, 4), torch.zeros(1, 4, dtype=torch.bool))
    assert (found.overlap == -1).all()
    assert not found.closest.any()


def test_an_object_that_overlaps_no_candidate_matches_none() -> None:
    far = torch.tensor([[[1000.0, 1000, 1010, 1010]]])
    assert not match(random_boxes(9).unsqueeze(0), far, torch.ones(1, 1, dtype=torch.bool)).closest.any()


def candidates(count: int, images: int = 1) -> tuple[Tensor, Tensor]:
    draws = torch.rand(images, count, generator=torch.Generator().manual_seed(0))
    return draws < 0.2, draws > 0.4


def drawn(positive: Tensor, negative: Tensor, ids: list[int], lane: int = ANCHORS, key: Tensor = KEY) -> Sample:
    return sample(positive, negative, 32, 8, sample_ids=torch.tensor(ids), key=key, lane=lane)


def test_a_sample_has_at_most_the_share_of_positive_candidates_and_is_filled_with_negative_ones() -> None:
    positive, negative = candidates(100, 3)
    positive[1] = False
    positive[1, [4, 70]] = True
    negative[1, [4, 70]] = False
    negative[2] = False
    negative[2, :5] = ~positive[2, :5]
    found = drawn(positive, negative, [1, 2, 3])
    assert found.positive.sum(1).tolist() == [8, 2, 8]
    assert found.used.sum(1).tolist() == [32, 32, 8 + int(negative[2].sum())]
    for row in range(3):
        index = found.places[row, found.used[row]]
        assert len(set(index.tolist())) == len(index)
        assert positive[row, found.places[row, found.positive[row]]].all()
        assert negative[row, found.places[row, found.used[row] & ~found.positive[row]]].all()
        assert found.positive[row].int().diff().max() <= 0  # positive ones first
    assert set(found.places[1, :2].tolist()) == {4, 70}


def test_a_sample_is_that_of_the_smallest_draws() -> None:
    positive, negative = candidates(100)
    bits = keyed_bits(torch.tensor([7]), 100, key=KEY, domain=Domain.MASK, lane=PROPOSALS)[0].tolist()
    found = drawn(positive, negative, [7], PROPOSALS)
    expected = []
    for chosen, count in ((positive[0], 8), (negative[0], 24)):
        places = chosen.nonzero().flatten().tolist()
        expected += sorted(places, key=lambda place: bits[place])[:count]
    assert found.places[0].tolist() == expected


def test_a_sample_depends_on_key_lane_and_id_and_not_on_the_batch_or_on_further_places() -> None:
    positive, negative = candidates(100, 4)
    together = drawn(positive, negative, [5, 6, 7, 8])
    for row, sample_id in enumerate((5, 6, 7, 8)):
        alone = drawn(positive[row : row + 1], negative[row : row + 1], [sample_id])
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))
    longer = F.pad(positive, (0, 40)), F.pad(negative, (0, 40))
    assert torch.equal(drawn(*longer, [5, 6, 7, 8]).places, together.places)
    others = [
        drawn(positive, negative, [9, 10, 11, 12]),
        drawn(positive, negative, [5, 6, 7, 8], PROPOSALS),
        drawn(positive, negative, [5, 6, 7, 8], key=make_key(3, 2)),
        drawn(positive, negative, [5, 6, 7, 8], key=make_key(4, 1)),
    ]
    assert all(not torch.equal(other.places, together.places) for other in others)


def test_every_candidate_is_drawn_equally_often() -> None:
    count, images = 20, 4000
    positive = torch.zeros(images, count, dtype=torch.bool)
    found = sample(positive, ~positive, 5, 1, sample_ids=torch.arange(images), key=KEY, lane=ANCHORS)
    counts = torch.bincount(found.places.flatten(), minlength=count).double()
    expected = images * 5 / count
    deviation = (counts - expected).abs() / (expected * (1 - 5 / count)) ** 0.5
    assert deviation.max() < 4


def test_fewer_candidates_than_places() -> None:
    positive = torch.tensor([[True, False, False]])
    found = drawn(positive, ~positive, [1])
    assert found.used.sum() == 3
    assert sorted(found.places[found.used].tolist()) == [0, 1, 2]
    assert found.places[found.positive].tolist() == [0]


def test_the_best_scores_are_those_of_a_stable_sort() -> None:
    scores = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).bfloat16().float().round(decimals=1)
    scores[0, 7], scores[0, 9], scores[1, 3] = torch.inf, -torch.inf, -0.0
    expected = scores.sort(dim=1, descending=True, stable=True).indices
    found = best(scores, 100)
    zeros = scores.gather(1, found) == 0  # the order of 0 and -0 is free
    assert torch.equal(scores.gather(1, found), scores.gather(1, expected[:, :100]))
    assert torch.equal(found[~zeros], expected[:, :100][~zeros])
    assert best(scores, 1000).shape == (3, 500)
