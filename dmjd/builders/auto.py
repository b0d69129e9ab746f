"""``engine=auto``: the fastest settings whose estimated memory fits (docs/engines.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch

from dmjd.accelerators import Accelerator, accelerator_of
from dmjd.builders.plan import RESERVE_GIB, AnyPlanConfig, Plan, plan_config
from dmjd.builders.targets import check_teacher_engine
from dmjd.config import DetectConfig, EngineConfig, PretrainConfig, SegmentConfig, TrainConfig
from dmjd.errors import ConfigError
from dmjd.parallel.apply import MODES, blocks
from dmjd.parallel.engines import AUTO, ENGINES, replicas
from dmjd.parallel.fit import check_fit
from dmjd.parallel.world import World

logger = logging.getLogger("dmjd")

Config = TypeVar("Config", bound=TrainConfig)

CHOSEN = ("compile", "activation_checkpointing", "cuda_graphs", "grad_accum_steps")
"""Keys of :class:`EngineConfig` that are chosen beside ``name``."""

MARGIN = 0.9
"""Share of a GPU's memory, less :data:`RESERVE_GIB`, that the estimate may take: estimates of stored measurements are
at most 10 % too low."""

HOST_SECONDS = 2e-3
"""CPU time of a block in a step, forward and backward: 74 ms for the 32 blocks of ViT-L (engines_h200.json)."""


def resolve_engine(config: Config, world: World, before: Callable[[World], EngineConfig | None]) -> Config:
    """``config`` with what ``engine=auto`` chooses on this device for the processes of ``world``; logs the choice.

    Args:
        before: gives the engine of the launch before on the same device and number of processes, if there was one;
            its choices are kept.

    Raises:
        ConfigError: if no choice supports the keys of ``engine`` that were set.
    """
    if config.engine.name != AUTO:
        return config
    earlier = before(world)
    if earlier is not None and earlier.name in _names(world.size, world.local_size):
        names = ("name", *(name for name in CHOSEN if not _is_set(config, name)))
        engine = replace(config.engine, **{name: getattr(earlier, name) for name in names})
        check_fit(engine, world.device, world.size, world.local_size)
        reason = "as in the launch before"
    elif world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        memory = torch.cuda.get_device_properties(world.device).total_memory / 2**30
        gpu = replace(accelerator_of(name) or Accelerator("", 0, memory), memory_gib=memory)
        plan = Plan(plan_config(config, world.size, world.local_size), gpu)
        engine, reason = choose(plan)
    else:
        engine = next(_allowed(config, world.device, world.size, world.local_size, ("none",), "none"))
        reason = "on the CPU compilation takes longer than it saves"
    logger.info("%s", describe(engine, reason))
    return replace(config, engine=engine)


def describe(engine: EngineConfig, reason: str) -> str:
    """The choice in one line."""
    chosen = " ".join(f"engine.{name}={str(getattr(engine, name)).lower()}" for name in CHOSEN)
    return f"engine=auto: engine={engine.name} {chosen} ({reason})"


def choose(plan: Plan) -> tuple[EngineConfig, str]:
    """The engine for ``plan``, and the reason.

    Of the settings in the order of their speed it takes the first whose peak fits. Gradients are accumulated only where
    nothing fits at once, and not where BatchNorm would have other statistics. If nothing fits, the settings with the
    least memory are chosen.
    """
    config, gpu = plan.config, plan.gpu
    dense = isinstance(config, (SegmentConfig, DetectConfig))
    # Compiling a dense model takes minutes; torch cuts a model under DDP at its buckets, which graphs do not support.
    compilation = "model" if config.gpus == 1 and not dense else "block"
    # gelu_mlp on Hopper: recomputing a ConvViT's MLPs costs no time.
    first = ("mlp", "selective") if gpu.hopper and config.backbone.name == "convvit" else ("none", "selective", "mlp")
    device, local = torch.device("cuda"), min(config.gpus_per_node, config.gpus)
    candidates = list(_allowed(config, device, config.gpus, local, (*first, "full"), compilation))
    if _is_host_bound(plan) and not dense and config.backbone.name in ("vit", "convvit"):
        candidates = [*_with_graphs(config, candidates, local), *candidates]
    engine, peak = _fastest(plan, candidates)
    if peak <= available(gpu):
        return engine, f"estimated peak {_gib(peak)} of {gpu.memory_gib:.1f} GiB"
    return engine, f"estimated peak {_gib(peak)} GiB does not fit {gpu.memory_gib:.1f} GiB; reduce batch_size"


def available(gpu: Accelerator) -> float:
    """Bytes that an estimated peak may take."""
    return MARGIN * (gpu.memory_gib - RESERVE_GIB) * 2**30


def _fastest(plan: Plan, candidates: Sequence[EngineConfig]) -> tuple[EngineConfig, float]:
    """The first of ``candidates`` whose peak fits, with as few micro-batches as possible, and its peak; or what has the
    least memory."""
    least: tuple[float, EngineConfig] | None = None
    for parts in plan.divisors:
        if parts > 1 and (plan.has_batch_norm or _is_set(plan.config, "grad_accum_steps")):
            break
        for candidate in candidates:
            engine = candidate if parts == 1 else replace(candidate, grad_accum_steps=parts)
            if engine.grad_accum_steps > 1 and engine.cuda_graphs:
                continue
            images = plan.images_per_gpu // engine.grad_accum_steps
            peak = plan.under(engine).peak(
                engine.name, engine.activation_checkpointing, images, engine.grad_accum_steps
            )
            if peak <= available(plan.gpu):
                return engine, peak
            if least is None or peak < least[0]:
                least = peak, engine
    assert least is not None
    return least[1], least[0]


MOST_GPUS = 1024
"""Of :func:`fewest_gpus`."""


def fewest_gpus(plan: Plan, name: str, *, offload: bool = False) -> tuple[int, EngineConfig, float] | None:
    """The smallest number of GPUs whose memory suffices under the engine ``name``, the fastest settings there, and
    their peak; None if it is above :data:`MOST_GPUS`.

    GPUs of one node, or whole nodes, which divide the batch. ``engine.activation_checkpointing`` and
    ``grad_accum_steps`` are searched unless they are set.

    Args:
        offload: with ``engine.offload_optimizer``.
    """
    config = plan.config
    modes = (config.engine.activation_checkpointing,) if _is_set(config, "activation_checkpointing") else MODES
    base = replace(config.engine, name=name, cuda_graphs=False, offload_optimizer=offload)
    candidates = [replace(base, activation_checkpointing=mode) for mode in modes]
    most = 1 if ENGINES[name].one_process else min(config.batch_size, MOST_GPUS)
    for gpus in range(1 if most == 1 else 2, most + 1):
        per_node = min(gpus, config.gpus_per_node)
        copies = replicas(base, gpus, per_node) if "replicas" in ENGINES[name].options else 1
        other = plan.under(base, gpus)
        if gpus % per_node or gpus % copies or config.batch_size % (gpus * base.grad_accum_steps):
            continue
        if not any(other.divisors):  # an odd image has no partner to be mixed with
            continue
        engine, peak = _fastest(other, candidates)
        if peak <= available(plan.gpu):
            return gpus, engine, peak
    return None


def _allowed(
    config: TrainConfig, device: torch.device, size: int, local_size: int, modes: tuple[str, ...], compilation: str
) -> Iterator[EngineConfig]:
    """Settings that the engines support, fastest first; keys that were set keep their value.

    Raises:
        ConfigError: that of the last combination if there is none.
    """
    modes = (config.engine.activation_checkpointing,) if _is_set(config, "activation_checkpointing") else modes
    found, failure = False, None
    for mode in modes:
        for name in _names(size, local_size):
            engine = replace(config.engine, name=name, activation_checkpointing=mode)
            if not _is_set(config, "compile"):
                engine = replace(engine, compile=compilation)
            try:
                check_fit(engine, device, size, local_size)
                if isinstance(config, PretrainConfig):
                    check_teacher_engine(config, name)
            except ConfigError as error:
                failure = error
                continue
            found = True
            yield engine
    if not found:
        assert failure is not None
        raise failure


def _names(size: int, local_size: int) -> tuple[str, ...]:
    """The engines that are considered for ``size`` processes, fastest first."""
    if size == 1:
        return ("single",)
    return ("ddp", "hsdp", "fsdp") if size > local_size else ("ddp", "fsdp")


def _with_graphs(config: AnyPlanConfig, candidates: list[EngineConfig], local_size: int) -> Iterator[EngineConfig]:
    for engine in candidates if not _is_set(config, "cuda_graphs") else ():
        with suppress(ConfigError):
            graphs = replace(engine, cuda_graphs=True)
            check_fit(graphs, torch.device("cuda"), config.gpus, local_size)
            yield graphs


def _is_host_bound(plan: Plan) -> bool:
    """Whether the CPU takes longer for a step than the GPU at ``plan.config.mfu``; False for an unknown GPU."""
    rate = plan.gpu.tflops * 1e12 * plan.config.mfu / 100
    if not rate:
        return False
    host = HOST_SECONDS * sum(1 for _ in blocks(plan.model))
    return host > plan.flops_per_image * plan.images_per_gpu / rate


def _is_set(config: TrainConfig, name: str) -> bool:
    """Whether a key of ``engine`` was typed, or set by a preset."""
    differs: bool = getattr(config.engine, name) != getattr(EngineConfig(), name)
    return differs or f"engine.{name}" in (config.typed or ())


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
