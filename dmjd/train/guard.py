"""The guard against bad steps: skip them, roll back to a checkpoint before them, or stop the run.

A step whose loss or gradient is not finite changes no parameter; the engine ensures that on the device. The guard reads
the step's numbers one step later, from a copy that does not block the device. It decides by means over the ranks alone,
so every rank takes the same decision without communication.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dmjd.config import GuardConfig
from dmjd.errors import Alarm, Diverged, StorageError
from dmjd.parallel.engine import StepResult
from dmjd.parallel.world import World

SHOWN_IDS = 8
SIGMAS_PER_MAD = 1.4826
"""The standard deviation of a normal distribution in median absolute deviations."""

logger = logging.getLogger("dmjd")


class StepNumbers(NamedTuple):
    """One step's scalars on the host, means over all ranks. values: those of the task, "loss" among them."""

    values: Mapping[str, float]
    grad_norm: float
    applied: float

    @property
    def loss(self) -> float:
        return self.values["loss"]

    @property
    def finite(self) -> bool:
        """Whether the loss is finite and the step was applied."""
        return self.applied == 1 and math.isfinite(self.loss)


class Reading(NamedTuple):
    """The numbers of one step on the host.

    own_loss: the loss of this rank.
    asked: for each request, the share of ranks that made it.
    """

    numbers: StepNumbers
    own_loss: float
    asked: Sequence[float]


class PendingStep:
    """The numbers of a step while they are copied to the host; ``step`` counts from 1, as the log does.

    The copy is queued behind the step and read one step later, so the device does not wait for the host.

    Args:
        sample_ids: int64 ``[B]``, of this rank's batch.
        values: 0-d float32 tensors by name, "loss" among them.
        asks: float32 ``[requests]``, 1 for each request of this rank; values and requests share one all-reduce.
    """

    def __init__(
        self,
        step: int,
        sample_ids: Tensor,
        values: Mapping[str, Tensor],
        result: StepResult,
        asks: Tensor,
        world: World,
    ) -> None:
        self.step = step
        self.sample_ids = sample_ids
        self._names = tuple(values)
        scalars = torch.stack((*values.values(), result.grad_norm, result.applied)).detach()
        # Means over all ranks, then this rank's own loss: the report names the samples of ranks with a bad loss.
        packed = torch.cat((world.mean(torch.cat((scalars, asks))), values["loss"].detach().reshape(1)))
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # a wait that spins would take a core from the loader
            self._event.record()
        else:
            self._host = packed

    def read(self) -> Reading:
        """Wait for the numbers."""
        if self._event is not None:
            self._event.synchronize()
        count = len(self._names)
        numbers = self._host.tolist()
        grad_norm, applied, *asked, own_loss = numbers[count:]
        values = dict(zip(self._names, numbers[:count], strict=True))
        return Reading(StepNumbers(values, grad_norm, applied), own_loss, asked)


class SpikeRule:
    """Detects loss spikes: ``steps`` high losses in a row, each above ``median + height * 1.4826 * MAD`` of the
    ``window`` losses before it.

    A spike moves the median and the MAD (median absolute deviation) less than a mean and a variance. High losses enter
    the window too, so a loss that stays high becomes the new level.

    For independent, normal losses around a constant level and a window of some hundred, the rule reports a false spike
    about once in ``(1 - Phi(height)) ** -steps`` steps: with height 6 and 3 steps, once in 1e27. A falling loss makes
    it rarer. A slowly oscillating loss makes it more frequent for any ``steps``, so the window should cover a period.

    Args:
        height: in standard deviations.
        steps: high losses in a row.
        window: number of losses kept; no loss is high before the window is full.
    """

    def __init__(self, height: float, steps: int, window: int) -> None:
        self._height = height
        self._steps = steps
        self._losses: deque[float] = deque(maxlen=window)
        self._run = 0  # high losses in a row

    def add(self, loss: float) -> bool:
        """Add ``loss`` to the window; returns whether it is high."""
        high = len(self._losses) == self._losses.maxlen and loss > self._bound()
        self._run = self._run + 1 if high else 0
        self._losses.append(loss)
        return high

    @property
    def spike(self) -> bool:
        """Whether the last losses are a spike."""
        return self._run >= self._steps

    def _bound(self) -> float:
        middle = median(self._losses)
        return middle + self._height * SIGMAS_PER_MAD * median(abs(loss - middle) for loss in self._losses)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "run": self._run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self._losses.maxlen)
        self._run = state["run"]


class Guard:
    """Counts the bad steps among the last ``window`` steps and lists them in ``guard.jsonl``.

    A line of the list is a JSON object with ``event``: "skipped" or "high", with the step, its batch, its numbers and
    the samples of each rank; "rollback" or "stop", with the steps that caused it. Steps that are repeated after a
    restart are listed again, so lines have the time. The ranks listed are those with a loss that is not finite; all
    ranks if the cause was a gradient or a high loss.

    Args:
        report: path of the list, created with its first line; rank 0 writes.
    """

    def __init__(self, config: GuardConfig, report: Path, world: World) -> None:
        self.rollbacks = 0
        self._config = config
        self._report = report
        self._world = world
        self._doubtful: list[dict[str, Any]] = []
        self._rule = None if config.spike is None else SpikeRule(config.spike, config.spike_steps, config.window)

    @property
    def in_doubt(self) -> bool:
        """Whether there are bad steps among the last ``window`` steps."""
        return bool(self._doubtful)

    @property
    def may_roll_back(self) -> bool:
        """Whether ``max_rollbacks`` allows another rollback."""
        return self.rollbacks < self._config.max_rollbacks

    def check(self, step: int, batch: int, sample_ids: Tensor, reading: Reading) -> None:
        """Check the numbers of ``step``, which read batch number ``batch``. Collective.

        Raises:
            Alarm: if the run has to roll back. StorageError: if the list cannot be written.
        """
        self._doubtful = [row for row in self._doubtful if row["step"] > step - self._config.window]
        numbers, high = reading.numbers, False
        if numbers.finite:
            high = self._rule is not None and self._rule.add(numbers.loss)
            if not high:
                return
        row = {
            "event": "high" if high else "skipped",
            "step": step,
            "batch": batch,
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "ranks": self._ranks(reading.own_loss, sample_ids),
        }
        self._doubtful.append(row)
        self._list(row)
        skipped = [row["step"] for row in self._doubtful if row["event"] == "skipped"]
        if high and self._rule is not None and self._rule.spike:
            raise Alarm(step - self._config.spike_steps + 1, step)
        if not high and len(skipped) > self._config.max_skips:
            raise Alarm(skipped[0], step)
        if not high and self._world.is_main:
            logger.warning("%s; the step was skipped, training continues", _describe(row))

    def roll_back(self, alarm: Alarm, rollbacks: int, to: int, passed_over: tuple[int, int]) -> None:
        """Record rollback number ``rollbacks``: the run is at step ``to`` again and skips batches ``passed_over``."""
        self.rollbacks = rollbacks
        begin, end = passed_over
        row = {"event": "rollback", "steps": [alarm.first, alarm.last], "to": to, "passed_over": [begin, end]}
        self._list(row)
        if self._world.is_main:
            logger.warning(
                "steps %d to %d are bad (see %s): rolled back to step %d, skipping batches %d to %d; rollback %d of %d",
                *(alarm.first, alarm.last, self._report, to, begin, end - 1, rollbacks, self._config.max_rollbacks),
            )

    def stop(self, alarm: Alarm, why: str) -> NoReturn:
        """Raise Diverged with the last bad step, its samples, and ``why`` the run does not roll back. Collective."""
        rows = [row for row in self._doubtful if row["step"] >= alarm.first]
        self._list({"event": "stop", "steps": [row["step"] for row in rows], "why": why})
        more = f", the last of {len(rows)} bad steps since step {alarm.first}" if len(rows) > 1 else ""
        error = Diverged(f"{_describe(rows[-1])}{more}; the run stops, {why}; {self._report} names all")
        error.reported = not self._world.is_main
        raise error

    def _ranks(self, own_loss: float, sample_ids: Tensor) -> list[dict[str, Any]]:
        own: dict[str, Any] = {"rank": self._world.rank, "loss": own_loss, "samples": sample_ids.tolist()}
        ranks = self._world.gather(own)
        return [rank for rank in ranks if not math.isfinite(rank["loss"])] or ranks

    def _list(self, row: dict[str, Any]) -> None:
        line = {**row, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}

        def append() -> None:
            try:
                with self._report.open("a") as file:
                    file.write(json.dumps(_plain(line)) + "\n")
            except OSError as error:
                raise StorageError(
                    f"cannot write {self._report}: {error.strerror}; fix the cause and run the same command to continue"
                ) from error

        self._world.on_main(append)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rollbacks": self.rollbacks,
            "doubtful": list(self._doubtful),
            "rule": None if self._rule is None else self._rule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rollbacks = state["rollbacks"]
        self._doubtful = list(state["doubtful"])
        if self._rule is not None and state["rule"] is not None:  # guard.spike may change between launches
            self._rule.load_state_dict(state["rule"])


def _describe(row: dict[str, Any]) -> str:
    first, *others = row["ranks"]
    ids = first["samples"]
    more = f", and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    ranks = f", and {len(others)} more rank(s)" if others else ""
    return (
        f"step {row['step']} gave a loss of {row['loss']} and a gradient norm of {row['grad_norm']} "
        f"on rank {first['rank']}, samples {', '.join(map(str, ids[:SHOWN_IDS]))}{more}{ranks}"
    )


def _plain(value: Any) -> Any:
    """``value`` with NaN and infinity as text, since JSON cannot represent them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
