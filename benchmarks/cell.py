"""One engine with one model on batches of one size: how fast it steps, what it holds, how long saves keep it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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

from dmjd.builders import build_mask_spec, build_objective, build_tokenizer, token_grid
from dmjd.builders.preparation import Preparation
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.parallel.build import build_engine
from dmjd.parallel.engine import Engine
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.world import World
from dmjd.train.stopwatch import Stopwatch
from dmjd.train.throughput import Throughput

WARMUP, STEPS, IDLE_STEPS, BESIDE_SAVE = 10, 40, 10, 5
LR, WEIGHT_DECAY = 1e-4, 0.05


class Cell:
    """The engine, ready to step, and what it is measured with.

    Args:
        config: whose ``data`` are the shards, where batches are to come from some.
        micro: images of a GPU.
        throughput: of the model on these GPUs.
    """

    def __init__(self, config: PretrainConfig, world: World, micro: int, throughput: Throughput) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()  # else a second batch size would compile for sizes in general
        self._config, self._world, self._micro, self._throughput = config, world, micro, throughput
        self._clock = Stopwatch()
        grid, data = token_grid(config), config.data
        spec, tokenizer = build_mask_spec(config.mask, grid), build_tokenizer(config)
        self._engine: Engine = build_engine(build_objective(config, tokenizer.dim), config.engine, config.optim, world)
        if isinstance(world, SimulatedWorld):
            answer_buckets(self._engine)
        self._gathers = ENGINES[config.engine.name].divided.weights
        self._prepare = Preparation(spec, grid, tokenizer, tuple(data.mean), tuple(data.std), flip=data.flip, seed=0)

    def measure(self, kind: str, save: Path | None = None) -> dict[str, Any]:
        """Losses of some steps, and the speed and memory of those after the warm-up. Collective.

        Args:
            kind: of the batches, one of ``INPUTS``.
            save: a folder for the checkpoints of :func:`measure_saves`.
        """
        world, cuda = self._world, self._world.device.type == "cuda"
        count = WARMUP + STEPS + IDLE_STEPS + (SAVES * BESIDE_SAVE if save else 0)
        upload = uploader(kind, world.device)
        with closing(batches(kind, self._config, world, self._micro, count)) as feed:
            steps = partial(self._steps, feed, upload)
            losses = steps(WARMUP, StepTimes(world.device))
            started, _ = self._clock.lap()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            times = StepTimes(world.device)
            losses += steps(STEPS, times)
            seconds, waited = self._clock.lap()
            peaks = world.gather(self._peak_bytes() / 2**30 if cuda else None)
            speed = self._throughput.row(self._micro * world.size * STEPS, seconds, waited)
            result = {
                "images_per_second_per_gpu": speed["images_per_second"] / world.size,
                "views_per_second_per_gpu": speed["views_per_second"] / world.size,
                "mfu_percent": speed.get("mfu_percent"),
                "step_ms": 1000 * seconds / STEPS,
                **spread(times, speed["data_wait_percent"], self._gathers, world),
                "host_ms": 1000 * median(self._host_seconds(feed, upload)),
                "peak_gib": peaks,
                "start_seconds": started,
            }
            if save is not None:
                train = partial(steps, BESIDE_SAVE, StepTimes(world.device))
                result["save"] = measure_saves(self._engine, world, save, train)
        curve = world.mean(torch.stack(losses)).tolist()
        self._clock.lap()
        return result if isinstance(world, SimulatedWorld) else result | {"losses": curve}

    def close(self) -> None:
        """Release the engine. Collective."""
        self._engine.close()

    def _peak_bytes(self) -> int:
        # What a graph works in counts as allocated while it is recorded, and not when it is replayed.
        graphs = self._config.engine.cuda_graphs
        return torch.cuda.max_memory_reserved() if graphs else torch.cuda.max_memory_allocated()

    def _steps(
        self, feed: Iterator[Batch], upload: Callable[[Batch], Batch], count: int, times: StepTimes
    ) -> list[torch.Tensor]:
        """Losses of ``count`` further steps, which the device has done by then."""
        losses = [self._step(upload(batch), times) for batch in islice(self._clock.waiting(feed), count)]
        synchronize(self._world.device)
        return losses

    def _host_seconds(self, feed: Iterator[Batch], upload: Callable[[Batch], Batch]) -> Iterator[float]:
        """Seconds until the host has told an idle device all of a step."""
        for batch in islice(feed, IDLE_STEPS):
            uploaded = upload(batch)
            synchronize(self._world.device)
            begin = time.perf_counter()
            self._step(uploaded, StepTimes(self._world.device))
            yield time.perf_counter() - begin
        synchronize(self._world.device)

    def _step(self, batch: Batch, times: StepTimes) -> torch.Tensor:
        times.begin()
        prepared = self._prepare(batch, 0)
        with self._engine.micro_batch(last=True):
            losses = self._engine.module(*prepared.inputs)
            times.forward()
            self._engine.backward(losses.total)
        self._engine.step(LR, WEIGHT_DECAY)
        times.end()
        return losses.total.detach()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
