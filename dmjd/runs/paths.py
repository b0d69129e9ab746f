"""Paths of a run folder, and the records in it that are read without torch. Imports no torch."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from dmjd.files import read_file, replace_file
from dmjd.safe_load import parse_json

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"


class RunPaths:
    """Paths in a run folder, and its log, exit record and evaluations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.provenance = path / "provenance.json"
        self.log = path / "log.jsonl"
        self.timing = path / "timing.jsonl"
        self.quarantine = path / "quarantine.jsonl"
        self.guard = path / "guard.jsonl"
        self.stop_reason = path / "STOP_REASON"
        self.best = path / "best.json"
        self.checkpoints = path / CHECKPOINTS
        self.pictures = path / "pictures"
        self.evaluations = path / "evaluations"

    def read_log(self) -> list[dict[str, Any]]:
        """The rows of ``log.jsonl``; damaged lines are skipped."""
        return [row for row in self.read_rows(self.log) if isinstance(row.get("step"), int)]

    @staticmethod
    def read_rows(file: Path) -> list[dict[str, Any]]:
        """The objects in a file of one JSON object per line; damaged lines are skipped, a missing file has none."""
        rows, lines = [], list[bytes]()
        with suppress(OSError):
            lines = read_file(file).splitlines()
        for line in lines:
            with suppress(ValueError):
                rows.append(parse_json(line))
        return [row for row in rows if isinstance(row, dict)]

    def read_stop_reason(self) -> dict[str, Any]:
        """The exit record of the last launch; empty if it was killed, has not ended, or could not write it."""
        try:
            record = parse_json(read_file(self.stop_reason))
        except (OSError, ValueError):
            return {}
        whole = isinstance(record, dict) and record.keys() >= {"reason", "detail", "next"}
        return with_path(record, self.path) if whole else {}

    def initial_path(self) -> Path | None:
        """The checkpoint or file from which the run began, as its provenance has it; None if it has none."""
        try:
            record = parse_json(read_file(self.provenance))
        except (OSError, ValueError):
            return None
        path = record.get("init_path") if isinstance(record, dict) else None
        return Path(path) if isinstance(path, str) else None

    def write_evaluation(self, name: str, result: dict[str, Any]) -> Path:
        """Write the results of one evaluation to ``evaluations/NAME.json``."""
        self.evaluations.mkdir(parents=True, exist_ok=True)
        path = self.evaluations / f"{name}.json"
        replace_file(path, json.dumps(result, indent=1))
        return path


def with_path(record: dict[str, Any], run: Path) -> dict[str, Any]:
    """An exit record with ``next``, its ``advice`` for ``run``: the folder may have been moved since it was written."""
    advice = record.get("advice")
    return {**record, "next": advice.replace("RUN", shlex.quote(str(run)))} if isinstance(advice, str) else record
