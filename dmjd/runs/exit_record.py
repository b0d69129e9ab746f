"""The exit record of a run: why a launch ended and what to do next. Imports no torch."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from dmjd.errors import Diverged, FolderGone, NotMet, UserError
from dmjd.files import replace_file
from dmjd.redact import redact_message
from dmjd.runs.paths import with_path

RESUME = "run the same command to continue from this step"
NEXT = {
    "finished": "dmjd report RUN",
    "signal": RESUME,
    "time": RESUME,
    "file": RESUME,
    "error": "fix the cause given in detail, then run the same command to continue from the newest checkpoint",
    "crashed": "the log has the traceback; run the same command to continue from the newest checkpoint; if it crashes "
    "there again on other nodes too, the cause is in the code or the data",
    "lost": "dmjd doctor RUN names the lost rank; run the same command to continue from the newest checkpoint",
    "interrupted": "run the same command to continue from the newest checkpoint",
    "diverged": "see RUN/guard.jsonl; fix the data or change the limits in guard, then run the same command: it "
    "continues from the newest checkpoint and repeats the bad steps",
}
"""Exit reason -> what to do next."""

LOST = re.compile(
    r"Connection (reset|closed) by peer|Connection was likely closed|Broken pipe|remote process exited"
    r"|Timed out waiting \d+ms|Socket Timeout|wait timeout after|caused pair closure"
)
"""Messages of gloo, NCCL and torch's store when another rank has ended or does not connect."""

LONGEST = 500
"""Characters kept of an error message; some have a page of C++ frames."""

LAUNCH_RECORD = ("DMJD_EXIT_RECORD", "DMJD_LAST_WORD")
"""The environment variable by which a batch script names the file of its launch's exit record; its former name."""

logger = logging.getLogger("dmjd")


class ExitRecord:
    """Context manager that writes RUN/STOP_REASON, and the launch's own record for its batch script.

    The file is one JSON object: ``reason`` (a key of :data:`NEXT`), ``detail``, ``step`` (optimizer steps done),
    ``total_steps``, ``when`` (UTC), ``advice`` and ``next``, the advice with the folder in place of RUN. An exception
    that leaves the context is recorded too; a killed run leaves no file.

    Rank 0 writes the end that all ranks agreed on. Of several errors the first is kept: it causes those of other ranks.

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

    def write(self, reason: str, detail: str, advice: str = "") -> None:
        """Record the end of the run that all ranks agreed on. ``advice``: in place of that of :data:`NEXT`."""
        if self._rank == 0:
            self._write(reason, detail, advice)

    def _write(self, reason: str, detail: str, advice: str = "") -> None:
        record: dict[str, Any] = {
            "reason": reason,
            "detail": detail,
            "step": self._steps_done(),
            "total_steps": self._total_steps,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "advice": advice or NEXT[reason],
        }
        record = with_path(record, self._path.parent)
        write_launch_record(reason, detail, record["next"])
        try:
            replace_file(self._path, json.dumps(record, indent=1) + "\n")
        except OSError as error:  # the cause may be a full disk
            logger.warning("cannot write %s (%s); its content: %s, %s", self._path, error, reason, detail)


def exit_reason(error: BaseException, rank: int) -> tuple[str, str]:
    """Map an exception to an exit reason, a key of :data:`NEXT`, and a detail of one line.

    The rank that crashed has "crashed"; ranks that lost their connection to it have "lost".
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

    The batch script does not read STOP_REASON: another job that waits for the folder removes it when it gets the lock.
    The first record is kept, since it causes the others. A file that cannot be written is ignored.
    """
    path = next(filter(None, map(os.environ.get, LAUNCH_RECORD)), None)
    if not path:
        return
    lines = [f"{reason}: {' '.join(detail.split())}", *[advice] * bool(advice)]
    with suppress(OSError), Path(path).open("x", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\n".join(lines) + "\n")
