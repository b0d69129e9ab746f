"""Progress of a run: a live bar on a terminal, a plain line every 15 s in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from dmjd.train.guard import StepNumbers

LINE_SECONDS = 15.0


class Progress:
    """Context manager; call :meth:`advance` once per step.

    Args:
        total: steps of the whole run.
        done: steps done by earlier launches.
    """

    def __init__(self, total: int, done: int) -> None:
        self._console = Console(stderr=True)
        self._total, self._first, self._done = total, done, done
        self._begin = self._last_line = time.monotonic()
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("pre-training", total=total, completed=done)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._silent_if_closed():
            self._bar.stop()

    @contextmanager
    def _silent_if_closed(self) -> Iterator[None]:
        """Stop the output, and not the run, if the terminal or the reading end of the pipe is closed."""
        try:
            yield
        except (OSError, SystemExit):  # rich exits on a broken pipe
            self._console.quiet = True

    def advance(self, numbers: StepNumbers) -> None:
        """Show that one more step is done, with its loss."""
        self._done += 1
        self._bar.update(self._task, completed=self._done, description=f"loss {numbers.loss:.4f}")
        now = time.monotonic()
        if self._console.is_terminal or (now - self._last_line < LINE_SECONDS and self._done < self._total):
            return
        self._last_line = now
        left = (now - self._begin) / (self._done - self._first) * (self._total - self._done)
        with self._silent_if_closed():
            self._console.print(
                f"step {self._done}/{self._total}  loss {numbers.loss:.4f}  ETA {timedelta(seconds=round(left))}",
                highlight=False,
            )
