"""Hold images out of training by a hash of their paths. Imports no torch."""

from __future__ import annotations

import hashlib
import logging
import unicodedata
from collections.abc import Iterable, Sequence
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
        names = (unicodedata.normalize("NFC", f"{self.seed}/{path}").encode(errors="surrogateescape") for path in paths)
        return [int.from_bytes(hashlib.sha256(name).digest()[:8], "big") < limit for name in names]

    def require_both(self, sides: Sequence[bool], root: str) -> None:
        """Raise DataError if one side of the images in ``root`` is empty."""
        if len(set(sides)) < 2:
            raise DataError(
                f"val_percent={self.percent:.10g} holds out {sum(sides)} of the {len(sides)} images in {root}, and "
                "training and evaluation need at least one each; change val_percent or val_seed"
            )


def one_sided(labels: Iterable[int], sides: Iterable[bool], classes: Sequence[str]) -> list[str]:
    """Names of the ``classes`` whose images are all on one side."""
    both = set(zip(labels, sides, strict=True))
    return [name for number, name in enumerate(classes) if not {(number, False), (number, True)} <= both]


def report_one_sided(root: str, names: Sequence[str], classes: int) -> None:
    """Log the ``names`` of classes on one side of a split, of ``classes`` in all; nothing if there are none."""
    if names:
        shown = ", ".join(names[:_MOST_NAMED]) + ", ..." * (len(names) > _MOST_NAMED)
        _log.warning(
            "%s: %d of %d classes have no held-out or no training image (%s); raise val_percent or change val_seed",
            *(root, len(names), classes, shown),
        )
