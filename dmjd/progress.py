"""Progress of a command on stderr: a live bar on a terminal, a plain line every 15 s in a pipe or a file.

Log records, warnings and printed lines appear above the bar. Output to a closed terminal or pipe is dropped: a command
goes on when its reader has left. Of the processes of a launch only that of rank 0 shows progress.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

if TYPE_CHECKING:  # rich takes 0.1 s to import
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

T = TypeVar("T")

SHOW_AFTER = 2.0
"""Seconds from :func:`begin` during which nothing is shown."""
LINE_SECONDS = 15.0
"""Between two lines where stderr is no terminal."""
_SPEED_SECONDS = 30.0
"""Speed and remaining time are those of the last so many seconds."""
_LONGEST_SECONDS = 1e10
"""Greatest remaining time that is shown; timedelta has a limit."""
_BAR = (10, 40)
"""Least and most columns of the bar."""
_GAP = "  "

_began = time.monotonic()
_display: _Display | None = None
_clear = ""  # of a forked child: removes the frame of its parent's bar from the line
_lock = threading.RLock()


def begin() -> None:
    """Mark the start of a command: the first :data:`SHOW_AFTER` seconds from here show no progress."""
    global _began
    _began = time.monotonic()


def track(items: Iterable[T], label: str, total: int | None = None, *, images: int | None = None) -> Iterator[T]:
    """Yield ``items`` under a :class:`Progress`, which counts each of them when the next one is asked for."""
    with Progress(label, total, images=images) as bar:
        for item in items:
            yield item
            bar.advance()


class Progress:
    """Context manager; call :meth:`advance` when a unit of work is done. Bars may be nested.

    Args:
        label: the unit of work, such as "step", or what is done.
        total: units of the whole work; None: not known, and the line is shown only while no other bar is open in it.
        done: units that were done before.
        images: images in each unit, for the speed in img/s; None: none is shown.
    """

    def __init__(self, label: str, total: int | None, done: int = 0, *, images: int | None = None) -> None:
        self._label, self.total, self._done, self._images = label, total, done, images
        self._values: dict[str, str] = {}
        self._printed = done
        self._begin = self._last_line = time.monotonic()
        self._samples = deque([(self._begin, done)])

    def __enter__(self) -> Progress:
        _open(self)
        return self

    def __exit__(self, *error: object) -> None:
        _close(self)
        if self._done == self.total != self._printed and time.monotonic() - self._begin >= SHOW_AFTER:
            self._print_line()

    def advance(self, units: int = 1, **values: str) -> None:
        """Count ``units`` more, and show ``values``, the most important first."""
        self._done += units
        self._values |= values
        now = time.monotonic()
        if now - self._samples[-1][0] >= 0.5 or len(self._samples) == 1:
            self._samples.append((now, self._done))
            while len(self._samples) > 2 and now - self._samples[0][0] > _SPEED_SECONDS:
                self._samples.popleft()
        if now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self._print_line()

    def _print_line(self) -> None:
        """Print a plain line where no bar can be shown."""
        if not _is_terminal() and not _is_silent():
            self._printed = self._done
            _write(_GAP.join(text for _, text in self._parts()) + "\n")

    def _parts(self) -> list[tuple[int, str]]:
        """(rank, text) in the order of a line; the texts of the highest ranks are left out of a narrow line."""
        now = time.monotonic()
        (first, before), (last, done) = self._samples[0], self._samples[-1]
        speed = (done - before) / (last - first) if done > before and last > first else 0.0
        count = f"{self._label} {self._done}" + (f"/{self.total}" if self.total else "")
        parts = [(0, count if self.total or self._done else self._label)]
        parts += [(2 + number, f"{name} {value}") for number, (name, value) in enumerate(self._values.items())]
        if self._images and speed:
            rate = speed * self._images
            parts.append((3, f"{rate:.0f} img/s" if rate >= 10 else f"{rate:.2g} img/s"))
        if self.total and speed and self._done < self.total:
            left = min(max(0.0, (self.total - done) / speed - (now - last)), _LONGEST_SECONDS)
            parts.append((1, f"ETA {timedelta(seconds=round(left))}"))
        else:
            parts.append((1, f"{timedelta(seconds=round(now - self._begin))}"))
        return parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line that fits the width: parts of high rank drop out, and a bar fills what is left."""
        from rich.progress_bar import ProgressBar
        from rich.segment import Segment
        from rich.text import Text

        width, parts = options.max_width, self._parts()
        while len(parts) > 1 and len(_GAP.join(text for _, text in parts)) > width:
            parts.remove(max(parts))
        texts = [text for _, text in parts]
        spare = width - len(_GAP.join(texts)) - len(_GAP)
        if self.total and spare >= _BAR[0]:
            yield Text(texts.pop(0) + _GAP, end="")
            yield ProgressBar(total=self.total, completed=self._done, width=min(spare, _BAR[1]))
            texts.insert(0, "")
        yield Text(_GAP.join(texts), no_wrap=True, overflow="ellipsis", end="")
        yield Segment.line()


class LogHandler(logging.Handler):
    """Writes log records as lines to stderr, above the bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """See :meth:`logging.Handler.emit`."""
        try:
            _write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


class _Stderr:
    """The stderr of this moment as a file that never raises: its terminal or its reader may be gone."""

    encoding = property(lambda self: getattr(_stderr(), "encoding", "utf-8"))

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            _stderr().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            _stderr().flush()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(_stderr().fileno())


class _Display:
    """The live lines of all open bars. They appear once the command has run for :data:`SHOW_AFTER` seconds."""

    def __init__(self) -> None:
        self.bars: list[Progress] = []
        self.live: Live | None = None
        self._timer = threading.Timer(max(0.0, _began + SHOW_AFTER - time.monotonic()), self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        from rich.console import Console, Group
        from rich.live import Live

        class Plain(Console):
            def show_cursor(self, show: bool = True) -> bool:
                """Keep the cursor: a process that is killed would leave the terminal without one."""
                return False

        with _lock:
            if self.bars:
                # Soft wrap: a long line of the log is broken by the terminal, and stays one line when it is copied.
                console = Plain(file=cast(TextIO, _Stderr()), force_terminal=True, soft_wrap=True)
                self.live = Live(
                    get_renderable=lambda: Group(*self._shown()),
                    console=console,
                    refresh_per_second=4,
                    transient=True,
                    redirect_stdout=sys.stdout.isatty(),
                )
                self.live.start(refresh=True)

    def _shown(self) -> list[Progress]:
        """The bars with a total, and the last one."""
        bars = list(self.bars)
        return [bar for bar in bars if bar.total is not None or bar is bars[-1]]

    def remove(self, bar: Progress) -> None:
        """A bar with a total leaves its last line, unless it is part of another one."""
        self.bars.remove(bar)
        if self.live is not None and bar.total is not None and not any(other.total for other in self.bars):
            self.live.console.print(bar)
        if self.live is not None:
            self.live.refresh()  # what is printed next would stand above the frame from before
        if not self.bars:
            self._timer.cancel()
            if self.live is not None:
                self.live.stop()


def _open(bar: Progress) -> None:
    global _display
    if _is_terminal() and not _is_silent():
        with _lock:
            _display = _display or _Display()
            _display.bars.append(bar)


def _close(bar: Progress) -> None:
    global _display
    with _lock:
        if _display is not None and bar in _display.bars:
            _display.remove(bar)
            if not _display.bars:
                _display = None


def _is_terminal() -> bool:
    """Whether stderr can show a bar."""
    with suppress(OSError, ValueError):
        return os.environ.get("TERM") not in (None, "", "dumb", "unknown") and bool(_stderr().isatty())
    return False


def _is_silent() -> bool:
    """Whether this is not the first process of a launch."""
    return os.environ.get("RANK") not in (None, "", "0")


def _after_fork() -> None:
    """In a child process: the bar is its parent's, and a thread of its parent may have held the locks."""
    global _display, _lock, _clear
    if _display is not None and _display.live is not None:
        _clear = "\r\x1b[K"
    _display, _lock = None, threading.RLock()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


os.register_at_fork(after_in_child=_after_fork)


def _stderr() -> Any:
    return getattr(sys.stderr, "rich_proxied_file", sys.stderr)


def _write(text: str) -> None:
    """Write whole lines to stderr, above the bar if there is one."""
    with _lock:
        live = None if _display is None else _display.live
        if live is None:
            _Stderr().write(_clear + text)
            _Stderr().flush()
        else:
            live.console.print(text, end="", markup=False, highlight=False, emoji=False)
