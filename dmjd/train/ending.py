"""What a run leaves for launchers and people: why it ended, and what to do next."""

from __future__ import annotations

import json
import logging
import shlex
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from dmjd.files import replace_file
from dmjd.parallel.world import World
from dmjd.train.cause import cause
from dmjd.train.guard import Diverged
from dmjd.train.last_word import leave_last_word
from dmjd.train.lock import FolderGone
from dmjd.train.state import Position

GO_ON = "the same command goes on from this step"
NEXT = {
    "finished": "dmjd knn checkpoint=RUN, dmjd report RUN",
    "signal": GO_ON,
    "time": GO_ON,
    "file": GO_ON,
    "error": "mend what the detail says; the same command goes on from the newest checkpoint",
    "crashed": "the log has the trace; the same command goes on from the newest checkpoint; if it crashes there again, "
    "on other nodes too, the code or the data is at fault",
    "lost": "dmjd doctor RUN names the rank that was lost; the same command goes on from the newest checkpoint",
    "interrupted": "the same command goes on from the newest checkpoint",
    "diverged": "see RUN/guard.jsonl; the same command goes on from the newest checkpoint and meets the same steps "
    "again, so mend the data or set other limits in guard before",
}
"""Why a run ended -> what to do next."""

logger = logging.getLogger("dmjd")


class Ending:
    """Writes STOP_REASON and the launch's last word, which is for its batch script alone.

    A context manager: whoever leaves it by an exception leaves word as well. The file is one JSON object:
    ``reason`` (a key of :data:`NEXT`), ``detail`` in words, ``step`` (optimizer steps done), ``total_steps``, ``when``
    (UTC) and ``next``. A run that was killed leaves none.

    What all ranks agreed on rank 0 writes. Of errors the first stands: those of other ranks follow from it.
    """

    def __init__(self, path: Path, position: Position, total_steps: int, world: World) -> None:
        self._path, self._position, self._total_steps, self._world = path, position, total_steps, world

    def __enter__(self) -> Ending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._path.is_file() or (getattr(error, "told", False) and not self._world.is_main):
            return
        if isinstance(error, FolderGone):  # there is no place for it, or another run's
            return
        self._leave(*(("diverged", str(error)) if isinstance(error, Diverged) else cause(error, self._world.rank)))

    def write(self, reason: str, detail: str) -> None:
        """The run ends here, on all ranks."""
        if self._world.is_main:
            self._leave(reason, detail)

    def _leave(self, reason: str, detail: str) -> None:
        advice = NEXT[reason].replace("RUN", shlex.quote(str(self._path.parent)))
        leave_last_word(reason, detail, advice)
        record = {
            "reason": reason,
            "detail": detail,
            "step": self._position.step,
            "total_steps": self._total_steps,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "next": advice,
        }
        try:
            replace_file(self._path, json.dumps(record, indent=1) + "\n")
        except OSError as error:  # a full disk may be why it ends
            logger.warning("cannot write %s (%s), which would say: %s, %s", self._path, error, reason, detail)
