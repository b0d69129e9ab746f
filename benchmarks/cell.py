"""One engine with one model on batches of one size: how fast it steps, what it holds, how long it is kept by saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from checkpoint_stall import SAVES, measure_saves
from inputs import batches, uploader
from simulated_world import SimulatedWorld, answer_buckets
from step_times import StepTimes, spread

from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.parallel.build import build_engine
from dmjd.parallel.engine import Engine
from dmjd.parallel.world import SHARDED, World
from dmjd.train.builders import build_mask_spec, build_objective, build_tokenizer, token_grid
from dmjd.train.preparation import Preparation
from dmjd.train.stopwatch import Stopwatch
from dmjd.train.throughput import Throughput

WARMUP, STEPS, IDLE_STEPS, BESIDE_SAVE = 10, 40, 10, 5
LR, WEIGHT_DECAY = 1e-4, 0.05


class Cell:
    """One engine with one model on batches of one size, ready to step.

    Args:
        kind: of the batches, one of ``INPUTS``.
        steps: the most that will be asked for.
    """

    def __init__(self, config: PretrainConfig, world: World, micro: int, kind: str, steps: int) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()  # else a second batch size would compile for sizes in general
        grid, data = token_grid(config), config.data
        spec, tokenizer = build_mask_spec(config.mask, grid), build_tokenizer(config)
        self.engine: Engine = build_engine(build_objective(config, tokenizer.dim), config.engine, config.optim, world)
        if isinstance(world, SimulatedWorld):
            answer_buckets(self.engine)
        self._prepare = Preparation(spec, grid, tokenizer, tuple(data.mean), tuple(data.std), flip=data.flip, seed=0)
        self._upload = uploader(kind, world.device)
        self.clock = Stopwatch()
        self.feed = batches(kind, config, world, micro, steps)

    def steps(self, count: int, times: StepTimes) -> list[torch.Tensor]:
        """Losses of ``count`` further steps, which the device has done by then."""
        losses = [self._step(self._upload(batch), times) for batch in islice(self.clock.waiting(self.feed), count)]
        synchronize(self.engine.device)
        return losses

    def host_seconds(self, count: int) -> Iterator[float]:
        """Seconds until the host has told an idle device all of a step."""
        for batch in islice(self.feed, count):
            uploaded = self._upload(batch)
            synchronize(self.engine.device)
            begin = time.perf_counter()
            self._step(uploaded, StepTimes(self.engine.device))
            yield time.perf_counter() - begin
        synchronize(self.engine.device)

    def _step(self, batch: Batch, times: StepTimes) -> torch.Tensor:
        times.begin()
        prepared = self._prepare(batch, 0)
        with self.engine.micro_batch(last=True):
            losses = self.engine.module(*prepared.inputs)
            times.forward()
            self.engine.backward(losses.total)
        self.engine.step(LR, WEIGHT_DECAY)
        times.end()
        return losses.total.detach()


def measure(
    config: PretrainConfig, world: World, micro: int, kind: str, save: Path | None, throughput: Throughput
) -> dict[str, Any]:
    """Losses of all steps, and the speed and memory of those after the warm-up."""
    begin = time.perf_counter()
    count = WARMUP + STEPS + IDLE_STEPS + (SAVES * BESIDE_SAVE if save else 0)
    cell = Cell(config, world, micro, kind, count)
    with closing(cell.feed):
        losses = cell.steps(WARMUP, StepTimes(world.device))
        started = time.perf_counter() - begin
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = StepTimes(world.device)
        cell.clock.lap()
        losses += cell.steps(STEPS, times)
        seconds, waited = cell.clock.lap()
        peaks = world.gather(torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else None)
        speed = throughput.row(micro * world.size * STEPS, seconds, waited)
        gathers = config.engine.name in (*SHARDED, "zero3")
        result = {
            "images_per_second_per_gpu": speed["images_per_second"] / world.size,
            "views_per_second_per_gpu": speed["views_per_second"] / world.size,
            "mfu_percent": speed.get("mfu_percent"),
            "step_ms": 1000 * seconds / STEPS,
            **spread(times, speed["data_wait_percent"], gathers, world),
            "host_ms": 1000 * median(cell.host_seconds(IDLE_STEPS)),
            "peak_gib": peaks,
            "start_seconds": started,
        }
        if save is not None:
            train = partial(cell.steps, BESIDE_SAVE, StepTimes(world.device))
            result["save"] = measure_saves(cell.engine, world, save, train)
    curve = world.mean(torch.stack(losses)).tolist()
    cell.engine.close()
    return result if isinstance(world, SimulatedWorld) else result | {"losses": curve}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
