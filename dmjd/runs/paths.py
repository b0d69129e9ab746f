"""Paths of a run folder, and the records in it that are read without torch. Imports no torch."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmjd.files import read_file, replace_file
from dmjd.safe_load import parse_json

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class RunPaths:
    """Paths in a run folder, and its log, exit record and evaluations."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def timing(self) -> Path:
        return self.path / "timing.jsonl"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine.jsonl"

    @property
    def guard(self) -> Path:
        return self.path / "guard.jsonl"

    @property
    def stop_reason(self) -> Path:
        return self.path / "STOP_REASON"

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def pictures(self) -> Path:
        return self.path / "pictures"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    def read_log(self) -> list[dict[str, Any]]:
        """The rows of ``log.jsonl``; damaged lines are skipped."""
        rows, lines = [], list[bytes]()
        with suppress(OSError):
            lines = read_file(self.log).splitlines()
        for line in lines:
            with suppress(ValueError):
                rows.append(parse_json(line))
        return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]

    def read_stop_reason(self) -> dict[str, Any]:
        """The exit record of the last launch; empty if it was killed, has not ended, or could not write it."""
        try:
            record = parse_json(read_file(self.stop_reason))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) and record.keys() >= {"reason", "detail", "next"} else {}

    def write_evaluation(self, name: str, result: dict[str, Any]) -> Path:
        """Write the results of one evaluation to ``evaluations/NAME.json``."""
        self.evaluations.mkdir(parents=True, exist_ok=True)
        path = self.evaluations / f"{name}.json"
        replace_file(path, json.dumps(result, indent=1))
        return path
