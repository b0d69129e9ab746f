"""Estimates for a run before it is submitted: parameters, FLOPs, memory per GPU under each engine, GPU hours.

Parameters and FLOPs are counted on meta tensors. Activations are counted by :mod:`dmjd.parallel.memory` for one GPU at
three micro-batch sizes, and interpolated and extrapolated linearly. Memory that an engine adds or shards is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dmjd.accelerators import ACCELERATORS, Accelerator
from dmjd.builders.finetune import head_classes
from dmjd.builders.mixing import check_augment
from dmjd.builders.tasks import builders_of
from dmjd.config import (
    PLANS,
    SCHEMAS,
    DetectPlanConfig,
    EngineConfig,
    FinetunePlanConfig,
    PlanConfig,
    SegmentPlanConfig,
    TrainConfig,
    check_batch,
)
from dmjd.data.build import AUTO, STREAM, build_dataset
from dmjd.errors import ConfigError
from dmjd.models.flops import count_flops
from dmjd.models.objective import Trainable
from dmjd.parallel.apply import MODES, apply, blocks, units
from dmjd.parallel.build import select_precision
from dmjd.parallel.engines import ENGINES, FLOAT, StateBytes, blocks_per_unit, replicas, reshards, state_bytes
from dmjd.parallel.memory import StepMemory, trace_step
from dmjd.progress import track
from dmjd.redact import shown
from dmjd.targets import TARGETS

AnyPlanConfig = PlanConfig | FinetunePlanConfig | SegmentPlanConfig | DetectPlanConfig

RESERVE_GIB = 2.0
"""Memory of a GPU that the CUDA context, workspaces of libraries and fragmentation take."""

GRAPHS = 0.06
"""Relative increase of the peak with CUDA graphs, whose memory pool is separate: the maximum over eight cells of
engines_h200.json."""


@dataclass(frozen=True)
class Growth:
    """Bytes as a function of the images of a micro-batch: linear between the traced sizes and beyond them.

    sizes: the traced micro-batches, in images. traced: bytes at them.
    """

    sizes: Sequence[int]
    traced: Sequence[float]

    def __call__(self, images: int) -> float:
        ends = range(1, len(self.sizes))
        fixed, per_image = self._line(next((end for end in ends if self.sizes[end] >= images), -1))
        return fixed + images * per_image

    @property
    def of_large_batches(self) -> tuple[float, float]:
        """Fixed bytes, and bytes per image."""
        return self._line(-1)

    def _line(self, end: int) -> tuple[float, float]:
        slope = (self.traced[end] - self.traced[end - 1]) / (self.sizes[end] - self.sizes[end - 1])
        return self.traced[end] - self.sizes[end] * slope, slope


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch under one mode, as those of :class:`~dmjd.parallel.memory.StepMemory`; ``inputs`` are
    images, views and targets."""

    inputs: Growth
    saved: Growth
    transient: Growth
    with_gradients: Growth


@dataclass(frozen=True)
class Fit:
    """The largest micro-batch that fits, in images per GPU; micro-batches per step; peak memory in bytes."""

    micro_batch: int
    grad_accum_steps: int
    peak: float


class Plan:
    """Estimates for one training on one cluster.

    Args:
        gpu: by default that of ``config.gpu``.

    Raises:
        ConfigError: if the batch cannot be divided among the GPUs.
    """

    def __init__(self, config: AnyPlanConfig, gpu: Accelerator | None = None) -> None:
        check_batch(config.batch_size, 1, config.gpus)  # it selects grad_accum_steps itself
        if config.gpus > config.gpus_per_node and config.gpus % config.gpus_per_node:
            raise ConfigError(
                f"gpus={config.gpus} is not divisible by gpus_per_node={config.gpus_per_node}; change one of them"
            )
        if config.gpus % replicas(config.engine, config.gpus, min(config.gpus_per_node, config.gpus)):
            raise ConfigError(
                f"engine.replicas={config.engine.replicas} does not divide gpus={config.gpus}; change one of them"
            )
        self.config = config
        self.traced: dict[str, Activations] = {}
        self.gpu: Accelerator = ACCELERATORS[config.gpu] if gpu is None else gpu
        self.images_per_gpu = config.batch_size // config.gpus
        self.images, self.images_from, found = training_images(config)
        self.classes = 0
        self._builders = builders_of(config)
        self.pairs = False
        if isinstance(config, FinetunePlanConfig):
            check_augment(replace(config, engine=replace(config.engine, grad_accum_steps=1)), config.gpus)
            self.classes = head_classes(config, found or config.head.num_classes or config.published.classes)
            self.pairs = config.augment.mixup > 0 or config.augment.cutmix > 0
        elif not isinstance(config, PlanConfig):
            self.classes = config.head.num_classes or found or config.published.classes
        with torch.device("meta"):
            objective, _ = self._objective_and_inputs(self._builders.pair)
        self.model = objective.model
        self.has_batch_norm = any(isinstance(part, nn.BatchNorm2d) for part in objective.modules())
        self.parameters = sum(parameter.numel() for parameter in objective.parameters())
        self.trained = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
        self.encoder_parameters = sum(parameter.numel() for parameter in self.model.encoder.parameters())
        self.averaged = 0  # parameters
        self.target_parameters = 0
        if isinstance(config, PlanConfig):
            self.target_parameters = TARGETS[config.target.name].parameters(config)
        if config.ema_decay is not None:
            self.averaged = self.encoder_parameters if isinstance(config, PlanConfig) else self.parameters

    def _objective_and_inputs(self, images: int) -> tuple[Trainable, Any]:
        return self._builders.objective_and_inputs(self.config, self.classes, images)

    def under(self, engine: EngineConfig, gpus: int | None = None) -> Plan:
        """This plan with another engine, or on another number of GPUs; traces are shared."""
        other = copy(self)
        other.config = replace(self.config, engine=engine, gpus=gpus or self.config.gpus)
        other.images_per_gpu = self.config.batch_size // other.config.gpus
        return other

    @cached_property
    def flops_per_image(self) -> int:
        """Model FLOPs of one image with all its views, forward and backward; nothing is computed."""
        pair = self._builders.pair
        with torch.device("meta"):
            objective, prepared = self._objective_and_inputs(pair)
            return count_flops(objective, prepared.inputs) // pair

    def activations(self, mode: str) -> Activations:
        """Under one mode of activation checkpointing; traced when it is first asked for."""
        if mode not in self.traced:
            self.traced[mode] = self._trace(mode)
        return self.traced[mode]

    def _trace(self, mode: str) -> Activations:
        """Bytes of a step under ``mode``, in the precision that the configuration selects on CUDA."""
        engine = self.config.engine
        precision = select_precision(engine.precision, torch.device("cuda"))
        steps: list[StepMemory] = []
        inputs: list[int] = []
        sizes = self.config.traced
        for images in sizes:
            with FakeTensorMode():
                objective, prepared = self._objective_and_inputs(images)
                apply(objective.model, replace(engine, activation_checkpointing=mode, compile="none"))
                steps.append(trace_step(objective, prepared.inputs, precision=precision, as_on_cuda=True))
                inputs.append(
                    sum(leaf.untyped_storage().nbytes() for leaf in tree_leaves(prepared) if leaf is not None)
                )
        return Activations(
            Growth(sizes, inputs),
            *(Growth(sizes, [getattr(step, name) for step in steps]) for name in StepMemory._fields),
        )

    def state(self, engine: str) -> StateBytes:
        """Weights, gradients and optimizer state of ``engine`` on each GPU."""
        gpus, config, spec = self.config.gpus, self.config.engine, ENGINES[engine]
        copies = replicas(config, gpus, min(self.config.gpus_per_node, gpus)) if "replicas" in spec.options else 1
        size = blocks_per_unit(config, self.model, gpus <= self.config.gpus_per_node) if spec.mesh else 1
        largest = max(sum(p.numel() for block in unit for p in block.parameters()) for unit in units(self.model, size))
        offload = config.offload_optimizer and "offload_optimizer" in spec.options
        state = state_bytes(engine, self.parameters, largest, gpus // copies, config.reshard_after_forward, offload)
        share = self.trained / self.parameters
        return state._replace(gradients=state.gradients * share, optimizer=state.optimizer * share)

    def frozen(self, engine: str) -> float:
        """Bytes of weights without gradients on each GPU: the moving average, and the target's network."""
        shards = 1.0
        if ENGINES[engine].divided.weights:
            shards = self.parameters * FLOAT / self.state(engine).weights
        return FLOAT * (self.averaged / shards + self.target_parameters)

    @cached_property
    def modes(self) -> tuple[str, ...]:
        """Modes of activation checkpointing that are worth a look: the configured one if it is not "none"; else those
        up to the first under which every engine takes a GPU's share of the batch at once."""
        if self.config.engine.activation_checkpointing != "none":
            return (self.config.engine.activation_checkpointing,)
        tried = []
        for mode in track(MODES, "memory of a step", len(MODES)):
            tried.append(mode)
            fits = [self.fit(engine, mode) for engine in self.engines]
            if all(fit is not None and fit.grad_accum_steps == 1 for fit in fits):
                break
        return tuple(tried)

    def peak(self, engine: str, mode: str, images: int, accumulation: int = 1) -> float:
        """Peak bytes of a GPU in a step of ``accumulation`` micro-batches of ``images``."""
        state, some = self.state(engine), self.activations(mode)
        graphs = self.config.engine.cuda_graphs and "cuda_graphs" in ENGINES[engine].options
        if not ENGINES[engine].buckets and accumulation == 1 and not graphs:
            # Gradients come while activations go, and of what comes the GPU keeps its part alone.
            kept = state.gradients / (FLOAT * self.trained)
            step = kept * some.with_gradients(images) + (1 - kept) * some.transient(images) - self._uncopied(engine)
        else:  # all of them, or their shards, are there before: in buckets, or from the micro-batch before
            # A model that is one CUDA graph makes gradients of its own, which are added when all of them have come.
            twice = graphs and self.config.engine.compile == "model"
            step = state.gradients + (some.with_gradients if twice else some.transient)(images) - self._uncopied(engine)
        held = state.weights + state.optimizer + self.frozen(engine)
        # Stages 2 and 3 of DeepSpeed have buckets and whole weights beside all activations. FSDP's whole weights are
        # counted as autocast's copies, and its gradients, as stage 1's, leave when activations have gone.
        beside = state.gathered if ENGINES[engine].stage in (2, 3) else 0
        most = held + max(step + some.inputs(images) + beside, state.gradients + state.gathered)
        return (1 + GRAPHS) * most if graphs else most

    def _uncopied(self, engine: str) -> int:
        """Bytes of autocast's copies of weights, where what ``engine`` gathers has their type already, and goes; less
        than 0 of what it gathers and keeps in float32, without copies."""
        if not ENGINES[engine].mesh:
            return 0
        precision = select_precision(self.config.engine.precision, torch.device("cuda"))
        gathered = precision.itemsize * sum(p.numel() for block in blocks(self.model) for p in block.parameters())
        copied, kept = precision != torch.float32, not reshards(self.config.engine, self.parameters)
        return gathered * (copied - kept)

    @property
    def divisors(self) -> Iterator[int]:
        """Possible values of ``engine.grad_accum_steps``, ascending; a micro-batch that is mixed has whole pairs."""
        pair = self._builders.pair if self.pairs else 1
        images = self.images_per_gpu
        return (parts for parts in range(1, images + 1) if not images % parts and not images // parts % pair)

    def fit(self, engine: str, mode: str) -> Fit | None:
        """The largest micro-batch that fits and divides the GPU's share of the batch; None if no image fits."""
        available = (self.gpu.memory_gib - RESERVE_GIB) * 2**30
        for accumulation in self.divisors:
            images = self.images_per_gpu // accumulation
            peak = self.peak(engine, mode, images, accumulation)
            if peak <= available:
                return Fit(images, accumulation, peak)
        return None

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines for this number of GPUs."""
        return tuple(name for name, spec in ENGINES.items() if spec.one_process == (self.config.gpus == 1))

    @property
    def gpu_hours(self) -> float:
        """GPU hours of the whole run at ``config.mfu``."""
        flops = self.flops_per_image * self.images * self.config.epochs
        return flops / (self.gpu.tflops * 1e12 * self.config.mfu / 100) / 3600


def plan_config(config: TrainConfig, gpus: int, gpus_per_node: int) -> AnyPlanConfig:
    """The configuration of a plan for the training ``config`` on so many GPUs; its images are not counted."""
    schema = next(SCHEMAS[plan] for command, plan in PLANS.items() if isinstance(config, SCHEMAS[command]))
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    planned: AnyPlanConfig = schema(**values, gpus=gpus, gpus_per_node=gpus_per_node, images=config.batch_size)
    return planned


def training_images(config: AnyPlanConfig) -> tuple[int, str, int | None]:
    """The training images of ``config``, where the number is from, and their classes if known. Images are listed or
    counted, not opened.

    Raises:
        ConfigError, DataError: as :func:`~dmjd.data.build.build_dataset`.
    """
    data = config.data
    if config.images is not None:
        return config.images, "images=", None
    if data.name == STREAM and data.samples is not None:
        return data.samples, "data.samples", None
    if data.name in (*AUTO, "auto"):
        name = next(iter(AUTO)) if data.name == "auto" else data.name
        return AUTO[name], f"data={name}", 10
    if data.root is None:
        return config.published.images, f"{config.published.name}, as data.root is not set", None
    dataset = build_dataset(replace(data, check="none"), "train")
    return len(dataset), f"data.root={shown(data.root)}", dataset.num_classes
