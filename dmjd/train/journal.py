"""Logging of a run: means over steps, log rows, timings, trackers and the progress bar.

``log.jsonl`` has results only, so the log of a resumed run equals that of an uninterrupted one byte for byte.
Values that depend on the machine (images per second, waiting, wall time) are in ``timing.jsonl``, at the same steps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dmjd.compose import stored
from dmjd.config import TrainConfig
from dmjd.parallel.world import World
from dmjd.progress import Progress
from dmjd.runs.folder import RunFolder
from dmjd.runs.heartbeat import Heartbeat, read_heartbeats
from dmjd.train.guard import StepNumbers
from dmjd.train.metrics import RunLog, StepMeans, workers_needed
from dmjd.train.stopwatch import Stopwatch
from dmjd.train.throughput import Throughput
from dmjd.train.trackers import Trackers

WAIT_WARNING = 0.1
"""Fraction of a lap spent waiting for data from which a warning is logged."""

ROWS, MOST_STEPS = 200, 100
"""Rows of a log for ``log_every=null``, and the largest number of steps of a row then."""

logger = logging.getLogger("dmjd")


def steps_per_row(total_steps: int) -> int:
    """Steps of a row for ``log_every=null``."""
    return max(1, min(total_steps // ROWS, MOST_STEPS))


class _Outputs(NamedTuple):
    """The outputs of rank 0."""

    log: RunLog
    timing: RunLog
    trackers: Trackers
    progress: Progress
    throughput: Throughput


class Journal:
    """The log of a run. All ranks keep the means; only the rank that called :meth:`open` writes.

    Args:
        total_steps: of the whole run.
        steps_per_epoch: for the epochs in the log.
        throughput: makes the columns of ``timing.jsonl``; called on the rank that opens the log.
    """

    def __init__(
        self,
        config: TrainConfig,
        total_steps: int,
        steps_per_epoch: int,
        world: World,
        throughput: Callable[[], Throughput],
    ) -> None:
        self.clock = Stopwatch()
        self._config, self._world, self._throughput = config, world, throughput
        self._total_steps = total_steps
        self._every = config.log_every or steps_per_row(total_steps)
        self._steps_per_epoch = steps_per_epoch
        self._window = StepMeans()
        self._offsets = {"log": 0, "timing": 0}
        self._laps, self._warned = 0, False
        self.stall_seconds = 0.0  # that training waited for checkpoints since the last timing row
        self.save_seconds = 0.0  # from the step of the newest checkpoint to its commit; 0 if none since that row
        self._resumed_at = 0.0  # seconds of the run at the checkpoint that this launch resumed from
        self._lap_step = 0  # the window may hold steps of an earlier launch; their time is not part of this lap
        self._outputs: _Outputs | None = None
        self._open_files = ExitStack()

    def open(self, run: RunFolder, done: int) -> None:
        """Open the outputs behind the rows of step ``done``, the number of steps done. For rank 0."""
        self._lap_step = done
        if self._outputs is None:  # the start of this launch, not a rollback
            self._count_lost(run)
        throughput = self._throughput()
        log = RunLog(run.log, self._offsets["log"])
        self._open_files.callback(log.close)
        timing = RunLog(run.timing, self._offsets["timing"])
        self._open_files.callback(timing.close)
        trackers = Trackers(
            run.path,
            tensorboard=self._config.tensorboard,
            wandb_project=self._config.wandb,
            run_name=run.path.name,
            config=stored(self._config),
            resumed_step=done,
        )
        self._open_files.callback(trackers.close)
        progress = self._open_files.enter_context(
            Progress("step", self._total_steps, done, images=self._config.batch_size)
        )
        self._outputs = _Outputs(log, timing, trackers, progress, throughput)

    def close(self) -> None:
        """Close the outputs; :meth:`open` opens them again after a rollback."""
        self._open_files.close()

    @contextmanager
    def heartbeat(self, run: RunFolder, steps_done: Callable[[], int]) -> Iterator[None]:
        """Write this rank's heartbeat whenever a phase begins, until the context ends."""
        engine, data = self._config.engine, self._config.data
        # Longer than the time-outs of data and collectives, whose errors name the cause.
        step_limit = 60 * (max(engine.step_timeout, data.timeout) + 1)
        limit = 60 * (max(engine.start_timeout, data.timeout) + 1)
        with Heartbeat(run.path, self._world.rank, step_limit, limit) as heartbeat:
            self.clock.on_phase = lambda phase: heartbeat.beat(
                steps_done(), phase, self.clock.elapsed, self.clock.spent["lost"]
            )
            self.clock.on_phase("start")
            try:
                yield
            finally:
                self.clock.enter("stop")

    def log_step(self, step: int, numbers: StepNumbers, lr: float) -> None:
        """Add the numbers of ``step``, counted from 1; their means over some steps become a row (``log_every``)."""
        self._window.add(numbers)
        if self._outputs is not None:
            epoch = -(-step // self._steps_per_epoch)
            self._outputs.progress.advance(
                loss=f"{numbers.loss:.4f}", epoch=f"{epoch}/{self._config.epochs}", lr=f"{lr:.1e}"
            )
        if step % self._every and step != self._total_steps:
            return
        images = (step - self._lap_step) * self._config.batch_size
        self._lap_step = step
        self.log_row(step, {**self._window.flush(), "lr": lr})
        seconds, waited = self.clock.lap()
        if self._outputs is None:
            return
        timing = {
            "step": step,
            "ete": self._outputs.throughput.views * step / self._steps_per_epoch,
            **self._outputs.throughput.row(images, seconds, waited),
            "seconds": self.clock.elapsed,
            **{f"{account}_seconds": spent for account, spent in self.clock.spent.items()},
            "checkpoint_stall_seconds": self.stall_seconds,
        }
        if self.save_seconds:
            timing["save_seconds"] = self.save_seconds
        self.stall_seconds = self.save_seconds = 0.0
        self._outputs.timing.write(timing)
        self._outputs.trackers.scalars(timing, step)
        self._watch_waiting(seconds, waited)

    def _count_lost(self, run: RunFolder) -> None:
        """Count the time that the previous launch spent after the checkpoint that this one resumes from as lost."""
        before = next((beat for beat in read_heartbeats(run.path) if beat.rank == 0), None)
        if before is not None:
            known = self.clock.spent["lost"]
            self.clock.lose(before.seconds - self._resumed_at + before.lost - known)

    def _watch_waiting(self, seconds: float, waited: float) -> None:
        """Warn once per launch if data loading limits the training speed, with the number of workers to set."""
        self._laps += 1
        if self._laps == 1 or self._warned or waited < WAIT_WARNING * seconds:  # the first lap starts the workers
            return
        self._warned = True
        workers, processors = self._config.workers, len(os.sched_getaffinity(0))
        needed = workers_needed(workers, seconds, waited)
        advice = f"set workers={needed}"
        if needed > processors:
            advice += f", but this process may use {processors} CPU(s) only; allow more, or use smaller image files"
        logger.warning(
            "%.0f %% of the time is spent waiting for data, with workers=%d; %s",
            100 * waited / seconds,
            workers,
            advice,
        )

    def log_rows(self, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """:meth:`log_row` of each."""
        for row in rows:
            self.log_row(step, row)

    def log_row(self, step: int, row: Mapping[str, float]) -> None:
        """Write one row to the log and the trackers."""
        if self._outputs is not None:
            line = {"step": step, "epoch": step / self._steps_per_epoch, **row}
            self._outputs.log.write(line)
            self._outputs.trackers.scalars(line, step)

    def log_pictures(self, step: int, pictures: Mapping[str, Path]) -> None:
        """Pass pictures in the run folder to the trackers."""
        if self._outputs is not None:
            self._outputs.trackers.pictures(pictures, step)

    def sync(self) -> None:
        """Flush to disk, before a checkpoint stores the lengths of the files: a crash must not remove rows before."""
        if self._outputs is not None:
            self._outputs.log.sync()
            self._outputs.timing.sync()

    def state_dict(self) -> dict[str, Any]:
        if self._outputs is not None:
            self._offsets = {"log": self._outputs.log.offset, "timing": self._outputs.timing.offset}
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
        if self._outputs is None:
            self._resumed_at = seconds
            self.clock.resume(seconds, spent)
        else:
            self.clock.rewind(seconds, spent)
