"""The launches of a run: which jobs made them, what each left of its end, and what Slurm knows of a job."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from dmjd.files import read_file
from dmjd.runs.heartbeat import Beat
from dmjd.safe_load import parse_json


class LaunchRecord(NamedTuple):
    """What a launch of a job left for its batch script, and when (seconds since 1970).

    of_run: whether it had become a run, which leaves a marker too.
    """

    text: str
    time: float
    of_run: bool


def read_launches(run: Path) -> list[dict[str, Any]]:
    """Launches of jobs. A line that a killed job or a full disk left half written is passed over."""
    launches = []
    for line in _lines(run / "slurm" / "launches.jsonl"):
        with suppress(ValueError, LookupError, TypeError, AttributeError, OverflowError):
            launch = parse_json(line)
            began_at(launch)  # a year that is no time of this machine raises too
            # Both are part of a file's name, and the job goes into Slurm's commands.
            if re.fullmatch(r"\w{1,64}", launch["job"]) and re.fullmatch(r"\w{1,64}", str(launch["restart"])):
                launches.append(launch)
    return launches


def _lines(path: Path) -> list[str]:
    """The lines of a small file; none where it cannot be read."""
    try:
        return read_file(path).decode(errors="surrogateescape").splitlines()
    except OSError:
        return []


def began_at(launch: Mapping[str, Any] | None) -> float:
    """When, in seconds since 1970; 0 for none."""
    return datetime.fromisoformat(launch["when"].replace("Z", "+00:00")).timestamp() if launch else 0.0


def recorded_at(run: Path) -> float:
    """When the last launch that became a run did so, by whatever it was started."""
    path = run / "provenance.json"
    try:
        return datetime.fromisoformat(parse_json(read_file(path))["started"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return 0.0


def read_launch_record(run: Path, launch: Mapping[str, Any]) -> LaunchRecord | None:
    """None where the launch left none: it was killed, or has not ended."""
    path = run / "slurm" / f"last_word-{launch['job']}-{launch['restart']}"
    lines = _lines(path)
    return LaunchRecord(lines[0], path.stat().st_mtime, of_run=len(lines) > 1) if lines else None  # with its advice


def refused_beside(word: LaunchRecord | None, beats: Sequence[Beat]) -> str:
    """The last word of a launch, if ranks of another were heard of after it: two jobs had been submitted for a run."""
    return word.text if word and not word.of_run and any(beat.time > word.time for beat in beats) else ""


def read_marker(run: Path, began: float) -> dict[str, Any]:
    """What the run left of its end; empty if that is damaged, or from before ``began``: of an earlier launch."""
    try:
        marker = parse_json(read_file(run / "STOP_REASON"))
        of_this_launch = datetime.fromisoformat(marker["when"]).timestamp() >= began
        said = all(isinstance(marker[key], str) for key in ("reason", "detail", "next"))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return {}
    return marker if of_this_launch and said else {}


def ending(marker: dict[str, Any], word: LaunchRecord | None) -> dict[str, Any]:
    """What was left last: the marker of a run, or the word of a launch that never became one."""
    if word is None or word.of_run:  # of ranks that fail at once the two keep whose came first, not always the same
        return marker
    if marker and datetime.fromisoformat(marker["when"]).timestamp() >= word.time:
        return marker
    reason, _, detail = word.text.partition(": ")
    return {"reason": reason, "detail": detail, "next": "mend that, then dmjd submit again"}


def slurm_state(job: str) -> str | None:
    """``STATE (reason)``, from Slurm's memory of the job or from its accounting; None where there is neither."""
    for command in (["scontrol", "show", "job", job], ["sacct", "-n", "-X", "-P", "-o", "State", "-j", job]):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0 and done.stdout.strip():
            state = re.search(r"JobState=(\S+)(?: Reason=(\S+))?", done.stdout)
            if state is None:
                return done.stdout.split()[0]
            return state.group(1) + (f" ({state.group(2)})" if state.group(2) not in (None, "None") else "")
    return None
