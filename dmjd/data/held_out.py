"""Hold images out of training by a hash of their paths. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from dmjd.errors import DataError

_MOST_NAMED = 5

_log = logging.getLogger("dmjd")


class HeldOut(NamedTuple):
    """A choice of about ``percent`` % of the images, in (0, 100), to hold out of training.

    The side of an image depends on its own path and the seed only: it stays the same when other images are added or
    removed, and when the data set is moved or copied to another machine.
    """

    percent: float
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.percent:.10g} % held out" + (f" with val_seed={self.seed}" if self.seed else "")

    def sides(self, paths: Iterable[str]) -> list[bool]:
        """Whether each image is held out; ``paths``: relative to the data set's root, with "/" between their parts.

        It is, if the first 8 bytes of the SHA-256 of "SEED/PATH", as a big-endian fraction of 2^64, are below the
        percentage. PATH is encoded as UTF-8 in Unicode form C: some systems store names in form D.
        """
        limit = ceil(Fraction(str(self.percent)) * (1 << 64) / 100)
        return [place < limit for place in self._places(paths)]

    def _places(self, paths: Iterable[str]) -> Iterator[int]:
        names = (unicodedata.normalize("NFC", f"{self.seed}/{path}").encode(errors="surrogateescape") for path in paths)
        return (int.from_bytes(hashlib.sha256(name).digest()[:8], "big") for name in names)

    def require_both(self, sides: Sequence[bool], paths: Iterable[str], root: str, section: str = "data.") -> None:
        """Raise DataError if one of the :meth:`sides` of ``paths`` in ``root`` is empty, with a percentage that holds
        out one image; ``section``: prefix of the keys' names."""
        if len(set(sides)) < 2:
            cure, places = "", sorted(self._places(paths))
            if len(places) > 1:
                between = 50 * (places[0] + places[1]) / (1 << 64)
                cure = f"set {section}val_percent={between:.6g} to hold out one, change {section}val_seed, or "
            raise DataError(
                f"{section}val_percent={self.percent:.10g} holds out {sum(sides)} of the {len(sides)} "
                f"image{'s' * (len(sides) > 1)} in {root}, and training and evaluation need at least one each; "
                f"{cure}set {section}val_percent=0 to train on all images"
            )


def one_sided(
    labels: Iterable[int], sides: Iterable[bool], classes: Sequence[str], section: str = "data."
) -> list[str]:
    """A sentence for each side of a split on which some of the ``classes`` have no image, with the cure; ``section``:
    as for :meth:`HeldOut.require_both`."""
    images = Counter(zip(labels, sides, strict=True))
    found = []
    for held_out, side, change in ((True, "held-out", "raise"), (False, "training", "lower")):
        lacking = [number for number in range(len(classes)) if not images[number, held_out]]
        if not lacking:
            continue
        names = ", ".join(classes[number] for number in lacking[:_MOST_NAMED]) + ", ..." * (len(lacking) > _MOST_NAMED)
        verb = "has" if len(lacking) == 1 else "have"
        sentence = f"{len(lacking)} of {len(classes)} classes {verb} no {side} image ({names})"
        if any(images[number, not held_out] > 1 for number in lacking):  # one image is on one side in every split
            sentence += f"; {change} {section}val_percent or change {section}val_seed"
        found.append(sentence)
    return found


def report_one_sided(root: str, sentences: Iterable[str]) -> None:
    """Log the sentences of :func:`one_sided` about the images in ``root``, a line each."""
    for sentence in sentences:
        _log.warning("%s: %s", root, sentence)
