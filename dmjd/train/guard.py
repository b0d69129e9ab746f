"""What a run does about steps that go wrong: skip them, go back before them, stop.

A step whose loss or gradient is not finite moves nothing; the engine sees to that on the device. The guard hears of it
one step later, through a copy that no device waits for. All that it judges by is a mean over the ranks, or follows from
such means, so every rank comes to the same judgement without asking the others.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dmjd.config import GuardConfig
from dmjd.errors import Alarm, Diverged, StorageError
from dmjd.models.objective import Losses
from dmjd.parallel.engine import StepResult
from dmjd.parallel.world import World
from dmjd.train.spike import SpikeRule

SHOWN_IDS = 8

logger = logging.getLogger("dmjd")


class StepNumbers(NamedTuple):
    """One step's scalars on the host, means over all ranks."""

    loss: float
    mim: float
    vis: float | None
    grad_norm: float
    applied: float
    m_corr: float
    m_pred: float

    @property
    def finite(self) -> bool:
        """Whether the step moved the parameters, as it should."""
        return self.applied == 1 and math.isfinite(self.loss)


class Reading(NamedTuple):
    """What came to the host of one step.

    own_loss: of this rank.
    asked: for each request that rides along, the share of ranks that have it.
    """

    numbers: StepNumbers
    own_loss: float
    asked: Sequence[float]


class PendingStep:
    """A step whose numbers are on their way to the host; ``step`` counts from 1, as the log does.

    The copy is queued right behind the step and read one step later, so the device never idles for it.

    Args:
        sample_ids: of this rank's batch.
        rates: float32 ``[2]``, m_corr and m_pred.
        asks: float32 ``[requests]``, 1 for what this rank was asked for; they share the one reduction of a step.
    """

    def __init__(
        self,
        step: int,
        sample_ids: Tensor,
        losses: Losses,
        rates: Tensor,
        result: StepResult,
        asks: Tensor,
        world: World,
    ) -> None:
        self.step = step
        self.sample_ids = sample_ids
        visible = losses.masked if losses.visible is None else losses.visible
        scalars = torch.stack((losses.total, losses.masked, visible, result.grad_norm, result.applied)).detach()
        self._has_visible = losses.visible is not None
        # Means over all ranks, then this rank's own loss, which tells whose samples to name.
        values = torch.cat((world.mean(torch.cat((scalars, rates, asks))), losses.total.detach().reshape(1)))
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = values

    def read(self) -> Reading:
        """Wait for the numbers."""
        if self._event is not None:
            self._event.synchronize()
        loss, mim, vis, grad_norm, applied, m_corr, m_pred, *asked, own_loss = self._host.tolist()
        numbers = StepNumbers(loss, mim, vis if self._has_visible else None, grad_norm, applied, m_corr, m_pred)
        return Reading(numbers, own_loss, asked)


class Guard:
    """Counts what went wrong in the last ``window`` steps, and lists it in ``guard.jsonl``.

    A line of the list is a JSON object with ``event``: "skipped" or "high", with the step, its batch, its numbers and
    which ranks had which samples; "rollback" or "stop", with the steps that led to it. A stretch that is done again
    after a restart is listed again, so lines have the time. Ranks are those whose own loss was not finite, or, if it
    was a gradient or a high loss, all.

    Args:
        report: path of the list, made with the first line; rank 0 writes.
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
        """Whether the last ``window`` steps were not all as they should."""
        return bool(self._doubtful)

    @property
    def may_roll_back(self) -> bool:
        """Whether there are rollbacks left."""
        return self.rollbacks < self._config.max_rollbacks

    def judge(self, step: int, batch: int, sample_ids: Tensor, reading: Reading) -> None:
        """Take in the numbers of ``step``, which read batch number ``batch``. Every rank calls this.

        Raises:
            Alarm: if skipping is not enough. StorageError: if the list cannot be written.
        """
        self._doubtful = [row for row in self._doubtful if row["step"] > step - self._config.window]
        numbers, high = reading.numbers, False
        if numbers.finite:
            high = self._rule is not None and self._rule.take_in(numbers.loss)
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
            logger.warning("%s; it was skipped and the run goes on", _describe(row))

    def roll_back(self, alarm: Alarm, rollbacks: int, to: int, passed_over: tuple[int, int]) -> None:
        """The run is at step ``to`` again, its ``rollbacks``-th time, and will not read batches ``passed_over``."""
        self.rollbacks = rollbacks
        begin, end = passed_over
        row = {"event": "rollback", "steps": [alarm.first, alarm.last], "to": to, "passed_over": [begin, end]}
        self._list(row)
        if self._world.is_main:
            logger.warning(
                "steps %d to %d went wrong (see %s): back to step %d, and past batches %d to %d; rollback %d of %d",
                *(alarm.first, alarm.last, self._report, to, begin, end - 1, rollbacks, self._config.max_rollbacks),
            )

    def give_up(self, alarm: Alarm, why: str) -> NoReturn:
        """Raises Diverged, whose sentence names the last bad step, its samples and ``why`` the run does not go back."""
        rows = [row for row in self._doubtful if row["step"] >= alarm.first]
        self._list({"event": "stop", "steps": [row["step"] for row in rows], "why": why})
        more = f", the last of {len(rows)} bad steps since step {alarm.first}" if len(rows) > 1 else ""
        error = Diverged(f"{_describe(rows[-1])}{more}; the run stops, {why}; {self._report} names all")
        error.reported = not self._world.is_main
        raise error

    def _ranks(self, own_loss: float, sample_ids: Tensor) -> list[dict[str, Any]]:
        own: dict[str, Any] = {"rank": self._world.rank, "loss": own_loss, "samples": sample_ids.tolist()}
        told = self._world.gather(own)
        return [one for one in told if not math.isfinite(one["loss"])] or told

    def _list(self, row: dict[str, Any]) -> None:
        line = {**row, "time": datetime.now(timezone.utc).isoformat(timespec="seconds")}

        def append() -> None:
            try:
                with self._report.open("a") as file:
                    file.write(json.dumps(_plain(line)) + "\n")
            except OSError as error:
                raise StorageError(
                    f"cannot write {self._report}: {error.strerror}; mend that, and the same command goes on"
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
        if self._rule is not None and state["rule"] is not None:  # it may be switched on and off between launches
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
    """JSON has no word for NaN and infinity, so they become text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
