"""A run folder, read back: what was configured, on what it ran, what it logged, and how it was evaluated."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dmjd.errors import DataError


@dataclass(frozen=True)
class Evaluation:
    """One score of one checkpoint. Scores compare only under equal ``verb`` and ``settings``.

    verb: ``"knn"`` or ``"linprobe"``.
    weights: ``"trained"``, or ``"untrained"`` for the initialisation that the run started from.
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
    rows: the log, in steps that rise. ``seconds`` counts over all launches.
    evaluations, pictures: in the order of their file names.
    """

    name: str
    config: dict[str, Any]
    config_text: str
    provenance: dict[str, Any]
    rows: list[dict[str, Any]]
    evaluations: list[Evaluation]
    pictures: list[Path]

    def last(self, key: str) -> Any:
        """The latest logged value of ``key``; None if it was never logged."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)


def read_run(path: str | Path) -> Run:
    """Read the run folder at ``path``.

    Raises:
        DataError: if the folder or one of config.yaml, provenance.json and log.jsonl is missing, or a file is damaged.
            The last line of the log may be cut short: the run may be writing it, or was killed while it did.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise DataError(f"no run folder at {folder}")
    return Run(
        name=folder.resolve().name,
        config=_mapping(folder / "config.yaml"),
        config_text=_text(folder / "config.yaml"),
        provenance=_mapping(folder / "provenance.json"),
        rows=_rows(folder / "log.jsonl"),
        evaluations=[_evaluation(file) for file in sorted(folder.glob("evaluations/*.json"))],
        pictures=sorted(folder.glob("pictures/*.png")),
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")  # a log may end inside a character
    except FileNotFoundError:
        raise DataError(f"{file.parent} is not a complete run folder: it has no {file.name}") from None


def _mapping(file: Path) -> dict[str, Any]:
    text = _text(file)
    try:
        value = yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise DataError(f"{file} is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} must hold a mapping of names to values, found {type(value).__name__}")
    return value


def _rows(file: Path) -> list[dict[str, Any]]:
    lines = _text(file).removesuffix("\n").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise DataError(f"{file} is damaged in line {number}: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{file} must hold one JSON object a line, line {number} is {type(row).__name__}")
        rows.append(row)
    return rows


def _evaluation(file: Path) -> Evaluation:
    values = _mapping(file)
    missing = [key for key in ("verb", "weights", "step", "top1") if key not in values]
    if missing:
        raise DataError(f"{file} is not an evaluation: it lacks {', '.join(missing)}")
    if values["weights"] not in ("trained", "untrained"):
        raise DataError(f"{file} has weights={values['weights']}; they are trained or untrained")
    return Evaluation(
        verb=values["verb"],
        weights=values["weights"],
        step=values["step"],
        top1=values["top1"],
        settings=values.get("settings") or {},
    )
