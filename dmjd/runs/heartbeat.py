"""Heartbeats: a small file per rank with its step and phase, to be read during a run or after it. Imports no torch.

``RUN/heartbeat/rank-00003.json`` is replaced as a whole, at most once per second, by a thread; neither it nor the
training waits for the other. The file of a rank that hangs keeps its phase; ``time`` is the start of that phase.

In an elastic launch each heartbeat also sets a timer of torchrun's watchdog, which kills this process when it expires.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dmjd.files import read_file, replace_file
from dmjd.safe_load import parse_json

PHASES = ("start", "data", "forward", "step", "checkpoint", "evaluate", "stop")
"""forward: forward and backward pass; step: optimizer step; stop: training has ended, by an error or not."""

STEP_PHASES = ("data", "forward", "step")
FOLDER = "heartbeat"
INTERVAL = 1.0
WATCHDOG = "TORCHELASTIC_TIMER_FILE"
"""The environment variable that names the pipe of torchrun's watchdog, ``torch.distributed.elastic.timer``."""

logger = logging.getLogger("dmjd")


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one rank.

    step: optimizer steps done. time: seconds since 1970 at the start of the phase.
    seconds, lost: wall seconds of the run over all launches, and those of discarded work.
    """

    rank: int
    step: int
    phase: str
    time: float
    host: str
    pid: int
    seconds: float
    lost: float


class Heartbeat:
    """Context manager that writes the file of ``rank`` in a thread. :meth:`beat` is one assignment.

    Args:
        step_limit: seconds after which the watchdog kills the process in :data:`STEP_PHASES`, once a step is done.
        limit: the same in other phases, and before.
    """

    def __init__(self, run: Path, rank: int, step_limit: float = math.inf, limit: float = math.inf) -> None:
        self._limits, self._first_step = (step_limit, limit), math.inf
        self._path = _path(run, rank)
        self._rank, self._host = rank, platform.node()
        self._latest: Beat | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._write_on, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()
        _set_timer(-1.0)

    def beat(self, step: int, phase: str, seconds: float, lost: float) -> None:
        """Set the state of this rank; it is written within a second, and on leaving the context."""
        self._first_step = min(self._first_step, step)
        self._latest = Beat(self._rank, step, phase, time.time(), self._host, os.getpid(), seconds, lost)

    def _write_on(self) -> None:
        written: Beat | None = None
        warned = stopped = False
        while not stopped:
            stopped = self._stopped.wait(INTERVAL if written else 0)
            latest = self._latest
            if latest is None or latest is written:
                continue
            in_step = latest.phase in STEP_PHASES and latest.step > self._first_step
            _set_timer(latest.time + self._limits[0 if in_step else 1])
            try:
                replace_file(self._path, json.dumps(asdict(latest)))
            except OSError as error:  # the log and the checkpoints raise errors about a full disk
                if not warned:
                    logger.warning("no heartbeat at %s: %s", self._path, error)
                warned = True
            written = latest


def _set_timer(expires: float) -> None:
    """Send a request of ``torch.distributed.elastic.timer.FileTimerClient``, whose errors would be logged each second.

    Args:
        expires: seconds since 1970; negative to remove the timer.
    """
    if WATCHDOG not in os.environ or expires == math.inf:
        return
    request = {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": "heartbeat",
        "expiration_time": expires,
        "signal": int(signal.SIGKILL),
    }
    with suppress(OSError):  # the agent has ended
        pipe = os.open(os.environ[WATCHDOG], os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, json.dumps(request).encode() + b"\n")
        finally:
            os.close(pipe)


def forget_ranks(run: Path, first: int) -> None:
    """Remove the heartbeats of ranks from ``first`` on, left by a launch of more processes."""
    for rank in ranks_with_heartbeat(run):
        if rank >= first:
            _path(run, rank).unlink(missing_ok=True)


def ranks_with_heartbeat(run: Path) -> list[int]:
    """Ranks that have a file, which may be damaged."""
    names = sorted(path.stem.partition("-")[2] for path in (run / FOLDER).glob("rank-*.json"))
    return [int(name) for name in names if re.fullmatch(r"[0-9]{5,9}", name)]


def read_heartbeats(run: Path) -> list[Beat]:
    """The last heartbeat of each rank, by rank; empty if there are none.

    A damaged file is skipped: a node failure may leave an empty file, which must not prevent the next launch.
    """
    beats = (_read(_path(run, rank)) for rank in ranks_with_heartbeat(run))
    return [beat for beat in beats if beat is not None]


def _path(run: Path, rank: int) -> Path:
    return run / FOLDER / f"rank-{rank:05d}.json"


def _read(path: Path) -> Beat | None:
    try:
        values = parse_json(read_file(path))
        beat = Beat(**{item.name: values[item.name] for item in fields(Beat)})
        whole, real = (beat.rank, beat.step, beat.pid), (beat.time, beat.seconds, beat.lost)
        if not all(type(number) is int and 0 <= number < 1 << 53 for number in whole):
            return None
        if not all(type(number) in (int, float) and abs(number) < 1e12 for number in real):
            return None
        # The host becomes part of a command.
        return beat if re.fullmatch(r"[\w.:-]{0,255}", beat.host) and isinstance(beat.phase, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
