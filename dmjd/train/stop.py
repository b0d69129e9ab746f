"""Who may ask a run to stop or to save, and how all its ranks come to do so at the same step.

A rank hears a signal, a file or a clock alone. What it has heard rides along in the reduction of the next step, so that
all ranks save at the same step and leave together; a rank that acted by itself would leave the others waiting for it.
"""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

from dmjd.data.waiting import interrupted_by
from dmjd.errors import ConfigError, StoppedBefore, UserError
from dmjd.parallel.launch import slurm_times
from dmjd.parallel.world import World
from dmjd.train.signals import die_of, listening

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOPS = ("signal", "time", "file")
ASKS = (*STOPS, "save", "error", "no batch")
POLL_STEPS = 10
"""Rank 0 looks for files every so many steps: a network disk may take milliseconds to say that one is not there."""
OUT_OF_TIME = "its time is over, by time_budget or by SLURM_JOB_END_TIME less time_margin"
ECHO_SECONDS = 5.0
"""A launcher's second signal of a kind, of which Slurm and torchrun each send one, comes within this time."""

logger = logging.getLogger("dmjd")


def seconds_of(text: str) -> float:
    """Seconds in ``[D-]H:MM:SS``, as Slurm writes times. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    if match is None:
        raise ConfigError(f"time_budget must be H:MM:SS or D-HH:MM:SS, auto, or null for none, got {text!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def deadline_of(time_budget: str | None, time_margin: float) -> float | None:
    """When the run should stop, on the clock of ``time.time()``; None for never.

    Args:
        time_budget: as in :class:`dmjd.config.PretrainConfig`; it begins now.
        time_margin: seconds before the end of the Slurm job.

    Raises:
        ConfigError: if ``time_budget`` is none, the whole job is not longer than the margin, or its end is in the past:
            Slurm would have ended this process, so the variable is left over from another job.
    """
    if time_budget is None:
        return None
    if time_budget != "auto":
        return time.time() + seconds_of(time_budget)
    start, end = slurm_times()
    if end is None:
        return None
    if end < time.time():
        ended = datetime.fromtimestamp(end, timezone.utc).isoformat(" ", "seconds")
        raise ConfigError(
            f"SLURM_JOB_END_TIME={end} is {ended}, in the past, so it is not this job's: unset it, or set "
            "time_budget=null"
        )
    if start is not None and end - start <= time_margin:
        raise ConfigError(
            f"this job's time of {end - start} seconds (from SLURM_JOB_START_TIME={start} to SLURM_JOB_END_TIME={end}) "
            f"is not above time_margin={time_margin:g}: each launch would stop after one step; take a longer time or a "
            "smaller time_margin"
        )
    return float(end) - time_margin


class Requests:
    """What this rank was asked for, and what all have agreed on. A context manager: within it, signals only ask.

    The second signal of a kind ends the process as if nobody listened, unless it is a launcher's echo of the first.

    Args:
        run: the run folder, in which ``stop`` and ``save`` are looked for; it need not exist yet.
        deadline: see :func:`deadline_of`.
    """

    def __init__(self, run: Path, world: World, deadline: float | None) -> None:
        self.reason: str | None = None
        """Why all ranks stop after this step; None while they do not."""
        self.saving = False
        """Whether all ranks save after this step and go on."""
        self._world = world
        self._deadline = deadline
        self._stop, self._save = run / "stop", run / "save"
        self._asked: set[str] = set()
        self._folders: set[Path] = set()  # in the place of files, of which the log has been told
        self._heard: dict[signal.Signals, float] = {}  # when each came first
        self._listening = ExitStack()
        self._error: UserError | None = None
        self._nothing = torch.zeros(len(ASKS), device=world.device)

    def __enter__(self) -> Requests:
        self._listening.enter_context(listening(SIGNALS, self._hear))
        self._listening.enter_context(interrupted_by(self._asked_to_stop))
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.close()

    def _hear(self, number: signal.Signals) -> None:
        first = not self._heard
        if time.monotonic() - self._heard.setdefault(number, time.monotonic()) > ECHO_SECONDS:
            die_of(number)
        self._asked.add("signal")
        if first and self._world.is_main:
            logger.warning(
                "%s: saving at the next step and stopping; another one, after %.0f s, ends it at once",
                number.name,
                ECHO_SECONDS,
            )

    def fail(self, error: UserError) -> None:
        """This rank cannot go on. By itself it raises; among others it keeps step until all have heard of it."""
        if self._world.size == 1:
            raise error
        self._error = self._error or error
        self._asked.add("error")

    def _asked_to_stop(self) -> bool:
        if self._world.is_main:
            self._look_around(step=0)
        return not self._asked.isdisjoint(STOPS)

    def lack_batch(self) -> None:
        """This rank was asked to stop and has no batch; it takes part in steps that all ranks then undo."""
        self._asked.add("no batch")

    @property
    def lacks_batch(self) -> bool:
        """Whether :meth:`lack_batch` was called."""
        return "no batch" in self._asked

    def stop_now(self) -> None:
        """All ranks stop between two steps, for what rank 0 was asked unless they have agreed. Collective."""
        reason = self._world.on_main(lambda: next((name for name in STOPS if name in self._asked), None))
        self.reason = self.reason or reason

    def asks(self, step: int) -> Tensor:
        """float32 ``[len(ASKS)]`` on the device: what rides along with ``step``. Never makes the host wait."""
        if self._world.is_main:
            self._look_around(step)
        if not self._asked:
            return self._nothing
        flags = torch.tensor([float(name in self._asked) for name in ASKS])
        return flags.pin_memory().to(self._world.device, non_blocking=True) if self._nothing.is_cuda else flags

    def _look_around(self, step: int) -> None:
        if self._deadline is not None and time.time() > self._deadline:
            self._asked.add("time")
        if step % POLL_STEPS == 0:
            files = ("file", self._stop), ("save", self._save)
            self._asked.update(name for name, path in files if self._file_at(path))

    def _file_at(self, path: Path) -> bool:
        """A folder may hold something, so a run does not remove it, and it would ask again for ever."""
        if not path.exists():
            return False
        if not path.is_dir():
            return True
        if path not in self._folders:
            self._folders.add(path)
            logger.warning("%s is a folder, which asks for nothing; remove it and ask by a file: touch %s", path, path)
        return False

    def agree(self, step: int, asked: Sequence[float]) -> None:
        """Take in what all ranks were asked for, as :meth:`asks` had it in ``step``.

        Raises:
            UserError: what a rank failed with, there; the same sentence, already told, on the others.
            StoppedBefore: if a rank had no batch for it.
        """
        agreed = [name for name, share in zip(ASKS, asked, strict=True) if share]
        if "error" in agreed:
            self.compare()
        self.saving = self.saving or "save" in agreed
        self.reason = self.reason or next((name for name in agreed if name in STOPS), None)
        if "no batch" in agreed:
            raise StoppedBefore(step)

    def compare(self) -> None:
        """Raise on every rank if one has failed; they all call this at the same step."""
        self._world.all_or_none(self._complain)

    def _complain(self) -> None:
        if self._error is not None:
            raise self._error

    def saved(self) -> None:
        """What was asked of rank 0 by a file has been done, and the file goes."""
        if self._world.is_main:
            self._asked.discard("save")
            for path in [self._save] * self.saving + [self._stop] * (self.reason is not None):
                if not path.is_dir():
                    path.unlink(missing_ok=True)
        self.saving = False

    def stopping(self) -> tuple[str, str]:
        """Why all ranks stop, as one of :data:`STOPS` and in words. Every rank calls this."""
        assert self.reason is not None
        heard = self._world.gather([number.name for number in list(self._heard)])  # the thread may add to it
        names = [f"{name} at rank {rank}" for rank, signals in enumerate(heard) for name in signals]
        words = {"signal": " and ".join(names), "time": OUT_OF_TIME, "file": f"{self._stop} was there"}
        return self.reason, words[self.reason]
