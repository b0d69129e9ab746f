"""Moments, gradients and, at stage 3, parameters divided among processes: ZeRO behind the engine protocol."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmjd.config import EngineConfig, OptimConfig
from dmjd.errors import ConfigError
from dmjd.models.objective import Trainable
from dmjd.parallel.apply import blocks
from dmjd.parallel.deepspeed import files as zero_files
from dmjd.parallel.deepspeed.config import deepspeed_config
from dmjd.parallel.engine import StepResult, Write
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.fsdp import filled
from dmjd.parallel.single import build_optimizer
from dmjd.parallel.staging import HostCopies, divide
from dmjd.parallel.world import World

logger = logging.getLogger("dmjd")


class DeepSpeedEngine:
    """See :class:`~dmjd.parallel.engine.Engine`. Stages 1, 2 and 3; parameters stay float32 on all.

    DeepSpeed reads the norm on the host in every step, so the host waits for the device there once, which the native
    engines do not. Its count of steps is not used: it goes on in a step that was skipped.

    Args:
        objective: on its device and already transformed by :func:`dmjd.parallel.apply.apply`.
        bare: :func:`~dmjd.parallel.fsdp.without_parameters` of the objective before any transform.
        micro_batch: images of this process in a micro-batch.
    """

    rehearses = False

    def __init__(
        self,
        objective: Trainable,
        bare: Trainable,
        engine: EngineConfig,
        optim: OptimConfig,
        world: World,
        precision: torch.dtype,
        micro_batch: int,
    ) -> None:
        assert all(p.dtype == torch.float32 for p in objective.parameters()), "master parameters are float32"
        self.objective, self.device = objective, world.device
        self.stage = ENGINES[engine.name].stage
        self._bare, self._world, self._precision = bare, world, precision
        self._saving = world.new_group()
        bf16 = precision == torch.bfloat16
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks(objective.model)]
        parameters = sum(p.numel() for p in objective.parameters())
        self.settings = world.all_or_none(
            lambda: deepspeed_config(
                engine, optim, bf16=bf16, micro_batch=micro_batch,
                parameters=parameters, block=max(sizes),
            )
        )  # fmt: skip
        optimizer = build_optimizer(dict(objective.named_parameters()), optim, objective.lr_scales)
        if self.stage == 3:
            leaf = zero_files.import_deepspeed("deepspeed.utils").set_z3_leaf_module
            for block in blocks(objective.model):  # gathered as one, since hooks inside a graph would break it
                leaf(block, True)
                _list_once(block)
                if not all(p.requires_grad for p in objective.parameters()) and any(
                    p.requires_grad for p in block.parameters()
                ):
                    block.register_forward_pre_hook(_require_gradient)
            if world.is_main:
                _log_gathered(self.settings["zero_optimization"], parameters, max(sizes))
        self._ds = _initialise(objective, optimizer, self.settings, engine.deepspeed_config, world.step_group())
        if self.stage == 3:
            _let_host_run_ahead(self._zero.parameter_offload.get_param_coordinator(), objective)
        self.module: nn.Module = self._ds
        self._copies = HostCopies(world.device)

    @property
    def _zero(self) -> Any:
        """DeepSpeed's wrapper of the optimizer, which owns the partitions."""
        return self._ds.optimizer

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        # DeepSpeed's own autocast surrounds its forward; this one is for what else a loop computes here.
        with torch.autocast(self.device.type, self._precision, enabled=self._precision != torch.float32):
            yield

    def backward(self, loss: Tensor) -> None:
        self._ds.backward(loss)

    def step(self, lr: float, weight_decay: float) -> StepResult:
        for group in self._zero.param_groups:
            group["lr"] = lr * group["lr_scale"]
            group["weight_decay"] = weight_decay * group["wd_scale"]
        self.before_change()
        self._ds.step()
        norm, applied = self._ds.get_global_grad_norm(), self._ds.was_step_applied()
        return StepResult(self._scalar(norm), self._scalar(float(applied)))

    def _scalar(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, torch.float32, copy=True)
        return torch.full((), value, device=self.device)  # torch.tensor() copies, for which the host waits

    @contextmanager
    def inference(self) -> Iterator[None]:
        self._ds.eval()
        try:
            with torch.no_grad(), self.micro_batch(last=True):
                yield
        finally:
            self._ds.train()
        if self.stage == 3:  # what is kept for a backward pass that does not come
            self._zero.parameter_offload.partition_all_parameters()

    def discard(self) -> None:
        # As DeepSpeed does after a skipped step; its two optimizers have no common method for this.
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if self.stage == 3:
            zero.averaged_gradients = {}
        else:
            zero.micro_step_id = -1
            zero._release_preflattened_grad_buffers()
            zero._offload_accumulated_param_ids = set()
            for group in range(len(zero.bit16_groups)):
                zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None

    def local_shards(self) -> dict[str, Tensor]:
        if self.stage == 3:
            return {name: p.ds_tensor.detach() for name, p in self._parameters()}
        return {name: p.detach() for name, p in self._parameters()}

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        return self.objective.named_parameters()

    def prepare_save(self, averages: Mapping[str, Tensor]) -> None:
        shapes, zero = self._shapes(), self._zero
        states = zero_files.capture(self._ds, shapes, self._world.size, self.stage)
        # The first step makes moments and counts.
        flat = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        fresh = [p.shape for p in flat if not zero.optimizer.state.get(p)]
        moments = [torch.empty(each, device="meta") for shape in fresh for each in (shape, shape, ())]
        whole = [torch.empty(shapes[name], device="meta") for name in self._written_here(averages)]
        self._copies.prepare([states, moments, whole])

    def save(self, path: Path, averages: Mapping[str, Tensor]) -> Write:
        shapes, here = self._shapes(), set(self._written_here(averages))
        states = zero_files.capture(self._ds, shapes, self._world.size, self.stage)
        whole = {
            name: partial(self._whole_average, shard, shapes[name], name in here) for name, shard in averages.items()
        }
        copied = self._copies.take({"states": states, "averages": whole})
        assert isinstance(copied, dict)
        own = {name: value for name, value in copied["averages"].items() if name in here}

        def write() -> list[Path]:
            self._copies.wait()
            return zero_files.write(path, copied["states"], own, self._saving)

        return write

    def before_change(self) -> None:
        self._copies.before_change()

    def _written_here(self, averages: Mapping[str, Tensor]) -> list[str]:
        sizes = {name: shard.nbytes for name, shard in averages.items()}
        return divide(sizes, self._world.size)[self._world.rank]

    def _whole_average(self, shard: Tensor, shape: torch.Size, is_written_here: bool) -> Tensor | None:
        """The average, whole, on the rank that writes it. Collective."""
        whole = self._gather(shard, shape)
        return whole if is_written_here else None

    def _gather(self, shard: Tensor, shape: torch.Size) -> Tensor:
        """A tensor laid out as in :meth:`local_shards`, whole and on the device of every rank."""
        if self.stage < 3:
            return shard
        flat = shard.new_empty(shard.numel() * self._world.size)
        dist.all_gather_into_tensor(flat, shard.contiguous())
        return flat[: shape.numel()].view(shape)

    def _scatter(self, whole: Tensor, shard: Tensor) -> None:
        """The inverse of :meth:`_gather`: fill this rank's ``shard``."""
        if self.stage == 3:
            start = shard.numel() * self._world.rank
            own = whole.reshape(-1)[start : start + shard.numel()]
            shard[: own.numel()].copy_(own)
        else:
            shard.copy_(whole)

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: getattr(p, "ds_shape", p.shape) for name, p in self._parameters()}

    def load(self, path: Path, averages: Mapping[str, Tensor]) -> None:
        self.before_change()
        shapes = self._shapes()
        zero_files.check(path, shapes, {name: shapes[name] for name in averages})
        zero_files.load(self._ds, path, self._world, self.stage)
        saved = zero_files.read_average(path)
        for name, average in averages.items():
            self._scatter(saved[name], average)
        frozen = {name for name, parameter in self._parameters() if not parameter.requires_grad}
        shards = self.local_shards()
        for name, value in (zero_files.read_frozen(path, frozen) if frozen else {}).items():
            self._scatter(value, shards[name])

    def full_state_dict(self) -> dict[str, Tensor]:
        return self._whole(torch.device("cpu"))

    def _whole(self, device: torch.device) -> dict[str, Tensor]:
        """Every parameter on ``device`` of rank 0, one gathered after the other; empty elsewhere."""
        whole, shapes = {}, self._shapes()
        for name, shard in self.local_shards().items():
            value = self._gather(shard, shapes[name])
            if self._world.is_main:
                whole[name] = value.to(device, copy=True)
        return whole

    def gathered(self) -> AbstractContextManager[Trainable | None]:
        if self.stage == 3:  # a copy: calling the objective itself would gather, and wait for the other ranks
            return filled(self._bare, self._whole(self.device))
        return nullcontext(self.objective if self._world.is_main else None)

    def close(self) -> None:
        self._copies.close()
        # Without barrier, destroy and, later, destroy_process_group, some processes end in "terminate called without an
        # active exception" and a code that looks like a failed job.
        if self._world.size > 1:
            dist.barrier(group=self._world.group)
        self._ds.destroy()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _log_gathered(zero: dict[str, Any], parameters: int, block: int) -> None:
    """Log how many parameters are whole at a time, a user's file included."""
    most, kept = zero["stage3_max_live_parameters"] + block, zero["stage3_max_reuse_distance"]
    whole, kept, ahead = (
        f"{min(number, parameters) / 1e6:.1f} M" for number in (most, kept, zero["stage3_prefetch_bucket_size"])
    )
    logger.info(
        "zero3 gathers at most %s of %.1f M parameters at once: %s stay from forward to backward, others are fetched "
        "%s at a time", whole, parameters / 1e6, kept, ahead,
    )  # fmt: skip


def _let_host_run_ahead(coordinator: Any, objective: Trainable) -> None:
    """DeepSpeed's host waits for the device when more than two parameters are being gathered, which is within a block.
    Let it wait when those of four blocks are."""
    most = max(len(list(block.parameters())) for block in blocks(objective.model))
    coordinator._PartitionedParameterCoordinator__max_ongoing_fetch_events = 4 * most


def _require_gradient(block: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Stage 3 reduces a block's gradients when that of its input is there, which has none behind frozen layers."""
    if torch.is_grad_enabled() and not inputs[0].requires_grad:
        inputs[0].requires_grad_()


def _list_once(module: nn.Module) -> None:
    """DeepSpeed walks a module's parameters eight times per step, which takes longer than gathering them."""
    members = list(module.named_parameters())
    module.named_parameters = MethodType(lambda *_, **__: iter(members), module)  # type: ignore[method-assign]


def _initialise(
    objective: Trainable,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    file: str | None,
    group: dist.ProcessGroup,
) -> Any:
    deepspeed = zero_files.import_deepspeed()
    # DeepSpeed would create its own group once per process, without our time-outs and unknown to a later world.
    zero_files.import_deepspeed("deepspeed.utils.groups")._WORLD_GROUP = group
    zero_files.import_deepspeed("deepspeed.utils.nvtx").enable_nvtx = False  # thousands of ranges per step
    os.environ.setdefault("LOCAL_RANK", "0")  # required by DeepSpeed, and unset without a launcher
    try:
        engine, *_ = deepspeed.initialize(
            model=objective, optimizer=optimizer, config=settings, dist_init_required=False
        )
    except (ValueError, TypeError) as error:
        if file is None:
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"engine.deepspeed_config={file}: DeepSpeed rejects it: {reason}") from error
    return engine
