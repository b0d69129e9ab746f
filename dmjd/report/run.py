"""Read a run folder: configuration, provenance, logs and evaluations."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dmjd.errors import DataError
from dmjd.evaluate import EVALUATIONS, Column
from dmjd.files import at_home, printable, read_file
from dmjd.report.format import plain
from dmjd.report.trainings import TRAININGS, Training, training_of
from dmjd.runs.paths import RunPaths
from dmjd.safe_load import parse_json, parse_yaml

REFERENCES = ("chance", "majority", "untrained")
"""Scores in a record that its first score compares with."""


@dataclass(frozen=True)
class Record:
    """One file of RUN/evaluations: scores of one checkpoint. Scores compare under equal evaluation and settings only.

    evaluation: ``"knn"``, ``"linprobe"``, ...
    weights: ``"trained"``, ``"ema"`` for their moving average, or ``"untrained"`` for the initial weights.
    scores: those of :func:`columns_of`.
    settings: the conditions under which they were measured.
    references: what the first score compares with, as far as it was recorded, in its unit: ``chance`` (of a random
        class), ``majority`` (of the most frequent class), ``untrained`` (of the initial weights).
    """

    evaluation: str
    weights: str
    step: int
    scores: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    references: dict[str, float] = field(default_factory=dict)

    @property
    def main_score(self) -> str:
        """The score that the references belong to."""
        return next(iter(columns_of(self.evaluation)))

    def untrained(self, score: str) -> float | None:
        """The score of the initial weights that this record holds."""
        if self.weights == "untrained":
            return self.scores.get(score)
        return self.references.get("untrained") if score == self.main_score else None


def columns_of(evaluation: str) -> Mapping[str, Column]:
    """Score -> its column; ``finetune`` etc. are records that a training leaves in the run that it began from. Records
    that people write by hand have a top-1 in per cent."""
    if evaluation in EVALUATIONS:
        return EVALUATIONS[evaluation].columns
    training = TRAININGS.get(evaluation)
    return {"top1": Column(evaluation, f"{evaluation} top-1")} if training is None else training.columns


@dataclass(frozen=True)
class Run:
    """The contents of a run folder.

    config, config_text: the resolved configuration, parsed and as written.
    rows: log.jsonl by ascending step; rows of a loss and rows of a score (``knn_top1``) may share a step.
    timing: timing.jsonl: speed, and ``seconds`` over all launches. Early versions wrote both into one file; ``rows``
        and ``timing`` are then equal.
    evaluations, pictures: in the order of their file names.
    path: the folder.
    groups: (not pre-training) the parameter groups of groups.json.
    origin: (not pre-training) the run that ``init`` names, if it can be read.
    """

    name: str
    config: dict[str, Any]
    config_text: str
    provenance: dict[str, Any]
    rows: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    evaluations: list[Record]
    pictures: list[Path]
    path: Path = field(default_factory=Path)
    groups: list[dict[str, Any]] = field(default_factory=list)
    origin: Run | None = None

    @property
    def training(self) -> Training | None:
        """The record of its command; None for pre-training."""
        return training_of(self.config)

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
        """Wall seconds at ``step``, interpolated linearly between logged steps; None if no step was logged."""
        steps, seconds = self._clock
        place = bisect_right(steps, step)  # called for each of up to 100 000 rows
        earlier, earlier_seconds = (steps[place - 1], seconds[place - 1]) if place else (0, 0.0)
        if place == len(steps):
            return earlier_seconds or None
        share = (step - earlier) / (steps[place] - earlier)
        return earlier_seconds + share * (seconds[place] - earlier_seconds)

    @cached_property
    def _clock(self) -> tuple[list[int], list[float]]:
        """Steps and seconds of all rows that have both."""
        known = [row for row in self.timing if row.get("seconds") is not None]
        return [row["step"] for row in known], [row["seconds"] for row in known]


def read_run(path: str | Path) -> Run:
    """Read the run folder at ``path``.

    Raises:
        DataError: if the folder or one of config.yaml, provenance.json and log.jsonl is missing, or a file is damaged.
            The last line of a log may be incomplete: the run may be writing it, or was killed while it did.
    """
    run = _read(path)
    if run.training is None:
        return run
    return replace(run, groups=_groups(run.path / "groups.json"), origin=_origin(run))


def _read(path: str | Path) -> Run:
    folder = RunPaths(Path(path))
    if not folder.path.is_dir():
        raise DataError(f"no run folder at {folder.path}")
    config, provenance = _mapping(folder.config), _mapping(folder.provenance)
    launches = provenance.get("launches", [])
    if not isinstance(launches, list) or not all(isinstance(launch, dict) for launch in launches):
        raise DataError(f"{folder.provenance} is damaged: launches must be a list of mappings")
    rows = _rows(folder.log)
    return Run(
        name=printable(folder.path.resolve().name),
        config=config,
        config_text=_text(folder.config),
        provenance=provenance,
        rows=rows,
        timing=_rows(folder.timing) if folder.timing.is_file() else rows,
        evaluations=[_record(file) for file in sorted(folder.evaluations.glob("*.json"))],
        pictures=sorted(folder.pictures.glob("*.png")),
        path=folder.path,
    )


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read several run folders; runs of one name are called after their parent folders too."""
    runs = [read_run(path) for path in paths]
    names = _distinct_names([Path(path).resolve() for path in paths]) if len(runs) > 1 else [run.name for run in runs]
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _distinct_names(folders: Sequence[Path]) -> list[str]:
    """Folder names with as many parents as make them distinct."""
    depth = 1
    while True:
        names = [printable("/".join(folder.parts[-depth:])) for folder in folders]
        if len({*names}) == len(names):
            return names
        depth += 1


def _origin(run: Run) -> Run | None:
    """The pre-training run whose folder or checkpoint ``init`` names; None for a file, or if it cannot be read."""
    init = run.config.get("init")
    if isinstance(init, str):
        place = Path(at_home(init))
        for path in (place, place.parent.parent):
            with suppress(DataError, OSError, ValueError):
                origin = _read(path)
                return origin if origin.training is None else None
    return None


def _groups(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    try:
        rows = parse_json(content_of(file))
    except ValueError as error:
        raise DataError(f"{file} is damaged: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file} must hold a list of parameter groups")
    return rows


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


def _record(file: Path) -> Record:
    values = _mapping(file)
    columns = columns_of(str(values.get("verb")))
    scores = {score: values[score] for score in columns if values.get(score) is not None}
    references = {name: values[name] for name in REFERENCES if values.get(name) is not None}
    missing = [key for key in ("verb", "weights", "step") if key not in values] + [*columns] * (not scores)
    if missing:
        raise DataError(f"{file} is not an evaluation: it lacks {', '.join(missing)}")
    if values["weights"] not in ("trained", "untrained", "ema"):
        raise DataError(f"{file} has weights={values['weights']}; it must be trained, untrained or ema")
    for key, fits, what in (
        ("verb", isinstance(values["verb"], str), "a name"),
        ("step", _is_number(values["step"]) and isinstance(values["step"], int), "a whole number"),
        ("settings", isinstance(values.get("settings"), dict | None), "a mapping of names to values"),
        *(
            (score, _is_number(value) and math.isfinite(value), "a finite number")
            for score, value in (scores | references).items()
        ),
    ):
        if not fits:
            raise DataError(f"{file} has {key}={values[key]!s:.60}; it must be {what}")
    return Record(values["verb"], values["weights"], values["step"], scores, values.get("settings") or {}, references)
