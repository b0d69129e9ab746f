"""Cost of a run: GPU hours, and the paper's Gh., which are wall hours of 8 GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from dmjd.errors import DataError
from dmjd.report.run import Run

PAPER_GPUS = 8

_HOURS = "x wall hours over all launches, including online evaluation, without work lost to crashes."
GPU_HOURS, CPU_HOURS = f"number of GPUs {_HOURS}", f"number of processes {_HOURS}"
PAPER_HOURS = (
    f'the paper\'s "GPU hours", which are wall hours of {PAPER_GPUS} GPUs: GPU hours / {PAPER_GPUS}; '
    f"(computed) if the run did not use {PAPER_GPUS} GPUs. Measured on the run's own GPUs, not the paper's A100 40 GB."
)


@dataclass(frozen=True)
class Hardware:
    """Devices and world sizes of a run's launches.

    devices: distinct names over all launches; empty if a launch did not record one.
    world_sizes: distinct numbers of processes, each with one device, over all launches.
    """

    devices: tuple[str, ...]
    world_sizes: tuple[int, ...]

    @property
    def kind(self) -> str | None:
        """``"GPU"`` or ``"CPU"``; None if launches differ or it is unknown."""
        kinds = {"CPU" if device.startswith("cpu") else "GPU" for device in self.devices}
        return kinds.pop() if len(kinds) == 1 else None

    def __str__(self) -> str:
        """ "8 x NVIDIA A100"; an empty text if the devices are not known."""
        sizes = " and ".join(map(str, self.world_sizes))
        return f"{sizes} x {' and '.join(self.devices)}" if self.devices else ""

    def hours(self, seconds: float) -> float | None:
        """Device hours in ``seconds`` of wall time; None if launches differ in world size: no log has their times."""
        return self.world_sizes[0] * seconds / 3600 if len(self.world_sizes) == 1 else None


def hardware(run: Run) -> Hardware:
    """The hardware of all launches of ``run``. Raises DataError for an invalid world size."""
    devices = [launch.get("device") for launch in run.launches]
    sizes = [launch.get("world_size", 1) for launch in run.launches]
    for size in sizes:
        if not isinstance(size, int) or size < 1:
            raise DataError(
                f"{run.name}/provenance.json has world_size={size}; it must be a number of processes, at least 1"
            )
    known = [str(device) for device in devices if device] if all(devices) else []
    return Hardware(tuple(dict.fromkeys(known)), tuple(dict.fromkeys(sizes)))


def device_hours(run: Run) -> dict[str, float]:
    """{"GPU": hours} or {"CPU": hours} of all launches; empty if the devices or the time are not known."""
    used, seconds = hardware(run), run.last("seconds")
    spent = None if seconds is None else used.hours(seconds)
    return {} if spent is None or used.kind is None else {used.kind: spent}


def computed(*used: Hardware) -> str:
    """The mark of a Gh. that is not the measured time of as many GPUs as the paper's."""
    return "" if all(each.world_sizes == (PAPER_GPUS,) for each in used) else " (computed)"
