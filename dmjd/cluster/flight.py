"""What ranks remembered of their last collectives when a time-out ended them: torch's flight recorder, without torch.

Every rank numbers the collectives of a process group as it enters them. In a hang the others have entered one that
some rank has not, and that rank is the one to look at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmjd.files import read_file
from dmjd.parallel.environment import FLIGHT
from dmjd.safe_load import unpickle_plain


@dataclass(frozen=True)
class Stand:
    """How far a rank got in one process group: the last collective it entered, and whether that ended."""

    rank: int
    group: str
    sequence: int
    operation: str
    completed: bool


def read_stands(run: Path, since: float = 0.0) -> list[Stand]:
    """From ``run/flight/rank_N``; a file that is no such record is passed over.

    Args:
        since: seconds since 1970; older records are of an earlier launch.
    """
    stands = []
    for path in sorted((run / FLIGHT).glob("rank_*")):
        match = re.search(r"rank_(\d{1,9})$", path.name)
        entries = _entries(path) if path.is_file() and path.stat().st_mtime >= since else []
        last: dict[str, dict[str, Any]] = {}
        for entry in entries:
            group = _group(entry)
            if group not in last or entry["collective_seq_id"] >= last[group]["collective_seq_id"]:
                last[group] = entry
        for group, entry in last.items():
            if match is not None:
                name = str(entry.get("profiling_name", "a collective")).partition(":")[2] or "a collective"
                done = entry.get("state") == "completed" or bool(entry.get("retired"))
                stands.append(Stand(int(match.group(1)), group, entry["collective_seq_id"], name, done))
    return stands


def explain(stands: Iterable[Stand]) -> list[str]:
    """A sentence for each process group in which some rank is behind, or all wait in the same collective."""
    groups: dict[str, list[Stand]] = defaultdict(list)
    for stand in stands:
        groups[stand.group].append(stand)
    sentences = []
    for group, members in groups.items():
        newest = max(member.sequence for member in members)
        behind = [member for member in members if member.sequence < newest]
        waiting = [member for member in members if member.sequence == newest and not member.completed]
        if not waiting:
            continue
        what = f"{waiting[0].operation} number {newest} of group {group}"
        if behind:
            names = ", ".join(f"rank {member.rank} (last in number {member.sequence})" for member in behind)
            sentences.append(f"{len(waiting)} rank(s) waited in {what}, which was never entered by {names}")
        elif len(waiting) == len(members):
            sentences.append(f"all ranks entered {what} and none left it, which points to the network or a GPU")
        else:
            names = ", ".join(f"rank {member.rank}" for member in waiting)
            sentences.append(f"{names} never left {what}, which the others did")
    return sentences


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        record = unpickle_plain(read_file(path))
    except (OSError, ValueError):
        return []
    entries = record.get("entries", []) if isinstance(record, dict) else []
    entries = entries if isinstance(entries, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and type(entry.get("collective_seq_id")) is int]


def _group(entry: dict[str, Any]) -> str:
    named = entry.get("process_group") or entry.get("pg_name") or entry.get("pg_id", "?")
    return " ".join(map(str, named)) if isinstance(named, (list, tuple)) else str(named)
