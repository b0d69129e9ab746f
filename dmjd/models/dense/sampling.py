"""Matching of anchors and proposals with objects, and the sample of them that a loss is computed on.

Samples are a pure function of (seed, epoch, sample id), independent of the batch. Shapes are fixed and nothing here
makes the host wait for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dmjd.models.dense.boxes import overlaps
from dmjd.ops import Domain
from dmjd.ops.philox import keyed_bits

ANCHORS = 1 << 20
PROPOSALS = ANCHORS + 1
"""Lanes of ``Domain.MASK``; masks of pre-training use a lane per view."""

_PLACES = 28  # bits of the index in a sort key, below 32 random bits
_OBJECTS = 8  # objects that are compared at a time with all anchors: 8 MiB for an image of 1024 px


class Match(NamedTuple):
    """For each candidate, ``[B, N]``.

    overlap: largest intersection over union with an object; -1 without objects.
    objects: index of that object, the first of equals.
    closest: whether it is the candidate that overlaps an object most, or one of several.
    """

    overlap: Tensor
    objects: Tensor
    closest: Tensor


def match(candidates: Tensor, boxes: Tensor, present: Tensor) -> Match:
    """Match boxes with objects.

    Args:
        candidates: ``[B, N, 4]`` or ``[1, N, 4]``.
        boxes: of objects, ``[B, M, 4]``. present: bool ``[B, M]``, false in the places without an object.
    """
    shape = boxes.shape[0], candidates.shape[1]
    best = torch.full(shape, -1.0, device=boxes.device)
    index = torch.zeros(shape, dtype=torch.int64, device=boxes.device)
    closest = torch.zeros(shape, dtype=torch.bool, device=boxes.device)
    for start in range(0, boxes.shape[1], _OBJECTS):
        part = slice(start, start + _OBJECTS)
        found = torch.where(present[:, part, None], overlaps(boxes[:, part], candidates), -1)
        overlap, object_index = found.max(dim=1)
        better = overlap > best
        best, index = torch.where(better, overlap, best), torch.where(better, object_index + start, index)
        most = found.amax(dim=2, keepdim=True)
        closest |= ((found == most) & (most > 0)).any(dim=1)
    return Match(best, index, closest)


class Sample(NamedTuple):
    """A sample of the candidates of each image, ``[B, count]``: positive ones first, then negative ones.

    places: index of the candidate; 0 if unused. positive, used: bool.
    """

    places: Tensor
    positive: Tensor
    used: Tensor


def sample(
    positive: Tensor, negative: Tensor, count: int, most: int, *, sample_ids: Tensor, key: Tensor, lane: int
) -> Sample:
    """Draw candidates without replacement: up to ``most`` positive ones, and negative ones up to ``count`` in total.

    Args:
        positive, negative: bool ``[B, N]``, disjoint.
        sample_ids, key, lane: as for :func:`~dmjd.ops.philox.keyed_bits`.
    """
    width = positive.shape[1]
    bits = keyed_bits(sample_ids, width, key=key, domain=Domain.MASK, lane=lane)
    # Keys are unique, so the smallest ones are the same on every device and in every batch.
    keys = (bits << _PLACES) + torch.arange(width, device=bits.device)
    first, chosen = _smallest(keys, positive, most)
    second, filling = _smallest(keys, negative, count)
    filling &= torch.arange(second.shape[1], device=bits.device) < count - chosen.sum(dim=1, keepdim=True)
    index, used = torch.cat((first, second), dim=1), torch.cat((chosen, filling), dim=1)
    order = torch.sort((~used).to(torch.uint8), dim=1, stable=True).indices[:, :count]
    used = used.gather(1, order)
    index = torch.where(used, index.gather(1, order), 0)
    places = torch.arange(index.shape[1], device=bits.device)
    return Sample(index, places < chosen.sum(dim=1, keepdim=True), used)


def _smallest(keys: Tensor, candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the candidates with the smallest keys, ascending, and whether there are as many."""
    count = min(count, keys.shape[1])
    values, index = torch.where(candidates, keys, _NEVER).topk(count, dim=1, largest=False, sorted=True)
    return index, values < _NEVER


_NEVER = torch.iinfo(torch.int64).max


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` highest scores of each row, descending; of equal ones the first: ``[B, N]`` float32 ->
    ``[B, min(count, N)]``. Scores of bfloat16 are often equal, and ``topk`` then depends on the device."""
    bits = scores.contiguous().view(torch.int32)
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # ordered as the scores
    keys = (ascending << _PLACES) - torch.arange(scores.shape[1], device=scores.device)
    return keys.topk(min(count, scores.shape[1]), dim=1, sorted=True).indices
