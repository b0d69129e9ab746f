"""The list of the bad images of a run, and the limit of their number."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from dmjd.data.decode import TOO_SMALL
from dmjd.data.substitution import Substitution
from dmjd.errors import BadImage, DataError, StorageError
from dmjd.safe_load import parse_json

_log = logging.getLogger("dmjd")

_MOST_BYTES = 1 << 26  # of the list, read at once

_CURES = {
    TOO_SMALL: "lower data.image_size, remove small images, or set data.check=none to enlarge them",
    "missing": "restore the missing files",
    "mask": "correct the masks",
    "annotation": "correct the annotations",
}
"""By kind of the first bad image; other kinds are damaged files."""


def exceeds(count: int, total: int, percent: float) -> bool:
    """Whether ``count`` is more than ``percent`` % of ``total``, exactly: 69 is not more than 2.3 % of 3000."""
    return 100 * count > Fraction(str(percent)) * total


def check_share(bad: Sequence[BadImage], total: int, percent: float) -> None:
    """Raise DataError if the images that a check of all ``total`` found ``bad`` are more than ``percent`` % of them."""
    if not exceeds(len(bad), total, percent):
        return
    option = f", or raise data.max_bad_percent={percent:g}" if percent else ""
    damaged = [image for image in bad if image.kind != TOO_SMALL]
    first, *others = damaged or bad
    more = f", and {len(others)} more" if others else ""
    cure = _CURES.get(first.kind, "remove or replace the damaged files")
    raise DataError(f"{first.name} {first.fault}{more}; {cure}{option}")


class Quarantine:
    """Lists each bad image once in a JSON-lines file, and raises DataError above a percentage.

    A line has ``kind``, ``name``, ``fault`` (the reason, which continues the name), ``sample_id``, ``substitute`` (a
    name) and ``step`` (the first that read the image, counted from 1); the last two are null for images that the check
    at the start found. A tar of a stream also has
    ``images``, the number that it counts as. Images are identified by name; those listed by earlier launches count.

    The processes of a run share the file: each appends whole lines, and also counts the lines of the others.

    Args:
        path: path of the list, created with the first bad image in an existing folder.
        dataset_size: number of images.
        max_bad_percent: percentage of them that may be bad, in [0, 100]; 0 raises at the first.

    Raises:
        DataError: if the list already has too many.

    :meth:`admit` and :meth:`add` also raise StorageError if the list cannot be written.
    """

    def __init__(self, path: Path, dataset_size: int, max_bad_percent: float) -> None:
        self._path = path
        self._dataset_size = dataset_size
        self._max_bad_percent = max_bad_percent
        self._kinds: dict[str, str] = {}  # by name, in the order of the list
        self._images: dict[str, int] = {}
        self._faults: dict[str, str] = {}  # lists of earlier versions have none
        self._read = 0  # bytes read, in whole lines
        self._torn = False  # the last line is incomplete: its process was killed
        self._read_new()
        self._check_limit()

    @property
    def counts(self) -> Counter[str]:
        """Number of bad images by kind."""
        counts = Counter[str]()
        for name, kind in self._kinds.items():
            counts[kind] += self._images[name]
        return counts

    def admit(self, bad: Mapping[int, BadImage]) -> None:
        """Add :attr:`dmjd.data.dataset.ImageDataset.bad`. Called by one process of a run.

        Raises:
            DataError: if there are now too many.
        """
        new = self._append((_row(image, sample_id, None, None), image) for sample_id, image in bad.items())
        if new:
            _log.warning(
                "the check at the start found %d bad image(s), the first: %s; see %s", len(new), new[0], self._path
            )
        self._check_limit()

    def add(self, step: int, substitutions: Iterable[Substitution]) -> None:
        """Add the bad images of a batch; ``step`` counts from 0.

        Raises:
            DataError: if there are now too many.
        """
        rows = {item: _row(item.bad, item.sample_id, item.substitute, step + 1) for item in substitutions}
        new = [item for item, row in rows.items() if self._append([(row, item.bad)])]
        self._check_limit()
        for item in new:
            _log.warning("step %d: %s; substituted by %s", step + 1, item.bad, item.substitute)

    def _append(self, rows: Iterable[tuple[dict[str, Any], BadImage]]) -> list[BadImage]:
        """Append the images that are not listed yet, and return them."""
        new = [(row, bad) for row, bad in rows if bad.name not in self._kinds]
        if new:
            self._read_new()
            new = [(row, bad) for row, bad in new if bad.name not in self._kinds]
        if not new:
            return []
        lines = "".join(json.dumps(row) + "\n" for row, _ in new)
        try:
            with self._path.open("ab") as file:
                file.write(("\n" + lines if self._torn else lines).encode())
        except OSError as error:
            raise StorageError(
                f"cannot write {self._path}: {error.strerror}; repair the disk, and the same command continues"
            ) from error
        self._torn = False
        for _, bad in new:
            self._count(bad.name, bad.kind, bad.images, bad.fault)
        return [bad for _, bad in new]

    def _read_new(self) -> None:
        """Read the lines appended since the last call."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, rest = file.read(_MOST_BYTES).rpartition(b"\n")
        self._read += len(whole) + len(newline)
        self._torn = bool(rest)
        for line in whole.splitlines():
            try:
                row = parse_json(line)
                name, kind, images, fault = row["name"], row["kind"], row.get("images", 1), row.get("fault", "")
                if isinstance(name, str) and isinstance(kind, str) and type(images) is int and 0 < images < 1 << 53:
                    self._count(name, kind, images, fault if isinstance(fault, str) else "")
            except (ValueError, TypeError, KeyError):
                continue  # an incomplete line; its image is listed again when it is read again

    def _count(self, name: str, kind: str, images: int, fault: str) -> None:
        self._kinds.setdefault(name, kind)
        self._images.setdefault(name, images)
        self._faults.setdefault(name, fault)

    def _check_limit(self) -> None:
        count = sum(self._images.values())
        if not exceeds(count, self._dataset_size, self._max_bad_percent):
            return
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.counts.most_common())
        first, fault = next(iter(self._faults.items()))
        raise DataError(
            f"{count} of {self._dataset_size} images are bad ({kinds}), more than "
            f"data.max_bad_percent={self._max_bad_percent:g} allows, the first of them {f'{first} {fault}'.rstrip()}; "
            f"repair what {self._path} lists and delete that list, or raise data.max_bad_percent"
        )


def _row(bad: BadImage, sample_id: int, substitute: str | None, step: int | None) -> dict[str, Any]:
    row = {
        "kind": bad.kind,
        "name": bad.name,
        "fault": bad.fault,
        "sample_id": sample_id,
        "substitute": substitute,
        "step": step,
    }
    return row if bad.images == 1 else {**row, "images": bad.images}
