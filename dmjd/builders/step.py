"""One training step of a configuration: engine, preparation, target and average, put together here and nowhere else."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmjd.builders import build_mask_spec, build_objective, build_tokenizer, check_target, target_dim, token_grid
from dmjd.builders.average import ENCODER, Ema, EmaTeacher
from dmjd.builders.data import image_size
from dmjd.builders.layer_decay import Group, group_table
from dmjd.builders.model import materialised
from dmjd.builders.preparation import Preparation, Prepared
from dmjd.builders.weights import load_weights
from dmjd.config import DownstreamConfig, EngineConfig, PretrainConfig, TrainConfig, check_batch
from dmjd.data.batch import Batch
from dmjd.masking import measured_rates
from dmjd.models.flops import count_flops
from dmjd.models.objective import Losses, Objective, Trainable, mean_losses
from dmjd.parallel.build import build_engine, select_device
from dmjd.parallel.engine import Engine, StepResult
from dmjd.parallel.world import World, alone
from dmjd.targets import TARGETS, TeacherTarget, Tokenizer

C = TypeVar("C", bound=TrainConfig)


@dataclass(frozen=True)
class TrainStep(ABC, Generic[C]):
    """One optimizer step is ``forward_backward(batch, epoch)``, then ``update(lr)``. The host does not wait for the
    device in either.

    engine: owns parameters, gradients and optimizer state; ``engine.objective`` is the model with its losses.
    prepare: batch to inputs of the objective; ``prepare.tokenizer`` makes the targets of pre-training.
    ema: moving average of weights; None without ``ema_decay``.
    parameters: of the encoder, and of the whole model, on all processes together.
    began_from: the initial weights that were read, and those that were not; empty without any.
    """

    config: C
    engine: Engine
    prepare: Any
    ema: Ema | None
    parameters: tuple[int, int]
    began_from: str = ""

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """For the engine's ``save`` and ``load``; empty without ``ema_decay``."""
        return {} if self.ema is None else self.ema.averages

    @abstractmethod
    def forward_backward(self, batch: Batch, epoch: int, *, skip: bool = False) -> Any:
        """Accumulate gradients over ``engine.grad_accum_steps`` micro-batches. Collective where the engine is.

        Args:
            batch: this process's images of one step, on the engine's device.
            epoch: keys the random draws.
            skip: make the loss NaN, so that :meth:`update` changes nothing on any rank.

        Returns:
            Means over the micro-batches.
        """

    def micro_batches(self, batch: Batch, epoch: int, skip: bool) -> Iterator[tuple[Any, Any]]:
        """Accumulate gradients over ``engine.grad_accum_steps`` micro-batches: the prepared inputs of each, and the
        output of the objective, whose ``total`` is the loss. Arguments as for ``forward_backward``."""
        parts = self.config.engine.grad_accum_steps
        for index, micro in enumerate(batch.split(parts)):
            prepared = self.prepare(micro, epoch)
            with self.engine.micro_batch(last=index + 1 == parts):
                output = self.engine.module(*prepared.inputs)
                total = output.total * math.nan if skip else output.total
                self.engine.backward(trapped(total) / parts)
            yield prepared, output

    def update(self, lr: float) -> StepResult:
        """One optimizer step, then one of the average. Gradients are dropped."""
        result = self.engine.step(lr, self.config.optim.weight_decay)
        if self.ema is not None:
            self.ema.update(result.applied)
        return result


@dataclass(frozen=True)
class Step(TrainStep[PretrainConfig]):
    """A step of pre-training; ``ema`` is that of the encoder."""

    prepare: Preparation

    def forward_backward(self, batch: Batch, epoch: int, *, skip: bool = False) -> tuple[Losses, Tensor]:
        """As :meth:`TrainStep.forward_backward`.

        Returns:
            Means over the micro-batches: the losses, and the measured m_corr and m_pred, float32 ``[2]``.
        """
        losses: list[Losses] = []
        rates: list[Tensor] = []
        for prepared, output in self.micro_batches(batch, epoch, skip):
            losses.append(output)
            rates.append(measured_rates(prepared.masked_views))
        return mean_losses(losses), torch.stack(rates).mean(dim=0)


D = TypeVar("D", bound=DownstreamConfig)


class Buffers:
    """The buffers of an objective that checkpoints hold, such as running statistics of BatchNorm, and their moving
    average with ``ema_decay``. A part of the loop's state; the same on every rank.

    A forward pass changes them. Changes of a step that was not applied are undone: a skipped step, and the backward
    pass that an engine throws away, leave no trace.
    """

    def __init__(self, objective: nn.Module, ema_decay: float | None) -> None:
        kept = objective.state_dict().keys()
        self._current = {name: buffer for name, buffer in objective.named_buffers() if name in kept}
        self._before: dict[str, Tensor] = {}  # a step
        self._decay = ema_decay
        self.averages = {} if ema_decay is None else self._copies()

    def __bool__(self) -> bool:
        return bool(self._current)

    def _copies(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self._current.items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Before the forward passes of a step: undo those of a step that was thrown away."""
        for name, value in self._before.items():
            self._current[name].copy_(value)
        self._before = self._copies()

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """After an optimizer step: keep what its forward passes changed if ``applied``, 0-d on the device, is 1."""
        for name, buffer in self._current.items():
            buffer.copy_(torch.where(applied > 0, buffer, self._before[name]))
        self._before = {}
        for name, average in self.averages.items():
            buffer = self._current[name]
            if buffer.is_floating_point():
                assert self._decay is not None
                average.lerp_(buffer, (1 - self._decay) * applied)
            else:
                average.copy_(buffer)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of the average and of the buffers; a second call undoes it."""
        for name, average in self.averages.items():
            held = self._current[name].clone()
            self._current[name].copy_(average)
            average.copy_(held)

    def state_dict(self) -> dict[str, Any]:
        parts = {"buffers": self._current} | ({"averages": self.averages} if self.averages else {})
        return {key: {name: value.cpu().clone() for name, value in part.items()} for key, part in parts.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = {"buffers": self._current} | ({"averages": self.averages} if self.averages else {})
        for key, part in own.items():
            assert state[key].keys() == part.keys(), f"{key} {sorted(state[key])} for {sorted(part)}"
            for name, value in part.items():
                value.copy_(state[key][name])
        self._before = {}


@dataclass(frozen=True, kw_only=True)
class DownstreamStep(TrainStep[D]):
    """A step of a model with the head of a task; ``ema`` is that of the whole model.

    groups: of the optimizer, from the embeddings to the head.
    buffers: of the whole model.
    """

    groups: list[Group]
    buffers: Buffers = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", Buffers(self.engine.objective, self.config.ema_decay))

    def forward_backward(self, batch: Batch, epoch: int, *, skip: bool = False) -> Mapping[str, Tensor]:
        """As :meth:`TrainStep.forward_backward`.

        Returns:
            Means over the micro-batches, 0-d float32: "loss", and the 0-d fields of the objective's output by name
            ("class" of ``class_``).
        """
        self.buffers.begin()
        sums = defaultdict[str, list[Tensor]](list)
        for _, output in self.micro_batches(batch, epoch, skip):
            for name, value in output._asdict().items():
                if value.ndim == 0:
                    sums["loss" if name == "total" else name.rstrip("_")].append(value.detach())
        return {name: torch.stack(values).mean() for name, values in sums.items()}

    def update(self, lr: float) -> StepResult:
        result = super().update(lr)
        self.buffers.update(result.applied)
        return result

    @contextmanager
    def with_average(self) -> Iterator[None]:
        """Within it parameters and buffers have the values of the average, and the averages theirs. Nothing may be
        trained or saved there."""
        assert self.ema is not None, "there is an average with ema_decay only"
        self.engine.before_change()
        for each in (self.ema, self.buffers):
            each.swap()
        try:
            yield
        finally:
            for each in (self.ema, self.buffers):
                each.swap()


def checked_world(config: TrainConfig, world: World | None) -> World:
    """``world``, or one process on ``engine.device``. Raises ConfigError if the batch cannot be divided among it."""
    world = alone(select_device(config.engine.device)) if world is None else world
    check_batch(config.batch_size, config.engine.grad_accum_steps, world.size)
    return world


def downstream_parts(
    objective: Trainable, config: DownstreamConfig, world: World, load: Callable[[], str] | None
) -> dict[str, Any]:
    """Engine, average and groups of ``objective``: the fields of a :class:`DownstreamStep` but for ``prepare``.
    Collective where the engine is.

    Args:
        load: reads the initial weights into ``objective`` and describes them.
    """
    parameters = tuple(sum(p.numel() for p in part.parameters()) for part in (objective.model.encoder, objective))
    began_from = "" if load is None else world.all_or_none(load)
    groups = group_table(objective, config.optim)
    micro_batch = config.batch_size // (config.engine.grad_accum_steps * world.size)
    engine = build_engine(objective, config.engine, config.optim, world, micro_batch)
    return {
        "config": config,
        "engine": engine,
        "ema": None if config.ema_decay is None else Ema(engine.local_shards(), config.ema_decay),
        "parameters": parameters,
        "began_from": began_from,
        "groups": groups,
    }


def trapped(loss: Tensor) -> Tensor:
    """``loss``, with a gradient that is not finite where the loss is not: engines check gradients alone.

    The L1 distance to an infinite target has a gradient of +-1, and the step would move the parameters.
    """
    value = loss.detach()
    return loss * (1 + (value - value))


def build_step(config: PretrainConfig, world: World | None = None, initial: Path | None = None) -> Step:
    """Model, engine, target and average of ``config``. Collective where the engine is.

    Args:
        world: one process on ``engine.device`` if left out.
        initial: weights to begin with, as :func:`~dmjd.builders.weights.load_weights` takes them.

    Raises:
        UserError: for parts that do not fit each other, and for weights that do not fit the model.
    """
    build_mask_spec(config.mask, token_grid(config))  # a wrong mask is found before weights of a target are read
    world, parts = checked_world(config, world), config.engine.grad_accum_steps
    tokenizer = build_tokenizer(config)
    objective = build_objective(config, tokenizer.dim)
    parameters = tuple(sum(p.numel() for p in part.parameters()) for part in (objective.model.encoder, objective))
    began_from = "" if initial is None else world.all_or_none(lambda: load_weights(objective, initial, config.weights))
    engine = build_engine(objective, config.engine, config.optim, world, config.batch_size // (parts * world.size))
    encoder = engine.objective.model.encoder
    ema = None if config.ema_decay is None else Ema(engine.local_shards(), config.ema_decay, ENCODER)
    if ema is not None and isinstance(tokenizer, TeacherTarget):
        tokenizer.teacher = EmaTeacher(encoder, ema, config.target.layers)
    prepare = _preparation(config, tokenizer, len(encoder.blocks), compiles(config.engine, engine.device))
    return Step(config, engine, prepare, ema, (parameters[0], parameters[1]), began_from)


def compiles(engine: EngineConfig, device: torch.device) -> bool:
    """Whether to compile what a step computes besides the model: on the CPU compilation takes longer than it saves."""
    return engine.compile != "none" and device.type == "cuda"


def objective_and_inputs(config: PretrainConfig, images: int) -> tuple[Objective, Prepared]:
    """The objective of a step before any engine transforms it, and its inputs for ``images`` black images, to be
    counted: no weights of a target are read.

    Tensors are made on the default device and under the active mode: on "meta" or under FakeTensorMode they have shapes
    and take no memory. The state of torch's CPU generator stays as it is.
    """
    check_target(config)
    dim = target_dim(config)
    objective = materialised(lambda: build_objective(config, dim))
    height, width = token_grid(config)
    target = _BlankTarget(dim, config.method.mim_loss == "cross_entropy", config.backbone.patch_size, height * width)
    prepare = _preparation(config, target, len(objective.model.encoder.blocks))
    return objective, prepare(Batch.empty(images, [image_size(config)], config.data.channels), 0)


def flops_per_image(config: PretrainConfig) -> int:
    """Model FLOPs of one image with all its views, forward and backward; nothing is computed."""
    with torch.device("meta"):
        objective, prepared = objective_and_inputs(config, 1)
        return count_flops(objective, prepared.inputs)


def _preparation(config: PretrainConfig, tokenizer: Tokenizer, depth: int, compiled: bool = False) -> Preparation:
    grid, data, target = token_grid(config), config.data, TARGETS[config.target.name]
    if compiled and target.blocks is not None:
        for block in target.blocks(tokenizer):
            block.forward = torch.compile(block.forward, dynamic=False)  # the forward: a teacher's hooks stay outside
    return Preparation(
        build_mask_spec(config.mask, grid),
        grid,
        tokenizer,
        tuple(data.mean),
        tuple(data.std),
        flip=data.flip,
        seed=config.seed,
        depth=depth,
        drop_path=config.backbone.drop_path,
        jitter=data.jitter,
        compiled=compiled,
        compiled_target=compiled and target.one_graph,
    )


@dataclass(frozen=True)
class _BlankTarget:
    """Zeros in the shape of the targets, in place of a frozen network or a teacher, whose work is not counted."""

    dim: int
    codes: bool
    patch: int
    tokens: int

    def __call__(self, images: Tensor) -> Tensor:
        kind = torch.int64 if self.codes else torch.float32
        return torch.zeros(images.shape[0], self.tokens, 1 if self.codes else self.dim, dtype=kind)

    def render(self, values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        height, width = grid
        return np.zeros((height * self.patch, width * self.patch, 3), dtype=np.uint8)
