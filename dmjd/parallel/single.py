"""One process on one device: the reference of the other engines, which inherit its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmjd.config import OptimConfig
from dmjd.models.objective import Trainable
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
        objective: Trainable,
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
        self.settings: dict[str, Any] = {}
        self._precision = precision
        self._clip = config.clip_grad
        self._owned = self._own()
        self._optimizer = build_optimizer(self._owned, config, objective.lr_scales)
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

    def _norm(self) -> Tensor:
        """Put gradients at the parameters that :meth:`_own` returned; their norm, over all parameters of all ranks."""
        return nn.utils.get_total_norm([p.grad for p in self._owned.values() if p.grad is not None])

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
        self.before_change()
        norm = self._norm()
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(self._owned.values(), self._clip, norm)
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
        assert not idle, (
            f"{idle[0]} received no gradient, so it is not part of the loss; freeze it or remove it from the model"
        )
        self._stepped = True

    @contextmanager
    def inference(self) -> Iterator[None]:
        self.objective.eval()
        try:
            with torch.no_grad(), self.micro_batch(last=True):
                yield
        finally:
            self.objective.train()

    def discard(self) -> None:
        self._optimizer.zero_grad(set_to_none=not self._keeps_gradients)

    def local_shards(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._owned.items()}

    def prepare_save(self, averages: Mapping[str, Tensor]) -> None:
        self._copies.prepare(self._share(self._state(averages, self._shapes_of_moments)))

    def save(self, path: Path, averages: Mapping[str, Tensor]) -> Write:
        copied = self._copies.take(self._share(self._state(averages, self._moments)))

        def write() -> list[Path]:
            self._copies.wait()
            return native_files.write(path, self._laid_out(copied), self._group)

        return write

    def before_change(self) -> None:
        self._copies.before_change()

    def load(self, path: Path, averages: Mapping[str, Tensor]) -> None:
        self.before_change()
        native_files.read_into(path, self._laid_out(self._state(averages, self._moments)))

    def _state(
        self, averages: Mapping[str, Tensor], moments: Callable[[nn.Parameter], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """All that a checkpoint holds, by its names there; the tensors are the engine's own, not copies."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._owned.items():
            state[f"{PARAMETER}/{name}"] = parameter.detach()
            if parameter.requires_grad:
                for moment, value in moments(parameter).items():
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

    @staticmethod
    def _shapes_of_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
        """As :meth:`_moments`, on "meta": the check of the first step finds a parameter without moments."""
        moment = torch.empty_like(parameter, device="meta")
        return {name: torch.empty((), device="meta") if name == "step" else moment for name in MOMENTS}

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: value.to("cpu", copy=True) for name, value in self.local_shards().items()}

    def gathered(self) -> AbstractContextManager[Trainable | None]:
        return nullcontext(self.objective)

    def close(self) -> None:
        self._copies.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimConfig, lr_scales: Mapping[str, float]
) -> torch.optim.AdamW:
    """Fused AdamW, whose kernels skip an update on the device where a gradient is not finite.

    One group for each factor of the learning rate and for each of the weight decay, from the lowest learning rate up:
    an engine sets ``lr * lr_scale`` and ``weight_decay * wd_scale`` of each group before every step.

    Args:
        lr_scales: name of a parameter -> factor of its learning rate; 1 for a name that is missing.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            key = lr_scales.get(name, 1.0), float(decays(name, parameter, config))
            groups.setdefault(key, []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[lr_scale, wd_scale], "lr_scale": lr_scale, "wd_scale": wd_scale}
            for lr_scale, wd_scale in sorted(groups, key=lambda key: (key[0], -key[1]))
        ],
        lr=0.0,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )


def decays(name: str, parameter: nn.Parameter, config: OptimConfig) -> bool:
    """Whether weight decay applies. By MAE's rule it does to matrices, convolutions and tokens, not to vectors (biases,
    LayerNorm), nor to what ``config.no_decay`` names by the last part of its name (BEiT: class token and positions).
    """
    return parameter.ndim > 1 and name.rpartition(".")[2] not in config.no_decay
