"""The last collectives of every rank before a time-out: torch's flight recorder, read without torch.

Every rank numbers the collectives of a process group as it enters them. If a rank hangs, the others wait in a
collective that this rank has not entered.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dmjd.files import read_file
from dmjd.parallel.environment import FLIGHT
from dmjd.safe_load import unpickle_plain


class LastCollective(NamedTuple):
    """The last collective that a rank entered in a process group, and whether it completed."""

    rank: int
    group: str
    sequence: int
    operation: str
    completed: bool


def last_collectives(run: Path, since: float = 0.0) -> list[LastCollective]:
    """One per rank and process group, from ``run/flight/rank_N``; other files are skipped.

    Args:
        since: seconds since 1970; older files belong to an earlier launch.
    """
    last: dict[tuple[int, str], LastCollective] = {}
    for path in sorted((run / FLIGHT).glob("rank_*")):
        rank = re.fullmatch(r"rank_(\d{1,9})", path.name)
        if rank is None:
            continue
        for entry in _entries(path, since):
            group = entry.get("process_group") or entry.get("pg_name") or entry.get("pg_id", "?")
            name = " ".join(map(str, group)) if isinstance(group, (list, tuple)) else str(group)
            operation = str(entry.get("profiling_name", "")).partition(":")[2] or "a collective"
            completed = entry.get("state") == "completed" or bool(entry.get("retired"))
            found = LastCollective(int(rank[1]), name, entry["collective_seq_id"], operation, completed)
            if found.sequence >= last.get((found.rank, name), found).sequence:
                last[found.rank, name] = found
    return list(last.values())


def explain(collectives: Iterable[LastCollective]) -> Iterator[str]:
    """A line for each process group in which some rank is behind, or in which all ranks wait in the same collective."""
    groups: dict[str, list[LastCollective]] = defaultdict(list)
    for entry in collectives:
        groups[entry.group].append(entry)
    for group, members in groups.items():
        newest = max(member.sequence for member in members)
        behind = [member for member in members if member.sequence < newest]
        waiting = [member for member in members if member.sequence == newest and not member.completed]
        if not waiting:
            continue
        what = f"{waiting[0].operation} number {newest} of group {group}"
        if behind:
            names = ", ".join(f"rank {member.rank} (last in number {member.sequence})" for member in behind)
            yield f"{len(waiting)} rank(s) waited in {what}, which was never entered by {names}"
        else:
            names = ", ".join(f"rank {member.rank}" for member in waiting)
            yield f"{names if len(waiting) < len(members) else 'all ranks'} never left {what}"


def _entries(path: Path, since: float) -> list[dict[str, Any]]:
    try:
        record = unpickle_plain(read_file(path)) if path.stat().st_mtime >= since else None
    except (OSError, ValueError):
        return []
    entries = record.get("entries") if isinstance(record, dict) else None
    entries = entries if isinstance(entries, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and type(entry.get("collective_seq_id")) is int]
