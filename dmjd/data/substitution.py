"""Substitutes for images that cannot be used, so that batches and epochs keep their size.

The substitute is a pure function of (seed, bad sample id, set of bad images): the same in every epoch, rank, worker and
launch. The row keeps the sample id of the bad image, and with it the crop, flip and masks; pixels and label are the
substitute's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dmjd.data.dataset import ImageDataset, OpenImage
from dmjd.errors import BadImage, DataError
from dmjd.ops.philox import Domain, keyed_bits, make_key

ATTEMPTS = 8
"""Candidates per bad image. If 1 % are bad, all eight are bad with probability 1e-16."""


@dataclass(frozen=True)
class Substitution:
    """One substitution. sample_id, bad: of the image that cannot be used; substitute: name of its substitute."""

    sample_id: int
    bad: BadImage
    substitute: str


View = TypeVar("View")


@dataclass(frozen=True)
class Sample(Generic[View]):
    """View and label of one row of a batch; ``substitution`` if they are a substitute's."""

    view: View
    label: int
    substitution: Substitution | None


def read_sample(dataset: ImageDataset, index: int, seed: int, view: Callable[[OpenImage], View]) -> Sample[View]:
    """Apply ``view`` to image ``index``, or to its substitute.

    Raises:
        DataError: if all candidates are bad too.
    """
    try:
        return Sample(view(dataset.open(index)), dataset.label(index), None)
    except BadImage as error:
        bad = error.copy()
    for candidate in _candidates(index, len(dataset), seed):
        try:
            pixels = view(dataset.open(candidate))
        except BadImage:  # listed when its own row is read
            continue
        return Sample(pixels, dataset.label(candidate), Substitution(index, bad, dataset.name(candidate)))
    raise DataError(f"{bad}; no substitute can be used either")


def _candidates(index: int, count: int, seed: int) -> Iterator[int]:
    """Indices other than ``index``, each uniform over the data set."""
    if count == 1:
        return
    ids, key = torch.tensor([index]), make_key(seed, 0)
    for attempt in range(ATTEMPTS):
        word = int(keyed_bits(ids, 1, key=key, domain=Domain.SUBSTITUTE, lane=attempt))
        other = word * (count - 1) >> 32
        yield other + (other >= index)
