"""torch.profiler for a window of training steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from dmjd.errors import ConfigError
from dmjd.files import replace_file
from dmjd.parallel.world import World

FOLDER = "profile"
ROWS = 30
"""Rows of the table: the ops or kernels with the longest total time."""


class StepRange(NamedTuple):
    """The steps ``first`` to ``last``, both included and counted from 1 as in the log."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, total_steps: int) -> StepRange:
        """Parse ``"steps:10-14"`` for a run of ``total_steps``. Raises ConfigError if it is malformed or too long."""
        found = re.fullmatch(r"steps:([0-9]+)-([0-9]+)", text)
        if found is None:
            raise ConfigError(f"profile must be steps:FIRST-LAST, such as steps:10-14, got {text!r}")
        window = cls(int(found[1]), int(found[2]))
        if not 1 <= window.first <= window.last:
            raise ConfigError(f"profile={text} must name steps from 1 on, the first before the last")
        if window.last > total_steps:
            raise ConfigError(f"profile={text} exceeds the {total_steps} steps of the run; choose earlier steps")
        return window


class Profiler:
    """Context manager; call :meth:`before` before every step. Without a window it does nothing.

    ``RUN/profile/steps-10-14-rank-00000.json.gz`` is a trace for chrome://tracing or Perfetto; the ``.txt`` beside it
    is a table of the longest kernels (on the CPU: ops). A run that stops within the window writes the steps done.
    """

    def __init__(self, window: StepRange | None, run: Path, world: World) -> None:
        self._window, self._cuda = window, world.device.type == "cuda"
        self._folder, self._rank = run / FOLDER, world.rank
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start the profiler if ``step``, counted from 1, is the first of the window; write files after the last."""
        if self._window is None:
            return
        if self._profile is not None and step > self._window.last:
            self._finish()
        elif step == self._window.first:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            self._profile = profile(activities=kinds)
            self._profile.start()

    def _finish(self) -> None:
        assert self._profile is not None
        assert self._window is not None
        done, self._profile = self._profile, None
        if self._cuda:
            torch.cuda.synchronize()
        done.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._window.first}-{self._window.last}-rank-{self._rank:05d}"
        draft = self._folder / f".{name}.json.gz"
        done.export_chrome_trace(str(draft))
        draft.replace(self._folder / f"{name}.json.gz")
        longest = f"self_{'cuda' if self._cuda else 'cpu'}_time_total"
        replace_file(self._folder / f"{name}.txt", done.key_averages().table(sort_by=longest, row_limit=ROWS))

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._finish()
