"""What a run leaves for launchers and people: why it ended, and what to do next."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from dmjd.files import replace_file
from dmjd.parallel.world import World
from dmjd.train.guard import Diverged
from dmjd.train.state import Position

GO_ON = "the same command goes on from this step"
NEXT = {
    "finished": "dmjd knn checkpoint=RUN, dmjd report RUN",
    "signal": GO_ON,
    "time": GO_ON,
    "file": GO_ON,
    "error": "mend what the detail says; the same command goes on from the newest checkpoint",
    "diverged": "see RUN/guard.jsonl; the same command goes on from the newest checkpoint and meets the same steps "
    "again, so mend the data or set other limits in guard before",
}
"""Why a run ended -> what to do next."""

logger = logging.getLogger("dmjd")


class Ending:
    """Writes STOP_REASON, on rank 0. A context manager: whoever leaves it by an exception leaves word as well.

    The file is one JSON object: ``reason`` (a key of :data:`NEXT`), ``detail`` in words, ``step`` (optimizer steps
    done), ``total_steps``, ``when`` (UTC) and ``next``. A run that was killed leaves none.
    """

    def __init__(self, path: Path, position: Position, total_steps: int, world: World) -> None:
        self._path, self._position, self._total_steps, self._world = path, position, total_steps, world

    def __enter__(self) -> Ending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.write("diverged" if isinstance(error, Diverged) else "error", str(error) or type(error).__name__)

    def write(self, reason: str, detail: str) -> None:
        """The run ends here."""
        if not self._world.is_main:
            return
        record = {
            "reason": reason,
            "detail": detail,
            "step": self._position.step,
            "total_steps": self._total_steps,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "next": NEXT[reason].replace("RUN", str(self._path.parent)),
        }
        try:
            replace_file(self._path, json.dumps(record, indent=1) + "\n")
        except OSError as error:  # a full disk may be why it ends
            logger.warning("cannot write %s (%s), which would say: %s, %s", self._path, error, reason, detail)
