"""The seam between the loop and whatever owns parameters, gradients and optimizer state.

The loop decides learning rates, accumulation, what a bad step means and when to stop; an engine clips, checks for
non-finite gradients, updates, and moves its own state to and from disk. Nothing else crosses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dmjd.models.objective import Objective


class StepResult(NamedTuple):
    """0-d float32 tensors on the device: reading them at once would make the host wait, so the loop reads them later.

    grad_norm: over all parameters, before clipping.
    applied: 1 if parameters and moments moved, 0 if that norm was not finite and nothing moved.
    """

    grad_norm: Tensor
    applied: Tensor


class Engine(Protocol):
    """What the loop may ask of an engine."""

    objective: Objective
    """The objective itself, for whoever reads weights or predicts outside a step."""
    module: nn.Module
    """What to call for the forward pass of a step: the objective, or what wraps it."""
    device: torch.device

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward *and* backward of one micro-batch; ``last`` marks the one after which :meth:`step` follows.

        A context and not a flag on ``backward``: DDP decides in forward whether gradients will be reduced.
        """

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of ``loss``, which the loop has divided by the number of micro-batches."""

    def step(self, lr: float, weight_decay: float) -> StepResult:
        """Clip, update if the gradient is finite, and drop the gradients."""

    def discard(self) -> None:
        """Drop accumulated gradients without a step."""

    def save(self, path: Path) -> None:
        """Write parameters and optimizer state into the existing folder ``path``. Called on rank 0 alone."""

    def load(self, path: Path) -> None:
        """Read what :meth:`save` wrote. Raises CheckpointError if it belongs to another model."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter, float32 on the CPU."""

    def close(self) -> None:
        """Release what the engine holds; the process can then exit with code 0."""
