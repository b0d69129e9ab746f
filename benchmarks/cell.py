"""One engine with one model at one batch size: step times, peak memory, checkpoint stalls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
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
from torch.autograd.graph import save_on_cpu

from dmjd.builders.step import build_step
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.world import World
from dmjd.train.stopwatch import Stopwatch
from dmjd.train.throughput import Throughput

WARMUP, STEPS, IDLE_STEPS, BESIDE_SAVE = 10, 40, 10, 5
LR = 1e-4


class Cell:
    """The training step of ``config``, as :func:`~dmjd.builders.step.build_step` makes it, and its measurements.

    Args:
        config: ``config.data`` names the shards for batches of kind "shards".
        micro: images per GPU and step.
        throughput: of the model on these GPUs.
        offload_activations: keep what the backward pass needs in pinned host memory, by torch's ``save_on_cpu``.
    """

    def __init__(
        self,
        config: PretrainConfig,
        world: World,
        micro: int,
        throughput: Throughput,
        *,
        offload_activations: bool = False,
    ) -> None:
        torch._dynamo.reset()  # otherwise a second batch size compiles with dynamic shapes
        self._config, self._world, self._micro, self._throughput = config, world, micro, throughput
        self._clock, self._times = Stopwatch(), StepTimes(world.device)
        self._offloads = offload_activations
        self._step = build_step(config, world)
        self._step.engine.module.register_forward_hook(lambda *_: self._times.forward())
        if isinstance(world, SimulatedWorld):
            answer_buckets(self._step.engine)
        self._gathers = ENGINES[config.engine.name].divided.weights

    def measure(self, kind: str, save: Path | None = None) -> dict[str, Any]:
        """Losses of some steps, and the speed and memory of those after the warm-up. Collective.

        Args:
            kind: of the batches, one of ``INPUTS``.
            save: folder for the checkpoints of :func:`measure_saves`.
        """
        world, cuda = self._world, self._world.device.type == "cuda"
        count = WARMUP + STEPS + IDLE_STEPS + ((SAVES + 1) * BESIDE_SAVE if save else 0)
        upload = uploader(kind, world.device)
        with closing(batches(kind, self._config, world, self._micro, count)) as feed:
            steps = partial(self._steps, feed, upload)
            losses = steps(WARMUP)
            started, _ = self._clock.lap()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            losses += steps(STEPS)
            times = self._times
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
                result["save"] = measure_saves(self._step, world, save, partial(steps, BESIDE_SAVE))
        curve = world.mean(torch.stack(losses)).tolist()
        self._clock.mark()
        self._clock.lap()
        return result if isinstance(world, SimulatedWorld) else result | {"losses": curve}

    def close(self) -> None:
        """Release the engine. Collective."""
        self._step.engine.close()

    def _peak_bytes(self) -> int:
        # What a graph works in counts as allocated while it is recorded, and not when it is replayed.
        graphs = self._config.engine.cuda_graphs
        return torch.cuda.max_memory_reserved() if graphs else torch.cuda.max_memory_allocated()

    def _steps(self, feed: Iterator[Batch], upload: Callable[[Batch], Batch], count: int) -> list[torch.Tensor]:
        """Losses of ``count`` further steps; the device has finished them."""
        self._times = StepTimes(self._world.device)
        losses = [self._train(upload(batch)) for batch in islice(self._clock.waiting(feed), count)]
        synchronize(self._world.device)
        self._clock.mark()
        return losses

    def _host_seconds(self, feed: Iterator[Batch], upload: Callable[[Batch], Batch]) -> Iterator[float]:
        """Seconds in which the host launches a whole step on an idle device."""
        for batch in islice(feed, IDLE_STEPS):
            uploaded = upload(batch)
            synchronize(self._world.device)
            begin = time.perf_counter()
            self._train(uploaded)
            yield time.perf_counter() - begin
        synchronize(self._world.device)

    def _train(self, batch: Batch) -> torch.Tensor:
        self._times.begin()
        cuda = self._world.device.type == "cuda"
        with save_on_cpu(pin_memory=cuda) if self._offloads else nullcontext():
            losses, _ = self._step.forward_backward(batch, 0)
        self._step.update(LR)
        self._times.end()
        return losses.total


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
