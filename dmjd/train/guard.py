"""Reading a step's numbers without making the device wait, and stopping at the first that is not finite."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dmjd.models.objective import Losses
from dmjd.parallel.engine import StepResult
from dmjd.parallel.world import World

SHOWN_IDS = 8


class NonFiniteLoss(RuntimeError):
    """The run stops: a loss or gradient was not finite. Checkpoints are as they were; a gradient that was not finite
    moved no parameter.
    """


class StepNumbers(NamedTuple):
    """One step's scalars on the host."""

    loss: float
    mim: float
    vis: float | None
    grad_norm: float
    applied: float
    m_corr: float
    m_pred: float


class PendingStep:
    """A step whose numbers are on their way to the host; ``step`` counts from 1, as the log does.

    The copy is queued right behind the step and read one step later, so the device never idles for it. ``alarm``, of
    any rank, travels with it: once read, it is true on all.
    """

    def __init__(
        self,
        step: int,
        sample_ids: Tensor,
        losses: Losses,
        rates: Tensor,
        result: StepResult,
        world: World,
        alarm: bool = False,
    ) -> None:
        self.step = step
        self._sample_ids = sample_ids
        self._world = world
        visible = losses.masked if losses.visible is None else losses.visible
        scalars = torch.stack((losses.total, losses.masked, visible, result.grad_norm, result.applied)).detach()
        self._has_visible = losses.visible is not None
        # Means over all ranks, then this rank's own loss, which tells whose samples to name.
        self.alarm = False
        alarms = scalars.new_full((1,), float(alarm))  # filled by a kernel, where a copy would make the host wait
        values = torch.cat((world.mean(torch.cat((scalars, rates, alarms))), losses.total.detach().reshape(1)))
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = values

    def read(self) -> StepNumbers:
        """Wait for the numbers.

        Raises:
            NonFiniteLoss: naming the step and the sample ids.
        """
        if self._event is not None:
            self._event.synchronize()
        loss, mim, vis, grad_norm, applied, m_corr, m_pred, alarm, own_loss = self._host.tolist()
        self.alarm = alarm > 0
        numbers = StepNumbers(loss, mim, vis if self._has_visible else None, grad_norm, applied, m_corr, m_pred)
        if not applied or not math.isfinite(loss):
            fate = "no checkpoint was touched" if applied else "the step was not applied and no checkpoint was touched"
            raise NonFiniteLoss(
                f"step {self.step} gave a loss of {loss} and a gradient norm of {grad_norm} "
                f"{self._where(own_loss)}; {fate}"
            )
        return numbers

    def _where(self, own_loss: float) -> str:
        ids = self._sample_ids.tolist()
        more = f", and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
        samples = f"samples {', '.join(map(str, ids[:SHOWN_IDS]))}{more}"
        if self._world.size == 1:
            return f"on {samples}"
        if math.isfinite(own_loss):
            return f"(rank {self._world.rank}: its own loss was {own_loss}, so look at another rank's sentence)"
        return f"on rank {self._world.rank}, {samples}"
