"""A run folder, read back: what was configured, on what it ran, what it logged, and how it was evaluated."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dmjd.errors import DataError
from dmjd.files import printable, read_file
from dmjd.report.words import plain
from dmjd.safe_load import parse_json, parse_yaml


@dataclass(frozen=True)
class Evaluation:
    """One score of one checkpoint. Scores compare only under equal ``verb`` and ``settings``.

    verb: ``"knn"``, ``"linprobe"``, ...
    weights: ``"trained"``, ``"ema"`` for their moving average, or ``"untrained"`` for the initialisation that the run
        started from.
    top1: per cent.
    settings: what the score depends on, and no outcome.
    """

    verb: str
    weights: str
    step: int
    top1: float
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """The contents of a run folder.

    config, config_text: the resolved configuration, parsed and as written.
    rows: the log, in steps that rise; rows of a loss and rows of a score (``knn_top1``) may share a step.
    timing: rows of the same steps on speed and ``seconds``, which count over all launches. Earlier versions kept both
        in one file; ``rows`` and ``timing`` are then equal.
    evaluations, pictures: in the order of their file names.
    """

    name: str
    config: dict[str, Any]
    config_text: str
    provenance: dict[str, Any]
    rows: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    evaluations: list[Evaluation]
    pictures: list[Path]

    def last(self, key: str) -> Any:
        """The latest logged value of ``key``; None if it was never logged."""
        rows = (*reversed(self.rows), *reversed(self.timing))
        return next((row[key] for row in rows if row.get(key) is not None), None)

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The provenance of every launch, in order."""
        return self.provenance.get("launches") or [self.provenance]

    def effective_epochs(self, epochs: float | None) -> float | None:
        """ETE = K x epochs; None if either is unknown."""
        mask = self.config.get("mask")
        views = mask.get("views") if isinstance(mask, dict) else None
        return views * epochs if isinstance(views, int) and epochs is not None else None

    def seconds_at(self, step: int) -> float | None:
        """Wall seconds when ``step`` was done, by a straight line between logged steps; None if none was logged."""
        steps, seconds = self._clock
        place = bisect_right(steps, step)  # a long run has 100 000 rows, and each asks
        earlier, earlier_seconds = (steps[place - 1], seconds[place - 1]) if place else (0, 0.0)
        if place == len(steps):
            return earlier_seconds or None
        share = (step - earlier) / (steps[place] - earlier)
        return earlier_seconds + share * (seconds[place] - earlier_seconds)

    @cached_property
    def _clock(self) -> tuple[list[int], list[float]]:
        """Steps and the seconds by then, of all rows that say."""
        known = [row for row in self.timing if row.get("seconds") is not None]
        return [row["step"] for row in known], [row["seconds"] for row in known]


def read_run(path: str | Path) -> Run:
    """Read the run folder at ``path``.

    Raises:
        DataError: if the folder or one of config.yaml, provenance.json and log.jsonl is missing, or a file is damaged.
            The last line of a log may be cut short: the run may be writing it, or was killed while it did.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"no run folder at {folder}")
    config, provenance = _mapping(folder / "config.yaml"), _mapping(folder / "provenance.json")
    launches = provenance.get("launches", [])
    if not isinstance(launches, list) or not all(isinstance(launch, dict) for launch in launches):
        raise DataError(f"{folder / 'provenance.json'} is damaged: its launches are no list of mappings")
    rows, timing = _rows(folder / "log.jsonl"), folder / "timing.jsonl"
    return Run(
        name=printable(folder.resolve().name),
        config=config,
        config_text=_text(folder / "config.yaml"),
        provenance=provenance,
        rows=rows,
        timing=_rows(timing) if timing.is_file() else rows,
        evaluations=[_evaluation(file) for file in sorted(folder.glob("evaluations/*.json"))],
        pictures=sorted(folder.glob("pictures/*.png")),
    )


def content_of(file: Path) -> bytes:
    """The bytes of a run folder's file. Raises DataError."""
    try:
        return read_file(file)
    except FileNotFoundError:
        raise DataError(f"{file.parent} is not a complete run folder: it has no {file.name}") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None


def _text(file: Path) -> str:
    return content_of(file).decode(errors="replace")  # a log may end inside a character


def _mapping(file: Path) -> dict[str, Any]:
    text = _text(file)
    try:
        value = parse_yaml(text) if file.suffix == ".yaml" else parse_json(text)
    except ValueError as error:
        raise DataError(f"{file} is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} must hold a mapping of names to values, found {type(value).__name__}")
    return value


def _rows(file: Path) -> list[dict[str, Any]]:
    lines = _text(file).removesuffix("\n").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise DataError(f"{file} is damaged in line {number}: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{file} must hold one JSON object a line, line {number} is {type(row).__name__}")
        if "step" not in row:
            raise DataError(f"{file} must hold rows with a step, line {number} has none")
        for key, value in row.items():
            whole = type(value) is int and 0 <= value < 1 << 53
            if not (whole if key == "step" else value is None or isinstance(value, bool) or _is_number(value)):
                raise DataError(f"{file} has {key}={plain(value)[:40]} in line {number}; it must be a number")
        rows.append(row)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _evaluation(file: Path) -> Evaluation:
    values = _mapping(file)
    missing = [key for key in ("verb", "weights", "step", "top1") if key not in values]
    if missing:
        raise DataError(f"{file} is not an evaluation: it lacks {', '.join(missing)}")
    if values["weights"] not in ("trained", "untrained", "ema"):
        raise DataError(f"{file} has weights={values['weights']}; they are trained, untrained or ema")
    # People write scores of their own beside ours, of fine-tuning say.
    for key, fits, what in (
        ("verb", isinstance(values["verb"], str), "a name"),
        ("step", _is_number(values["step"]) and isinstance(values["step"], int), "a whole number"),
        ("top1", _is_number(values["top1"]) and math.isfinite(values["top1"]), "a number, in per cent"),
        ("settings", isinstance(values.get("settings"), dict | None), "a mapping of names to values"),
    ):
        if not fits:
            raise DataError(f"{file} has {key}={values[key]!s:.60}; it must be {what}")
    return Evaluation(
        verb=values["verb"],
        weights=values["weights"],
        step=values["step"],
        top1=values["top1"],
        settings=values.get("settings") or {},
    )
