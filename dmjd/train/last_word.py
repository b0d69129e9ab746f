"""What a launch leaves for the batch script that made it: why it ended, in a file of that launch alone.

RUN/STOP_REASON is the run's. Another job that waits for the folder removes it as soon as it holds the lock, which may
be before the script of the job that wrote it has looked.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def leave_last_word(reason: str, detail: str, advice: str = "") -> None:
    """Write ``reason: detail`` and, on a second line, ``advice`` to the file that DMJD_LAST_WORD names, if it is set.

    The first word stands: it is the cause of the others. A disk that takes none may be what it tells of.
    """
    path = os.environ.get("DMJD_LAST_WORD")
    if not path:
        return
    lines = [f"{reason}: {' '.join(detail.split())}", *[advice] * bool(advice)]
    with suppress(OSError), Path(path).open("x", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\n".join(lines) + "\n")
