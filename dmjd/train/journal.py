"""What a run says of itself while it goes: averages, log lines, timings and the progress bar.

``log.jsonl`` holds only what the mathematics decides, so an interrupted run's log equals an uninterrupted one's byte
for byte; what the machine decides (images a second, waiting, wall time) is in ``timing.jsonl`` under the same steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dmjd.compose import stored
from dmjd.config import PretrainConfig
from dmjd.parallel.world import World
from dmjd.runs.folder import RunFolder
from dmjd.runs.heartbeat import read_heartbeats
from dmjd.train.guard import StepNumbers
from dmjd.train.metrics import RunLog, Window, workers_needed
from dmjd.train.progress import Progress
from dmjd.train.stopwatch import Stopwatch
from dmjd.train.throughput import Throughput
from dmjd.train.trackers import Trackers

WAIT_WARNING = 0.1
"""The part of a lap spent in waiting for data that is worth a warning."""

logger = logging.getLogger("dmjd")


class Journal:
    """The run's log. Silent ranks keep the averages and write nothing.

    Args:
        total_steps: of the whole run.
        steps_per_epoch: to tell epochs from steps.
    """

    def __init__(self, config: PretrainConfig, total_steps: int, steps_per_epoch: int, world: World) -> None:
        self.clock = Stopwatch()
        self._config, self._world = config, world
        self._total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._window = Window()
        self._offsets = {"log": 0, "timing": 0}
        self._laps, self._warned = 0, False
        self._stalled, self._saving = 0.0, 0.0
        self._resumed_at = 0.0  # seconds of the run at the checkpoint that this launch goes on from
        self._lap_step = 0  # the window may hold steps of an earlier launch, whose time this one did not take
        self._log: RunLog | None = None
        self._timing: RunLog | None = None
        self._progress: Progress | None = None
        self._trackers: Trackers | None = None

    def open(self, run: RunFolder, done: int, stack: ExitStack) -> None:
        """Begin to write, behind what earlier launches wrote up to step ``done``."""
        self._lap_step = done
        if self._log is None:  # else this launch goes on, from an earlier step of its own
            self._count_lost(run)
        self._throughput = Throughput.of(self._config, self._world)
        self._log = RunLog(run.log, self._offsets["log"])
        stack.callback(self._log.close)
        self._timing = RunLog(run.timing, self._offsets["timing"])
        stack.callback(self._timing.close)
        self._trackers = Trackers(
            run.path,
            tensorboard=self._config.tensorboard,
            wandb_project=self._config.wandb,
            run_name=run.path.name,
            config=stored(self._config),
            resumed_step=done,
        )
        stack.callback(self._trackers.close)
        self._progress = stack.enter_context(Progress(self._total_steps, done))

    def take_in(self, step: int, numbers: StepNumbers, lr: float) -> None:
        """The numbers of ``step``, counted from 1; every ``log_every`` steps their means become a line."""
        self._window.add(numbers)
        if self._progress is not None:
            self._progress.advance(numbers)
        if step % self._config.log_every and step != self._total_steps:
            return
        images = (step - self._lap_step) * self._config.batch_size
        self._lap_step = step
        self.note(step, {**self._window.flush(), "lr": lr})
        seconds, waited = self.clock.lap()
        if self._timing is not None and self._trackers is not None:
            timing = {
                "step": step,
                "ete": self._config.mask.views * step / self._steps_per_epoch,
                **self._throughput.row(images, seconds, waited),
                "seconds": self.clock.elapsed,
                **{f"{account}_seconds": spent for account, spent in self.clock.spent.items()},
                "checkpoint_stall_seconds": self._stalled,
            }
            if self._saving:
                timing["save_seconds"] = self._saving
            self._stalled = self._saving = 0.0
            self._timing.write(timing)
            self._trackers.scalars(timing, step)
            self._watch_waiting(seconds, waited)

    def _count_lost(self, run: RunFolder) -> None:
        """What the launch before did after the checkpoint that this one goes on from was in vain."""
        before = next((beat for beat in read_heartbeats(run.path) if beat.rank == 0), None)
        if before is not None:
            known = self.clock.spent["lost"]
            self.clock.lose(before.seconds - self._resumed_at + before.lost - known)

    def _watch_waiting(self, seconds: float, waited: float) -> None:
        """Say once a launch that loading is what takes the time, and what would help."""
        self._laps += 1
        if self._laps == 1 or self._warned or waited < WAIT_WARNING * seconds:  # the first lap starts the workers
            return
        self._warned = True
        workers, processors = self._config.workers, len(os.sched_getaffinity(0))
        needed = workers_needed(workers, seconds, waited)
        advice = f"workers={needed} would hide it"
        if needed > processors:
            advice += f", but this process may use {processors} processor(s) only; take more, or smaller image files"
        logger.warning(
            "%.0f %% of the time goes into waiting for data, with workers=%d; %s",
            100 * waited / seconds,
            workers,
            advice,
        )

    def note(self, step: int, row: Mapping[str, float]) -> None:
        """One line of the log, which goes to the trackers as well."""
        if self._log is not None and self._trackers is not None:
            line = {"step": step, "epoch": step / self._steps_per_epoch, **row}
            self._log.write(line)
            self._trackers.scalars(line, step)

    def show(self, step: int, pictures: Mapping[str, Path]) -> None:
        """Pictures in the run folder, for the trackers."""
        if self._trackers is not None:
            self._trackers.pictures(pictures, step)

    def stalled(self, seconds: float) -> None:
        """Training waited so long for a checkpoint."""
        self._stalled += seconds

    def saved(self, seconds: float) -> None:
        """A checkpoint is on the disk, so long after its step."""
        self._saving = seconds

    def sync(self) -> None:
        """To disk, before a checkpoint records how long the files are: it must not know of rows that a crash takes."""
        for log in (self._log, self._timing):
            if log is not None:
                log.sync()

    def state_dict(self) -> dict[str, Any]:
        for name, log in (("log", self._log), ("timing", self._timing)):
            if log is not None:
                self._offsets[name] = log.offset
        return {
            "window": self._window.state_dict(),
            "offsets": dict(self._offsets),
            "seconds": self.clock.elapsed,
            "spent": self.clock.spent,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.load_state_dict(state["window"])
        self._offsets = dict(state["offsets"])
        seconds, spent = state["seconds"], state.get("spent", {})
        if self._log is None:
            self._resumed_at = seconds
            self.clock.resume(seconds, spent)
        else:
            self.clock.rewind(seconds, spent)
