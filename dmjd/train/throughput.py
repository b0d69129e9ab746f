"""Throughput: images and views per second, and model FLOPs utilisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dmjd.accelerators import accelerator_of
from dmjd.parallel.world import World


@dataclass(frozen=True)
class Throughput:
    """Columns of ``timing.jsonl`` from images and seconds.

    flops_per_image: of a training step. peak_flops: per second, of all devices. Both are None if the peak of the device
    is not known.
    """

    views: int
    device: torch.device
    flops_per_image: int | None = None
    peak_flops: float | None = None

    @classmethod
    def of(cls, views: int, flops_per_image: Callable[[], int], world: World) -> Throughput:
        """Throughput of a task; counts the model's FLOPs if the peak of the device is known."""
        device = world.device
        gpu = accelerator_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        if gpu is None:
            return cls(views, device)
        return cls(views, device, flops_per_image(), gpu.tflops * 1e12 * world.size)

    def row(self, images: int, seconds: float, waited: float) -> dict[str, float]:
        """images_per_second and views_per_second over all processes, data_wait_percent, mfu_percent (model FLOPs
        against the bf16 peak), and on CUDA the peaks of this process's memory since the last row."""
        speed = images / seconds
        row = {
            "images_per_second": speed,
            "views_per_second": speed * self.views,
            "data_wait_percent": 100 * waited / seconds,
        }
        if self.flops_per_image is not None and self.peak_flops is not None:
            row["mfu_percent"] = 100 * speed * self.flops_per_image / self.peak_flops
        if self.device.type == "cuda":
            row["memory_allocated_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            row["memory_reserved_gib"] = torch.cuda.max_memory_reserved(self.device) / 2**30
            torch.cuda.reset_peak_memory_stats(self.device)
        return row
