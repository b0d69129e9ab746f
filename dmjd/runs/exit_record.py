"""The exit record of a run: why a launch ended and what to do next. Imports no torch."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from dmjd.errors import Diverged, FolderGone, NotMet, UserError
from dmjd.files import replace_file
from dmjd.redact import redact_message

RESUME = "the same command goes on from this step"
NEXT = {
    "finished": "dmjd knn checkpoint=RUN, dmjd report RUN",
    "signal": RESUME,
    "time": RESUME,
    "file": RESUME,
    "error": "mend what the detail says; the same command goes on from the newest checkpoint",
    "crashed": "the log has the trace; the same command goes on from the newest checkpoint; if it crashes there again, "
    "on other nodes too, the code or the data is at fault",
    "lost": "dmjd doctor RUN names the rank that was lost; the same command goes on from the newest checkpoint",
    "interrupted": "the same command goes on from the newest checkpoint",
    "diverged": "see RUN/guard.jsonl; the same command goes on from the newest checkpoint and meets the same steps "
    "again, so mend the data or set other limits in guard before",
}
"""Exit reason -> what to do next."""

LOST = re.compile(
    r"Connection (reset|closed) by peer|Connection was likely closed|Broken pipe|remote process exited"
    r"|Timed out waiting \d+ms|Socket Timeout|wait timeout after|caused pair closure"
)
"""Messages of gloo, NCCL and torch's store when another rank is gone or does not come."""

LONGEST = 500
"""Characters that are kept of an error: some carry a page of C++ frames."""

LAUNCH_RECORD = "DMJD_EXIT_RECORD"
"""The environment variable by which a batch script names the file of its launch's exit record."""

logger = logging.getLogger("dmjd")


class ExitRecord:
    """Context manager that writes RUN/STOP_REASON, and the launch's own record for its batch script.

    The file is one JSON object: ``reason`` (a key of :data:`NEXT`), ``detail``, ``step`` (optimizer steps done),
    ``total_steps``, ``when`` (UTC) and ``next``. An exception that leaves the context is recorded too; a killed run
    leaves no file.

    Rank 0 writes an end that all ranks agreed on. The first error stands: errors of other ranks follow from it.

    Args:
        path: of STOP_REASON.
        steps_done: the optimizer steps that are done at the time of the call.
    """

    def __init__(self, path: Path, steps_done: Callable[[], int], total_steps: int, rank: int) -> None:
        self._path, self._steps_done, self._total_steps, self._rank = path, steps_done, total_steps, rank

    def __enter__(self) -> ExitRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._path.is_file() or (getattr(error, "reported", False) and self._rank):
            return
        if isinstance(error, FolderGone):  # the path may hold another run's folder
            return
        self._write(*exit_reason(error, self._rank))

    def write(self, reason: str, detail: str) -> None:
        """Record the end of the run that all ranks agreed on."""
        if self._rank == 0:
            self._write(reason, detail)

    def _write(self, reason: str, detail: str) -> None:
        advice = NEXT[reason].replace("RUN", shlex.quote(str(self._path.parent)))
        write_launch_record(reason, detail, advice)
        record = {
            "reason": reason,
            "detail": detail,
            "step": self._steps_done(),
            "total_steps": self._total_steps,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "next": advice,
        }
        try:
            replace_file(self._path, json.dumps(record, indent=1) + "\n")
        except OSError as error:  # the run may end because the disk is full
            logger.warning("cannot write %s (%s), which would say: %s, %s", self._path, error, reason, detail)


def exit_reason(error: BaseException, rank: int) -> tuple[str, str]:
    """Map an exception to an exit reason, a key of :data:`NEXT`, and a detail of one line.

    A rank that only lost its connection ("lost") is told apart from the rank that crashed.
    """
    if isinstance(error, Diverged):
        return "diverged", str(error)
    if isinstance(error, NotMet):
        return "lost", str(error)
    if isinstance(error, UserError):
        return "error", str(error)
    if not isinstance(error, Exception):
        return "interrupted", type(error).__name__
    message = " ".join(redact_message(f"{type(error).__name__}: {error}").split()).removesuffix(":")[:LONGEST]
    return "lost" if LOST.search(message) else "crashed", f"rank {rank} on {platform.node()}: {message}"


def write_launch_record(reason: str, detail: str, advice: str = "") -> None:
    """Write ``reason: detail``, and ``advice`` on a second line, to the file that DMJD_EXIT_RECORD names, if it is set.

    STOP_REASON cannot serve the batch script: another job that waits for the folder removes it as soon as it holds the
    lock. The first record stands, for it is the cause of the others. A disk that takes none is ignored.
    """
    path = os.environ.get(LAUNCH_RECORD)
    if not path:
        return
    lines = [f"{reason}: {' '.join(detail.split())}", *[advice] * bool(advice)]
    with suppress(OSError), Path(path).open("x", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\n".join(lines) + "\n")
