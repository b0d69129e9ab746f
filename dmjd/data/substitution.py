"""Another image in the place of one that cannot be used, so that batches and epochs keep their size.

The substitute is a pure function of (seed, bad sample id) and of which images are bad: the same in every epoch, rank,
worker and launch. The place keeps the bad image's sample id, so its crop, flip and masks are drawn as ever and no draw
of another sample moves; pixels and label are the substitute's.
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
"""Candidates for one bad image. Where 1 % are bad, eight in a row are a matter of 1e-16."""


@dataclass(frozen=True)
class Substitution:
    """sample_id, bad: of the image that cannot be used; substitute: the name of the one in its place."""

    sample_id: int
    bad: BadImage
    substitute: str


View = TypeVar("View")


@dataclass(frozen=True)
class Sample(Generic[View]):
    """What a batch takes: what was made of the image, and its label, and whether they stand in for others."""

    view: View
    label: int
    substitution: Substitution | None


def read_sample(dataset: ImageDataset, index: int, seed: int, view: Callable[[OpenImage], View]) -> Sample[View]:
    """What ``view`` makes of image ``index``, or of its substitute.

    Raises:
        DataError: if the candidates are bad too.
    """
    try:
        return Sample(view(dataset.open(index)), dataset.label(index), None)
    except BadImage as error:
        bad = error.copy()
    for candidate in _candidates(index, len(dataset), seed):
        try:
            pixels = view(dataset.open(candidate))
        except BadImage:  # counted when its own turn comes
            continue
        return Sample(pixels, dataset.label(candidate), Substitution(index, bad, dataset.name(candidate)))
    raise DataError(f"{bad}, as no image drawn to take its place can be used either")


def _candidates(index: int, count: int, seed: int) -> Iterator[int]:
    """Indices other than ``index``, each uniform over the data set."""
    if count == 1:
        return
    ids, key = torch.tensor([index]), make_key(seed, 0)
    for attempt in range(ATTEMPTS):
        word = int(keyed_bits(ids, 1, key=key, domain=Domain.SUBSTITUTE, lane=attempt))
        other = word * (count - 1) >> 32
        yield other + (other >= index)
