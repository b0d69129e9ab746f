"""Signs of life: what each rank was doing when it was last heard of, as ``RUN/heartbeat/rank-00003.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = "heartbeat"
PHASES = ("start", "data", "forward", "step", "checkpoint", "evaluate", "stop")


@dataclass(frozen=True)
class Heartbeat:
    """``time`` is in seconds since 1970; ``step`` counts optimizer steps that are done."""

    rank: int
    step: int
    phase: str
    time: float
    host: str
    pid: int


def read_heartbeats(run: Path) -> list[Heartbeat]:
    """By rank; one that cannot be read, because its rank died writing it, is left out."""
    beats = []
    for path in sorted((run / FOLDER).glob("rank-*.json")):
        try:
            fields = json.loads(path.read_text())
            rank = int(path.stem.removeprefix("rank-"))
            beats.append(
                Heartbeat(rank, fields["step"], fields["phase"], fields["time"], fields["host"], fields["pid"])
            )
        except (OSError, ValueError, KeyError):
            continue
    return beats
