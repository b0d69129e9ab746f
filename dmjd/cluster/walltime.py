"""Time limits of jobs in Slurm's format."""

from __future__ import annotations

import re

from dmjd.errors import ConfigError

_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})", re.ASCII)


def seconds_of_limit(text: str) -> int | None:
    """Seconds of ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``.

    None for no limit (0, UNLIMITED) and for formats that sbatch has to check.
    """
    match = _LIMIT.fullmatch(text)
    if match is None:
        return None
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = ([0, *parts, 0] if len(parts) < 3 else parts)[:3]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


def check_limit(limit: str, signal: str | None, margin: float | None) -> None:
    """Raise ConfigError for a time limit that would end every launch before it has made progress.

    Args:
        limit: sbatch's --time.
        signal: sbatch's --signal, which requests the stop of a launch.
        margin: seconds before the limit at which the run stops by itself; None if it does not.
    """
    seconds = seconds_of_limit(limit)
    if seconds is None:
        return
    if margin is not None and seconds <= margin:
        raise ConfigError(
            f"time={limit} is not above time_margin={margin:g} seconds: each launch would stop after one step; set a "
            "longer time or a smaller time_margin"
        )
    lead = re.search(r"@(\d+)$", signal or "")
    if lead is not None and seconds <= int(lead.group(1)):
        raise ConfigError(
            f"time={limit} is not above the {lead.group(1)} seconds of --signal={signal}: each launch would be "
            "stopped when it starts; set a longer time, or another SBATCH_SIGNAL in the site file"
        )
