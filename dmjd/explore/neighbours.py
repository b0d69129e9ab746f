"""``dmjd neighbours``: a page of query images beside the images with the most similar features, and near duplicates."""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dmjd.config.fields import choice, number, path
from dmjd.errors import ConfigError, DataError
from dmjd.explore.registry import Tool
from dmjd.explore.tsne import shares
from dmjd.files import printable
from dmjd.progress import track

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from dmjd.explore.neighbours_page import Pictures, Section

MOST_SEARCHED = 50_000
"""Images among which near duplicates are searched, at most: the similarities of all pairs are computed."""
MOST_PAIRS = 10_000
"""Near duplicates that are kept, at most: the most similar ones."""
SAME = 1 - 1e-6
"""Cosine similarity from which on two images count as equal."""
ORIGIN = ("weights", "step", "pooling")
"""Settings of an encoder that the page states."""
MOST_NEIGHBOURS = 10_000
"""Neighbours of all queries by one encoder, at most."""
_NEIGHBOURS = 8
_PER_BLOCK = 1 << 24  # similarities that are held at once: 64 MiB of float32


@dataclass
class NeighboursConfig:
    """A page of query images, each beside the images with the highest cosine similarity of their features.

    embeddings: Files of dmjd embed, or run folders (the newest file of each). All encoders are shown, for the images
        that all files contain.
    output: Folder of neighbours.html, neighbours.csv and duplicates.csv. Default: RUN/explore; for a file, its folder.
    split: Images to search, from which the queries are chosen too.
    queries: Number of query images, evenly spaced over the classes and within each class.
    query: Names of the query images, in place of evenly spaced ones. The last part of a name is enough if it is unique.
    neighbours: Neighbours of each query. null: 8, or all other images if there are fewer.
    duplicates: Minimum cosine similarity of near duplicates, which are listed. null: no search.
    """

    embeddings: list[str] = path("???")
    output: str | None = path()
    split: str = choice("all", "train", "test")
    queries: int = number(20, least=1, most=1000)
    query: list[str] | None = None
    neighbours: int | None = number(None, least=1, most=100)
    duplicates: float | None = number(0.999, above=0, most=1)


class Found(NamedTuple):
    """Neighbours of Q queries, the nearest first. rows: int64 ``[Q, k]``, their rows in the features; similarities:
    float32 ``[Q, k]``, cosines."""

    rows: npt.NDArray[np.int64]
    similarities: npt.NDArray[np.float32]


class Pairs(NamedTuple):
    """Near duplicates, the most similar first, of equal ones those of the first rows. rows: int64 ``[P, 2]``, ascending
    in each pair; similarities: float32 ``[P]``; total: number of pairs, of which :data:`MOST_PAIRS` are kept."""

    rows: npt.NDArray[np.int64]
    similarities: npt.NDArray[np.float32]
    total: int


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
    of_each = shares([len(group) for group in groups], count)
    return [
        int(row) for group, share in zip(groups, of_each, strict=True) for row in group[_middles(share, len(group))]
    ]


def _middles(count: int, length: int) -> npt.NDArray[np.int64]:
    """The middles of ``count`` equal parts of ``range(length)``."""
    import numpy as np

    return (2 * np.arange(count) + 1) * length // (2 * count)


def named_queries(names: Sequence[str], asked: Iterable[str], which: str = "") -> list[int]:
    """The rows whose name is, or ends in, each of ``asked``, or is the end of it.

    Args:
        which: the images of the file that ``names`` are (" of split=test"), for the error.

    Raises:
        ConfigError: if there is none, with the closest name, or several.
    """
    rows = dict[str, int]()
    for row, name in enumerate(names):
        rows.setdefault(name, row)
    found = []
    for text in asked:
        ends = [name for name in rows if f"/{name}".endswith(f"/{text}") or f"/{text}".endswith(f"/{name}")]
        matching = [text] if text in rows else ends
        if not matching:
            near = difflib.get_close_matches(text, list(rows), n=1, cutoff=0.0)
            raise ConfigError(
                f"query={printable(text)} is not among the images{which} of the file; the closest name is {near[0]}"
            )
        if len(matching) > 1:
            some = ", ".join(matching[:3])
            raise ConfigError(f"query={printable(text)} is the end of {len(matching)} names ({some}); give more of it")
        found.append(rows[matching[0]])
    return found


def run(config: NeighboursConfig) -> Iterator[str]:
    """Search, write the page and the tables; yields the lines to print."""
    import numpy as np
    import torch

    from dmjd.explore.neighbours_page import Pictures, Section, page
    from dmjd.explore.sources import origin, output_folder, read_together, write_files

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    neighbours = config.neighbours or _NEIGHBOURS
    if config.queries * neighbours > MOST_NEIGHBOURS:
        raise ConfigError(
            f"queries={config.queries} times neighbours={neighbours} must be at most {MOST_NEIGHBOURS:,}, the limit of "
            "a page"
        )
    folder = output_folder(config.embeddings[0], config.output)
    found = read_together(config.embeddings)
    if found.thumbnails is None:
        raise DataError(
            f"{config.embeddings[0]} has no thumbnails, which the page shows; write it again with dmjd embed "
            "thumbnail=64"
        )
    kept = np.arange(len(found))
    if config.split != "all":
        kept = np.flatnonzero(np.asarray(found.splits) == config.split)
    which = "" if config.split == "all" else f" of split={config.split}"  # for errors
    if len(kept) < 2:
        number_of = "there is 1 image" if len(kept) else "there are 0 images"
        raise DataError(f"{number_of}{which}, and neighbours need at least 2; embed more images")
    if config.neighbours is None:
        neighbours = min(neighbours, len(kept) - 1)
    if neighbours >= len(kept):
        raise ConfigError(f"neighbours={neighbours} must be less than the number of images{which}, {len(kept)}")
    training = int((np.asarray(found.splits)[kept] == "train").sum())
    names, labels = [found.names[row] for row in kept], found.labels[kept]
    classes = [found.classes[label] if label >= 0 else "" for label in labels.tolist()]
    pictures = Pictures(names, [found.thumbnails[row] for row in kept], classes)
    queries = (
        spaced_queries(labels, config.queries) if config.query is None else named_queries(names, config.query, which)
    )
    sections, searched = [], config.duplicates is not None and len(kept) <= MOST_SEARCHED
    for name, every in found.features.items():
        features = every if len(kept) == len(found) else every[kept]
        pairs = near_duplicates(features, config.duplicates, device) if config.duplicates and searched else None
        sections.append(
            Section(
                name,
                ", ".join(filter(None, (f"{every.shape[1]} dimensions", origin(found, name, ORIGIN, 60)))),
                _score(features, labels, len(found.classes), device),
                nearest(features, queries, neighbours),
                pairs,
            )
        )
    notes = [_images_line(config, labels, training, len(queries), neighbours)]
    if config.duplicates is not None and not searched:
        notes.append(f"Near duplicates are not searched among more than {MOST_SEARCHED:,} images.")
    files = {
        "neighbours.html": page("Nearest neighbours", notes, pictures, queries, sections, config.duplicates),
        "neighbours.csv": _neighbours_csv(pictures, queries, sections),
        **({"duplicates.csv": _duplicates_csv(pictures, sections)} if searched else {}),
    }
    written = write_files(folder, files)
    yield from notes
    for section in sections:
        parts = [f"leave-one-out kNN top-1 {section.score}"]
        if section.pairs is not None:
            count = f"{section.pairs.total} pair{'s' * (section.pairs.total != 1)}"
            parts.append(f"{count} of images with a cosine of at least {config.duplicates:g}")
        yield f"{section.name}: {'; '.join(parts)}"
    yield from written


def _images_line(
    config: NeighboursConfig, labels: npt.NDArray[np.int64], training: int, queries: int, neighbours: int
) -> str:
    """The images, the number of training images among them, which a fine-tuned encoder has seen with their labels, and
    the queries."""
    present = len(set(labels[labels >= 0].tolist()))
    of = f" of {present} class{'es' * (present != 1)}" if present else " without labels"
    chosen = "named" if config.query is not None else "evenly spaced over the classes" if present else "evenly spaced"
    which = f" ({training:,} training, {len(labels) - training:,} test)"
    if config.split != "all":
        which = f" of the split {config.split}"
    return (
        f"{len(labels):,} images{of}{which}; {queries} quer{'y' if queries == 1 else 'ies'}, {chosen}, each with its "
        f"{neighbours} nearest neighbour{'s' * (neighbours != 1)} by cosine similarity."
    )


def _score(features: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], classes: int, device: torch.device) -> str:
    """The leave-one-out accuracy as text, or why there is none."""
    import torch

    from dmjd.evaluate.features import Features
    from dmjd.evaluate.knn import LEFT_OUT, leave_one_out

    known = labels >= 0
    if not known.any():
        return "- (no labels)"
    if len(set(labels[known].tolist())) < 2:
        return "- (one class)"
    bank = Features(torch.from_numpy(features if known.all() else features[known]), torch.from_numpy(labels[known]))
    result, k = leave_one_out(bank, classes, device)
    return f"{result.top1:.1f} % (k {k}, {min(len(bank), LEFT_OUT):,} images)"


def _neighbours_csv(pictures: Pictures, queries: Sequence[int], sections: Sequence[Section]) -> str:
    head = ["encoder", "query", "query_label", "rank", "name", "label", "similarity"]
    names, classes = pictures.names, pictures.classes
    return _csv(
        head,
        (
            [section.name, names[query], classes[query], rank, names[row], classes[row], f"{similarity:.6f}"]
            for section in sections
            for query, rows, similarities in zip(
                queries, section.found.rows.tolist(), section.found.similarities.tolist(), strict=True
            )
            for rank, (row, similarity) in enumerate(zip(rows, similarities, strict=True), 1)
        ),
    )


def _duplicates_csv(pictures: Pictures, sections: Sequence[Section]) -> str:
    names = pictures.names
    return _csv(
        ["encoder", "name", "other", "similarity"],
        (
            [section.name, names[one], names[other], f"{similarity:.6f}"]
            for section in sections
            if section.pairs is not None
            for (one, other), similarity in zip(
                section.pairs.rows.tolist(), section.pairs.similarities.tolist(), strict=True
            )
        ),
    )


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """RFC 4180."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


TOOL = Tool(
    "neighbours",
    "Write a page of nearest neighbours and near duplicates: dmjd neighbours RUN|FILE [RUN|FILE ...]",
    NeighboursConfig,
    run,
)
