"""What a run cost: the paper's Gh. is wall hours of 8 GPUs, and GPU hours are what a cluster bills. Both are given."""

from __future__ import annotations

from dataclasses import dataclass

from dmjd.errors import DataError
from dmjd.report.run import Run

PAPER_GPUS = 8

GPU_HOURS = "number of GPUs x wall hours over all launches, online scores included, work that a crash threw away not."
CPU_HOURS = (
    "number of processes x wall hours over all launches, online scores included, work that a crash threw away not."
)
PAPER_HOURS = (
    f'the paper\'s "GPU hours", which are wall hours of {PAPER_GPUS} GPUs, that is GPU hours / {PAPER_GPUS}; '
    f"computed where the run did not use {PAPER_GPUS}. On the run's own GPUs, not the paper's A100 of 40 GB."
)


@dataclass(frozen=True)
class Hardware:
    """On what a run was launched.

    devices: the names over all launches, each once; empty if a launch did not record one.
    world_sizes: processes, each with one device, over all launches, each number once.
    """

    devices: tuple[str, ...]
    world_sizes: tuple[int, ...]

    @property
    def kind(self) -> str | None:
        """``"GPU"`` or ``"CPU"``; None if launches differ in that, or it is unknown."""
        kinds = {"CPU" if device.startswith("cpu") else "GPU" for device in self.devices}
        return kinds.pop() if len(kinds) == 1 else None

    def hours(self, seconds: float) -> float | None:
        """Device hours in ``seconds`` of wall time; None if launches differ in world size, as no log says when."""
        return self.world_sizes[0] * seconds / 3600 if len(self.world_sizes) == 1 else None


def hardware(run: Run) -> Hardware:
    """The hardware of all launches of ``run``. Raises DataError for a world size that is none."""
    devices = [launch.get("device") for launch in run.launches]
    sizes = [launch.get("world_size", 1) for launch in run.launches]
    for size in sizes:
        if not isinstance(size, int) or size < 1:
            raise DataError(f"{run.name}/provenance.json has world_size={size}; it counts processes, from 1")
    known = [str(device) for device in devices if device] if all(devices) else []
    return Hardware(tuple(dict.fromkeys(known)), tuple(dict.fromkeys(sizes)))
