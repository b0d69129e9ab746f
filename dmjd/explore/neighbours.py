"""``dmjd neighbours``: a page of query images beside the images with the most similar features, and near duplicates."""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dmjd.config.fields import choice, number
from dmjd.errors import ConfigError, DataError
from dmjd.files import printable, replace_file
from dmjd.progress import track

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from dmjd.explore.embeddings import Embeddings

MOST_SEARCHED = 50_000
"""Images among which near duplicates are searched, at most: the similarities of all pairs are computed."""
MOST_PAIRS = 10_000
"""Near duplicates that are kept, at most: the most similar ones."""
_PER_BLOCK = 1 << 24  # similarities that are held at once: 64 MiB of float32


@dataclass
class NeighboursConfig:
    """A page of query images beside the images whose features have the highest cosine similarity to theirs.

    embeddings: Files of dmjd embed, or run folders (the newest file of each). The encoders of several files, which must
        hold the same images, are shown below each other.
    output: Folder of neighbours.html, neighbours.csv and duplicates.csv. Default: RUN/explore; for a file, its folder.
    split: Images that are searched and from which the queries are chosen.
    queries: Number of query images, evenly spaced over the classes and within each.
    query: Names of the query images, in place of evenly spaced ones. The end of a name suffices.
    neighbours: Neighbours of each query.
    duplicates: Cosine similarity from which on two images are listed as near duplicates. null: not searched.
    device: Device of the leave-one-out accuracy and of the search for near duplicates. auto: CUDA if available, else
        CPU.
    """

    embeddings: list[str]
    output: str | None = None
    split: str = choice("all", "train", "test")
    queries: int = number(20, least=1, most=1000)
    query: list[str] | None = None
    neighbours: int = number(8, least=1, most=100)
    duplicates: float | None = number(0.99, above=0, most=1)
    device: str = choice("auto", "cpu", "cuda")


class Found(NamedTuple):
    """Neighbours of Q queries, the nearest first. rows: int64 ``[Q, k]``, their rows in the features; similarities:
    float32 ``[Q, k]``, cosines."""

    rows: npt.NDArray[np.int64]
    similarities: npt.NDArray[np.float32]


class Pairs(NamedTuple):
    """Near duplicates, the most similar first, of equal ones those of the first rows. rows: int64 ``[P, 2]``, ascending
    in each pair; similarities: float32 ``[P]``; count: of all found, of which at most :data:`MOST_PAIRS` are kept."""

    rows: npt.NDArray[np.int64]
    similarities: npt.NDArray[np.float32]
    count: int


def nearest(features: npt.NDArray[np.float32], queries: Sequence[int], k: int) -> Found:
    """The ``k`` nearest rows of each query by cosine similarity, without the query itself; of equal ones those with the
    lowest row.

    Exact: all similarities are computed, in float64, and rounded to float32, so that equal features are equally
    similar. A row of zeros has similarity 0 to all.

    Args:
        features: ``[N, D]``.
        queries: rows of the features.
        k: less than N.
    """
    import numpy as np

    count, dim = features.shape
    rows, similarities = np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
    at_once, block = max(1, _PER_BLOCK // count), max(1, _PER_BLOCK // (2 * dim))
    for start in range(0, len(queries), at_once):
        part = np.asarray(queries[start : start + at_once])
        own = _unit(features[part])
        found = np.empty((len(part), count), np.float32)
        for first in range(0, count, block):
            found[:, first : first + block] = own @ _unit(features[first : first + block]).T
        found[np.arange(len(part)), part] = -np.inf
        for number_, row in enumerate(found, start):
            least = np.partition(row, count - k)[count - k]
            candidates = np.flatnonzero(row >= least)
            rows[number_] = candidates[np.argsort(-row[candidates], kind="stable")[:k]]
            similarities[number_] = row[rows[number_]]
    return Found(rows, np.minimum(similarities, 1))


def _unit(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Rows of length 1 in float64; rows of zeros stay."""
    import numpy as np

    values = rows.astype(np.float64)
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return values / np.where(lengths == 0, 1, lengths)


def near_duplicates(
    features: npt.NDArray[np.float32], least: float, device: torch.device, most: int = MOST_PAIRS
) -> Pairs:
    """All pairs of rows with a cosine similarity of at least ``least``, which is computed in float32 and rounded to six
    digits; at most the ``most`` most similar of them.

    Args:
        features: ``[N, D]``.
    """
    import numpy as np
    import torch
    import torch.nn.functional as F

    unit = F.normalize(torch.from_numpy(features).to(device), dim=1)
    rows, similarities, count = np.empty((0, 2), np.int64), np.empty(0, np.float32), 0
    height = max(1, _PER_BLOCK // len(unit))
    for first in track(range(0, len(unit), height), "blocks of similarities", -(-len(unit) // height)):
        block = (unit[first : first + height] @ unit[first:].T).triu(1).mul_(1e6).round_().div_(1e6)
        one, other = (block >= least).nonzero(as_tuple=True)
        count += len(one)
        found = torch.stack((one, other), dim=1).cpu().numpy() + first
        rows = np.concatenate((rows, found))
        similarities = np.concatenate((similarities, block[one, other].cpu().numpy()))
        if len(rows) > most or first + height >= len(unit):
            order = np.argsort(-similarities, kind="stable")[:most]  # rows are found in ascending order
            rows, similarities = rows[order], similarities[order]
    return Pairs(rows, np.minimum(similarities, 1), count)


def spaced_queries(labels: npt.NDArray[np.int64], count: int) -> list[int]:
    """Up to ``count`` rows, evenly spaced over the classes and within each, sorted by class. Images without a label
    (-1) are chosen only if no image has one."""
    import numpy as np

    present = np.unique(labels[labels >= 0])
    groups = [np.flatnonzero(labels == label) for label in present] or [np.arange(len(labels))]
    groups = [groups[place] for place in _middles(min(count, len(groups)), len(groups))]
    shares = np.full(len(groups), count // len(groups))
    shares[_middles(count % len(groups), len(groups))] += 1
    return [
        int(row)
        for group, share in zip(groups, shares, strict=True)
        for row in group[_middles(min(share, len(group)), len(group))]
    ]


def _middles(count: int, length: int) -> npt.NDArray[np.int64]:
    """The middles of ``count`` equal parts of ``range(length)``."""
    import numpy as np

    return (2 * np.arange(count) + 1) * length // max(2 * count, 1)


def named_queries(names: Sequence[str], asked: Iterable[str]) -> list[int]:
    """The rows whose name is, or ends in, each of ``asked``, or is the end of it.

    Raises:
        ConfigError: if there is none, with the closest name, or several.
    """
    rows = {name: row for row, name in reversed(list(enumerate(names)))}
    found = []
    for text in asked:
        ends = [name for name in rows if f"/{name}".endswith(f"/{text}") or f"/{text}".endswith(f"/{name}")]
        matching = [text] if text in rows else ends
        if not matching:
            near = difflib.get_close_matches(text, list(rows), n=1, cutoff=0.0)
            raise ConfigError(f"query={printable(text)} is no image of the file; the closest name is {near[0]}")
        if len(matching) > 1:
            some = ", ".join(matching[:3])
            raise ConfigError(f"query={printable(text)} is the end of {len(matching)} names ({some}); give more of it")
        found.append(rows[matching[0]])
    return found
