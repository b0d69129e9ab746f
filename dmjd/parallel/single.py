"""One process on one device: the engine that the others must agree with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from dmjd.config import OptimConfig
from dmjd.errors import CheckpointError
from dmjd.models.objective import Objective
from dmjd.parallel.engine import StepResult
from dmjd.parallel.optimizer import build_optimizer

MODEL_FILE = "model.pt"
OPTIMIZER_FILE = "optimizer.pt"


class SingleEngine:
    """See :class:`~dmjd.parallel.engine.Engine`. Parameters stay float32; ``precision`` is what forward computes in.

    Args:
        objective: already transformed by :func:`dmjd.parallel.apply.apply`.
        precision: torch.float32, or torch.bfloat16 for autocast.
    """

    def __init__(self, objective: Objective, config: OptimConfig, device: torch.device, precision: torch.dtype) -> None:
        assert all(p.dtype == torch.float32 for p in objective.parameters()), "master parameters are float32"
        self.objective = objective.to(device)
        self.module: nn.Module = self.objective
        self.device = device
        self._precision = precision
        self._clip = config.clip_grad
        self._optimizer = build_optimizer(objective, config)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with torch.autocast(self.device.type, self._precision, enabled=self._precision != torch.float32):
            yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, lr: float, weight_decay: float) -> StepResult:
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            group["weight_decay"] = weight_decay * group["wd_scale"]
        parameters = [p for p in self.objective.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        skipped = (~norm.isfinite()).float()
        # The fused kernel reads this flag on the device and leaves parameters, moments and step counts alone.
        self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self._optimizer.step()
        self.discard()
        return StepResult(norm, 1 - skipped)

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def save(self, path: Path) -> None:
        torch.save(self.objective.state_dict(), path / MODEL_FILE)
        torch.save(self._optimizer.state_dict(), path / OPTIMIZER_FILE)

    def load(self, path: Path) -> None:
        load_strictly(self.objective, read_model(path), path)
        self._optimizer.load_state_dict(torch.load(path / OPTIMIZER_FILE, map_location=self.device, weights_only=True))

    def full_state_dict(self) -> dict[str, Tensor]:
        return {
            name: value.detach().to("cpu", torch.float32, copy=True)
            for name, value in self.objective.state_dict().items()
        }

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def read_model(path: Path) -> dict[str, Tensor]:
    """The parameters saved under ``path``, on the CPU."""
    return torch.load(path / MODEL_FILE, map_location="cpu", weights_only=True)


def load_strictly(module: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load ``state``, or say in one sentence how it differs from ``module``.

    Raises:
        CheckpointError: on missing, unknown or differently shaped parameters; ``module`` is then unchanged.
    """
    own = module.state_dict()
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        differences = [
            f"{len(names)} {what} ({names[0]}{', ...' if len(names) > 1 else ''})"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise CheckpointError(f"{path} is a checkpoint of another model: {' and '.join(differences)} parameters")
    for name, value in state.items():
        if own[name].shape != value.shape:
            raise CheckpointError(
                f"{path} is a checkpoint of another model: {name} is {tuple(value.shape)} there and "
                f"{tuple(own[name].shape)} here"
            )
    module.load_state_dict(state)
