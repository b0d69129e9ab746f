"""One process on one device: the reference of the other engines, which inherit its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmjd.config import OptimConfig
from dmjd.models.objective import Objective
from dmjd.parallel import native_files
from dmjd.parallel.engine import StepResult, Write
from dmjd.parallel.native_files import AVERAGE, MOMENTS, PARAMETER
from dmjd.parallel.staging import HostCopies


class SingleEngine:
    """See :class:`~dmjd.parallel.engine.Engine`. Parameters stay float32; ``precision`` is what forward computes in.

    Args:
        objective: on its device and already transformed by :func:`dmjd.parallel.apply.apply`.
        precision: torch.float32, or torch.bfloat16 for autocast.
        cuda_graphs: what is compiled is replayed as CUDA graphs, whose results live until the next micro-batch begins.
        keep_gradients: give gradients their memory for good; graphs need that.
    """

    rehearses = False

    def __init__(
        self,
        objective: Objective,
        config: OptimConfig,
        device: torch.device,
        precision: torch.dtype,
        *,
        cuda_graphs: bool = False,
        keep_gradients: bool = False,
    ) -> None:
        assert all(p.dtype == torch.float32 for p in objective.parameters()), "master parameters are float32"
        self.objective = objective
        self.module: nn.Module = objective
        self.device = device
        self._precision = precision
        self._clip = config.clip_grad
        self._owned = self._own()
        self._optimizer = build_optimizer(self._owned, config)
        self._stepped = False
        self._copies = HostCopies(device)
        self._graphs, self._keeps_gradients = cuda_graphs, cuda_graphs or keep_gradients
        if self._keeps_gradients:
            # The first gradient to come would be taken over, not copied; and where a graph has put it, the same graph
            # puts that of the next micro-batch: in place of a sum there would be twice the last.
            for parameter in self._owned.values():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def _own(self) -> dict[str, nn.Parameter]:
        """The tensors that this rank's optimizer updates, plain, by the objective's names."""
        return dict(self.objective.named_parameters())

    def _collect(self) -> None:
        """Put gradients at the parameters that :meth:`_own` returned."""

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm over all parameters, of all ranks."""
        return nn.utils.get_total_norm(gradients)

    def _laid_out(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """``state`` of :meth:`_state`, or its copy on the CPU, with the layout that a checkpoint records."""
        return state

    def _share(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of :meth:`_state` that this rank writes."""
        return state

    @property
    def _group(self) -> dist.ProcessGroup | None:
        """For saves alone, which run beside the training and must not mix with what ranks do in it."""
        return None

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, self._precision, enabled=self._precision != torch.float32):
            yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, lr: float, weight_decay: float) -> StepResult:
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
            group["weight_decay"] = weight_decay * group["wd_scale"]
        self._collect()
        parameters = [p for p in self._owned.values() if p.grad is not None]
        norm = self._norm([p.grad for p in parameters if p.grad is not None])
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        skipped = (~norm.isfinite()).float()
        # The fused kernel reads this flag on the device and leaves parameters, moments and step counts alone.
        self._optimizer.found_inf = skipped  # type: ignore[attr-defined]
        self._optimizer.step()
        if not self._stepped:
            self._check_moments()
        self.discard()
        return StepResult(norm, 1 - skipped)

    def _check_moments(self) -> None:
        # A parameter outside the loss has no moments at its first save, which the load after it would look for.
        idle = [name for name, p in self._owned.items() if p.requires_grad and not self._optimizer.state[p]]
        assert not idle, f"{idle[0]} took no part in the loss; freeze it, or leave it out of the model"
        self._stepped = True

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=not self._keeps_gradients)

    def local_shards(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._owned.items()}

    def save(self, path: Path, averages: Mapping[str, Tensor]) -> Write:
        copied = self._copies.take(self._share(self._state(averages)))
        return partial(native_files.write, path, self._laid_out(copied), self._group)

    def load(self, path: Path, averages: Mapping[str, Tensor]) -> None:
        native_files.read_into(path, self._laid_out(self._state(averages)))

    def _state(self, averages: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All that a checkpoint holds, by its names there; the tensors are the engine's own, not copies."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._owned.items():
            state[f"{PARAMETER}/{name}"] = parameter.detach()
            if parameter.requires_grad:
                for moment, value in self._moments(parameter).items():
                    state[f"{moment}/{name}"] = value
        for name, value in averages.items():
            state[f"{AVERAGE}/{name}"] = value
        return state

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self._optimizer.state[parameter]
        if not state:  # before the first step; the fused AdamW would begin with the same
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        assert state.keys() == set(MOMENTS), state.keys()
        return state

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: value.to("cpu", copy=True) for name, value in self.local_shards().items()}

    def gathered(self) -> AbstractContextManager[Objective | None]:
        return nullcontext(self.objective)

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def build_optimizer(parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW over two groups, whose kernels skip an update on the device where a gradient is not finite.

    By MAE's rule matrices, convolutions and tokens decay; vectors (biases, LayerNorm) do not, nor does what
    ``config.no_decay`` names by the last part of its name (BEiT: class token and positions). ``lr_scale`` and
    ``wd_scale`` of a group multiply the loop's learning rate and weight decay.
    """
    groups: dict[float, list[nn.Parameter]] = {1.0: [], 0.0: []}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            spared = parameter.ndim <= 1 or name.rpartition(".")[2] in config.no_decay
            groups[0.0 if spared else 1.0].append(parameter)
    return torch.optim.AdamW(
        [{"params": members, "lr_scale": 1.0, "wd_scale": scale} for scale, members in groups.items()],
        lr=0.0,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )
