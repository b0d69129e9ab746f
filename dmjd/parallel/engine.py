"""Interface between the training loop and an engine, which owns parameters, gradients and optimizer state.

The loop sets learning rates and accumulation, handles bad steps and decides when to stop. An engine clips, checks for
non-finite gradients, updates, and writes and reads its own state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dmjd.models.objective import Trainable

Write = Callable[[], list[Path]]
"""Writes what a save has staged and returns the files that this rank wrote. Collective; called once, on any thread."""


class StepResult(NamedTuple):
    """0-d float32 tensors on the device: reading them at once would make the host wait, so the loop reads them later.

    grad_norm: over all parameters, before clipping.
    applied: 1 if parameters and moments moved, 0 if that norm was not finite and nothing moved.
    """

    grad_norm: Tensor
    applied: Tensor


class Engine(Protocol):
    """The operations that the loop calls on an engine."""

    objective: Trainable
    """The objective itself. Its weights may be sharded: read them through the methods below."""
    module: nn.Module
    """To be called for the forward pass of a step: the objective, or a wrapper of it."""
    device: torch.device
    rehearses: bool
    """Whether the first backward of a launch adds in another order than all later ones, so that it has to be thrown
    away for a resumed run to have the bits of an uninterrupted one."""
    settings: dict[str, Any]
    """Configuration of the library that it uses, for the run folder; empty if it uses none but torch."""

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

    def inference(self) -> AbstractContextManager[None]:
        """Surrounds forward passes of :attr:`objective` in evaluation mode without gradients. Collective.

        Values of :meth:`local_shards` may be changed before it, after :meth:`before_change`, and changed back after it.
        """

    def local_shards(self) -> dict[str, Tensor]:
        """This rank's part of every parameter, float32 on the device, under the objective's names.

        The tensors follow the training; their shapes are the engine's business.
        """

    def prepare_save(self, averages: Mapping[str, Tensor]) -> None:
        """Allocate the host memory of :meth:`save` in a thread, since pinning it takes seconds. Optional. Collective.

        Args:
            averages: as for :meth:`save`.
        """

    def save(self, path: Path, averages: Mapping[str, Tensor]) -> Write:
        """Copy parameters and optimizer state, and ``averages`` with them. Collective.

        Training may go on before the result is called; another save may not begin before that has returned. On CUDA
        the copy goes on beside the training: see :meth:`before_change`.

        Args:
            path: an existing folder that all ranks share; what is returned writes into it.
            averages: tensors laid out as those of the same names in :meth:`local_shards`.
        """

    def before_change(self) -> None:
        """To be called before parameters, optimizer state or averages are changed other than by :meth:`step` and
        :meth:`load`, or by what follows them: the device first copies what the newest save has begun to copy."""

    def load(self, path: Path, averages: Mapping[str, Tensor]) -> None:
        """Read what :meth:`save` wrote, at any number of processes; ``averages`` are filled in place. Collective, and
        callable between any two steps.

        Raises:
            CheckpointError: if it belongs to another model or another kind of engine; nothing has changed then.
        """

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter, whole, float32 on the CPU; empty on all ranks but the first. Collective."""

    def gathered(self) -> AbstractContextManager[Trainable | None]:
        """The objective with whole parameters on rank 0, to be called there alone; None elsewhere. Collective.

        It is to be read, not trained, and not kept: it may be a copy that goes with the context.
        """

    def close(self) -> None:
        """Release what the engine holds, together with the other ranks; the process can then exit with code 0."""
