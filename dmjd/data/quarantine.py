"""The list of a run's bad images, and when there are too many of them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from dmjd.data.substitution import Substitution
from dmjd.errors import BadImage, DataError, StorageError
from dmjd.safe_load import parse_json

_log = logging.getLogger("dmjd")

_MOST_BYTES = 1 << 26  # of a list that are read at once


def exceeds(count: int, total: int, percent: float) -> bool:
    """Whether ``count`` of ``total`` is more than ``percent``, exactly: 69 of 3000 are not more than 2.3 %."""
    return 100 * count > Fraction(str(percent)) * total


class Quarantine:
    """Lists each bad image once, in a file of one JSON object a line, and stops the run above a rate.

    A line holds ``kind``, ``name``, ``sample_id``, ``substitute`` (a name) and ``step`` (the first that met the image,
    counted from 1 as the log does); the last two are null for what a check at the start found. A tar that is read as a
    stream also has ``images``, for how many it counts. Images are told apart by name. Those that earlier launches
    listed count, and are not listed again.

    The processes of a run share the file: each appends what it meets in whole lines, and then also counts what the
    others have appended.

    Args:
        path: of the list; made with the first bad image, as is not its folder.
        dataset_size: how many images the rate refers to.
        max_bad_percent: of them may be bad, in [0, 100]; 0 stops at the first.

    Raises:
        DataError: if the list already holds too many.

    :meth:`admit` and :meth:`add` also raise StorageError if the list cannot be written.
    """

    def __init__(self, path: Path, dataset_size: int, max_bad_percent: float) -> None:
        self._path = path
        self._dataset_size = dataset_size
        self._max_bad_percent = max_bad_percent
        self._kinds: dict[str, str] = {}  # by name, in the order of the list
        self._images: dict[str, int] = {}
        self._read = 0  # bytes of whole lines
        self._torn = False  # a process was killed amid its last line
        self._catch_up()
        self._judge()

    @property
    def counts(self) -> Counter[str]:
        """Bad images of each kind."""
        counts = Counter[str]()
        for name, kind in self._kinds.items():
            counts[kind] += self._images[name]
        return counts

    def admit(self, bad: Mapping[int, BadImage]) -> None:
        """Take in what a check at the start found, as :attr:`dmjd.data.dataset.ImageDataset.bad` has it. One process of
        a run does so.

        Raises:
            DataError: if there are now too many.
        """
        new = self._list((_row(image, sample_id, None, None), image) for sample_id, image in bad.items())
        if new:
            _log.warning(
                "the check at the start found %d bad image(s), the first: %s; see %s", len(new), new[0], self._path
            )
        self._judge()

    def add(self, step: int, substitutions: Iterable[Substitution]) -> None:
        """Take in the bad images of a batch; ``step`` counts from 0, as batches do.

        Raises:
            DataError: if there are now too many.
        """
        rows = {item: _row(item.bad, item.sample_id, item.substitute, step + 1) for item in substitutions}
        new = [item for item, row in rows.items() if self._list([(row, item.bad)])]
        self._judge()
        for item in new:
            _log.warning("step %d: %s; %s takes its place", step + 1, item.bad, item.substitute)

    def _list(self, rows: Iterable[tuple[dict[str, Any], BadImage]]) -> list[BadImage]:
        """Append what is not listed yet, and return it."""
        new = [(row, bad) for row, bad in rows if bad.name not in self._kinds]
        if new:
            self._catch_up()
            new = [(row, bad) for row, bad in new if bad.name not in self._kinds]
        if not new:
            return []
        lines = "".join(json.dumps(row) + "\n" for row, _ in new)
        try:
            with self._path.open("ab") as file:
                file.write(("\n" + lines if self._torn else lines).encode())
        except OSError as error:
            raise StorageError(
                f"cannot write {self._path}: {error.strerror}; mend that, and the same command goes on"
            ) from error
        self._torn = False
        for _, bad in new:
            self._know(bad.name, bad.kind, bad.images)
        return [bad for _, bad in new]

    def _catch_up(self) -> None:
        """Read what was appended since."""
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
                name, kind, images = row["name"], row["kind"], row.get("images", 1)
                if isinstance(name, str) and isinstance(kind, str) and type(images) is int and 0 < images < 1 << 53:
                    self._know(name, kind, images)
            except (ValueError, TypeError, KeyError):
                continue  # a torn line; its image is listed anew when it is met again

    def _know(self, name: str, kind: str, images: int) -> None:
        self._kinds.setdefault(name, kind)
        self._images.setdefault(name, images)

    def _judge(self) -> None:
        count = sum(self._images.values())
        if not exceeds(count, self._dataset_size, self._max_bad_percent):
            return
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.counts.most_common())
        raise DataError(
            f"{count} of {self._dataset_size} images are bad ({kinds}), more than "
            f"data.max_bad_percent={self._max_bad_percent:g} allows, the first of them {next(iter(self._kinds))}; "
            f"repair what {self._path} lists and delete that list, or raise data.max_bad_percent"
        )


def _row(bad: BadImage, sample_id: int, substitute: str | None, step: int | None) -> dict[str, Any]:
    row = {"kind": bad.kind, "name": bad.name, "sample_id": sample_id, "substitute": substitute, "step": step}
    return row if bad.images == 1 else {**row, "images": bad.images}
