"""How the op benchmarks measure and keep what they measured.

Device time is the time of a captured CUDA graph that holds one call per input, so that neither Python nor the launch
counts; a call that cannot be captured (it waits for the host) is timed by events around a queue of calls, and says so.
Inputs rotate: a batch of images fits the L2 cache, and a second call on it would not read memory.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

Call = Callable[..., Any]

BUFFERS = 4
"""Different inputs that a timing rotates over, at least."""

_WARMUP, _REPLAYS = 3, 20


@dataclass
class Row:
    """One timed way of doing one thing. ``floor_us`` is what moving its bytes takes at the copy speed of that card."""

    case: str
    way: str
    median_us: float
    floor_us: float | None = None
    notes: str = ""

    @property
    def over_floor(self) -> float | None:
        return self.median_us / self.floor_us if self.floor_us else None


@dataclass
class Table:
    """The rows of one benchmark, with what they were measured on; ``versions`` are those of what is compared."""

    benchmark: str
    device: str
    rows: list[Row] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, case: str, way: str, median_us: float, floor_us: float | None = None, notes: str = "") -> Row:
        row = Row(case, way, median_us, floor_us, notes)
        self.rows.append(row)
        over = f"{row.over_floor:7.2f} x floor" if row.over_floor else ""
        print(f"{case:44} {way:34} {median_us:12.1f} us {over} {notes}", flush=True)
        return row

    def save(self, folder: str | Path) -> Path:
        """``<folder>/<benchmark>_<card>.json``."""
        name = self.device.lower().replace("nvidia ", "").split()[0] if self.device.startswith("NVIDIA") else "cpu"
        path = Path(folder, f"{self.benchmark}_{name}.json")
        record = {
            "benchmark": self.benchmark,
            "device": self.device,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "date": date.today().isoformat(),
            **({"versions": self.versions} if self.versions else {}),
            "rows": [asdict(row) | {"over_floor": row.over_floor} for row in self.rows],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)
        return path


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {torch.get_num_threads()} thread(s)"


def device_us(calls: Sequence[Call], repeats: int = 4) -> tuple[float, str]:
    """Median device time of one call in microseconds, and how it was taken ("graph" or "queue")."""
    for _ in range(_WARMUP):
        for call in calls:
            call()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for call in calls:
                    call()
        play: Call = graph.replay
        how = "graph"
    except RuntimeError:
        torch.cuda.synchronize()

        def play() -> None:
            for _ in range(repeats):
                for call in calls:
                    call()

        how = "queue"
    play()
    torch.cuda.synchronize()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        play()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (repeats * len(calls)))
    return median(times), how


def host_us(calls: Sequence[Call], seconds: float = 1.0) -> float:
    """Median wall time of one call on the host in microseconds: a CPU op, or what an eager launch costs."""
    for call in calls:
        call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 10 or time.perf_counter() - begin < seconds:
        for call in calls:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def copy_bytes_per_us(size: int = 1 << 30) -> float:
    """Bytes read plus written in a microsecond by a kernel that reads and writes as many: what "floor" means here.

    Not by ``copy_``: in a captured graph it is a copy node, of 2.7 TB/s on an H200 whose kernels reach 4.1.
    """
    source = [torch.rand(size // 4, device="cuda") for _ in range(2)]
    target = torch.empty_like(source[0])
    return 2 * size / device_us([lambda s=s: torch.neg(s, out=target) for s in source])[0]


def peak_gib(call: Call) -> float:
    """Memory that one call takes beyond what was there, in GiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**30
