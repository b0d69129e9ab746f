"""Requests to stop or to save, and the agreement of all ranks on the step at which they do so.

A signal, a file or the clock reaches one rank. Its request is part of the all-reduce of the next step, so all ranks
save at the same step and end together; a rank that ended alone would leave the others waiting in a collective.
"""

from __future__ import annotations

import logging
import math
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
from dmjd.train.signals import default_action, handling

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOPS = ("signal", "time", "file")
ASKS = (*STOPS, "save", "minutes", "error", "no batch")
POLL_STEPS = 10
"""Rank 0 checks for the files every so many steps, since a check on a network disk may take milliseconds."""
OUT_OF_TIME = "the time limit was reached: time_budget, or SLURM_JOB_END_TIME minus time_margin"
ECHO_SECONDS = 5.0
"""Slurm and torchrun may each send the same signal; a second one within this time counts as the same request."""

logger = logging.getLogger("dmjd")


def seconds_of(text: str) -> float:
    """Seconds in ``[D-]H:MM:SS``, as Slurm writes times. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    if match is None:
        raise ConfigError(f"time_budget must be H:MM:SS or D-HH:MM:SS, auto, or null for none, got {text!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def deadline_of(time_budget: str | None, time_margin: float) -> float | None:
    """The time at which the run stops, on the clock of ``time.time()``; None for no limit.

    Args:
        time_budget: as in :class:`dmjd.config.TrainConfig`; it begins now.
        time_margin: seconds before the end of the Slurm job.

    Raises:
        ConfigError: if ``time_budget`` is malformed, the job is not longer than the margin, or its end is in the past:
            Slurm would have ended this process, so the variable is that of another job.
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
    """The requests of this rank, and those that all ranks agreed on.

    Context manager: within it a signal is a request. A second signal of the same kind has its default action, unless it
    comes within :data:`ECHO_SECONDS`.

    Args:
        run: the run folder, in which the files ``stop`` and ``save`` are requests; it may be created later.
        deadline: see :func:`deadline_of`.
        save_minutes: minutes after a checkpoint at which rank 0 asks for the next one; 0 for never.
    """

    def __init__(self, run: Path, world: World, deadline: float | None, save_minutes: float = 0.0) -> None:
        self.reason: str | None = None
        """Why all ranks stop after this step, one of :data:`STOPS`; None if they continue."""
        self.saving = False
        """Whether all ranks save after this step and continue."""
        self.save_due = False
        """Whether all ranks save after this step because the last checkpoint is ``save_minutes`` old."""
        self._world = world
        self._deadline = deadline
        self._save_seconds = 60 * save_minutes or math.inf
        self._saved_at = time.monotonic()
        self._stop, self._save = run / "stop", run / "save"
        self._asked: set[str] = set()
        self._folders: set[Path] = set()  # folders in place of these files; a warning was logged for each
        self._received: dict[signal.Signals, float] = {}  # time of the first of each kind
        self._handlers = ExitStack()
        self._error: UserError | None = None
        self._none = torch.zeros(len(ASKS), device=world.device)

    def __enter__(self) -> Requests:
        self._handlers.enter_context(handling(SIGNALS, self._on_signal))
        self._handlers.enter_context(interrupted_by(self._asked_to_stop))
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers.close()

    def _on_signal(self, number: signal.Signals) -> None:
        first = not self._received
        if time.monotonic() - self._received.setdefault(number, time.monotonic()) > ECHO_SECONDS:
            default_action(number)
        self._asked.add("signal")
        if first and self._world.is_main:
            logger.warning(
                "%s: saving and stopping at the next step; a second signal after %.0f s or more ends the run at once",
                number.name,
                ECHO_SECONDS,
            )

    def fail(self, error: UserError) -> None:
        """This rank failed with ``error``. One process raises it; one of several takes part in steps until all stop."""
        if self._world.size == 1:
            raise error
        self._error = self._error or error
        self._asked.add("error")

    def _asked_to_stop(self) -> bool:
        if self._world.is_main:
            self._poll(step=0)
        return not self._asked.isdisjoint(STOPS)

    def lack_batch(self) -> None:
        """This rank was asked to stop and has no batch; it takes part in a step that is applied on no rank."""
        self._asked.add("no batch")

    @property
    def lacks_batch(self) -> bool:
        """Whether :meth:`lack_batch` was called."""
        return "no batch" in self._asked

    def stop_now(self) -> None:
        """Agree to stop between two steps, for the reason agreed on before or else that of the first rank that has one:
        any rank may be asked to stop while it validates. Collective."""
        reasons = self._world.gather(next((name for name in STOPS if name in self._asked), None))
        self.reason = self.reason or next(filter(None, reasons), None)

    def asks(self, step: int) -> Tensor:
        """The requests of this rank: float32 ``[len(ASKS)]`` on the device, 0 or 1. The host never waits."""
        if self._world.is_main:
            self._poll(step)
        if not self._asked:
            return self._none
        flags = torch.tensor([float(name in self._asked) for name in ASKS])
        return flags.pin_memory().to(self._world.device, non_blocking=True) if self._none.is_cuda else flags

    def _poll(self, step: int) -> None:
        if self._deadline is not None and time.time() > self._deadline:
            self._asked.add("time")
        if time.monotonic() - self._saved_at > self._save_seconds:
            self._asked.add("minutes")
        if step % POLL_STEPS == 0:
            files = ("file", self._stop), ("save", self._save)
            self._asked.update(name for name, path in files if self._file_at(path))

    def _file_at(self, path: Path) -> bool:
        """Whether ``path`` is a file. A folder is no request: the run would not remove it, and it would never end."""
        if not path.exists():
            return False
        if not path.is_dir():
            return True
        if path not in self._folders:
            self._folders.add(path)
            logger.warning("%s is a folder and is ignored; remove it and create a file: touch %s", path, path)
        return False

    def agree(self, step: int, asked: Sequence[float]) -> None:
        """Agree on the requests of ``step``: ``asked`` is the mean over the ranks of :meth:`asks`.

        Raises:
            UserError: the error of a rank that failed; on the other ranks the same message, with ``reported`` set.
            StoppedBefore: if a rank had no batch for this step.
        """
        agreed = [name for name, share in zip(ASKS, asked, strict=True) if share]
        if "error" in agreed:
            self.compare()
        self.saving = self.saving or "save" in agreed
        self.save_due = self.save_due or "minutes" in agreed
        self.reason = self.reason or next((name for name in agreed if name in STOPS), None)
        if "no batch" in agreed:
            raise StoppedBefore(step)

    def compare(self) -> None:
        """Raise on every rank if one has failed. Collective."""
        self._world.all_or_none(self._raise_error)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def restart_timer(self) -> None:
        """Count the minutes to the next checkpoint from now."""
        self.save_due, self._saved_at = False, time.monotonic()
        self._asked.discard("minutes")

    def saved(self) -> None:
        """Remove the files whose requests are done."""
        if self._world.is_main:
            self._asked.discard("save")
            for path in [self._save] * self.saving + [self._stop] * (self.reason is not None):
                if not path.is_dir():
                    path.unlink(missing_ok=True)
        self.saving = False

    def stopping(self) -> tuple[str, str]:
        """Why all ranks stop: one of :data:`STOPS`, and a detail for the exit record. Collective."""
        assert self.reason is not None
        received = self._world.gather([number.name for number in list(self._received)])  # the thread may add to it
        names = [f"{name} at rank {rank}" for rank, signals in enumerate(received) for name in signals]
        details = {"signal": " and ".join(names), "time": OUT_OF_TIME, "file": f"{self._stop} was there"}
        return self.reason, details[self.reason]
