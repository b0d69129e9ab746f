"""The limit of a job's time as Slurm writes it, and what a launch needs of it."""

from __future__ import annotations

import re

from dmjd.errors import ConfigError

_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})", re.ASCII)


def seconds_of_limit(text: str) -> int | None:
    """Seconds of ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``.

    None where there is no limit (0, UNLIMITED), and for what sbatch alone can judge.
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
    """Refuse a limit that ends a launch before it got anywhere, again and again.

    Args:
        limit: as sbatch's --time.
        signal: as sbatch's --signal, by which the launch is told to stop; None for none.
        margin: seconds before its end at which the run stops by itself; None where it does not.

    Raises:
        ConfigError: naming what comes too early.
    """
    seconds = seconds_of_limit(limit)
    if seconds is None:
        return
    if margin is not None and seconds <= margin:
        raise ConfigError(
            f"time={limit} is not above time_margin={margin:g} seconds: each launch would stop after one step; take a "
            "longer time or a smaller time_margin"
        )
    lead = re.search(r"@(\d+)$", signal or "")
    if lead is not None and seconds <= int(lead.group(1)):
        raise ConfigError(
            f"time={limit} is not above the {lead.group(1)} seconds of --signal={signal}: each launch would be told to "
            "stop when it starts; take a longer time, or another SBATCH_SIGNAL in the site's file"
        )
