"""Many trainings at once on the GPUs of one host, each in a process of its own, under CUDA MPS where it works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from dmjd.config import DataConfig
from dmjd.data.build import build_dataset
from dmjd.data.dataset import Pixels
from evidence.studies import HELD_OUT, TUNE, Job, Plan, Rows

ON_GPU = ("engine.compile=model", "engine.cuda_graphs=true")
POLL_SECONDS = 0.2


def card() -> tuple[str, int]:
    """Name and number of the GPUs; this process makes no CUDA context. Without any, "CPU" and 1."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "CPU", 1
    names = [line.partition(": ")[2].partition(" (")[0] for line in listed.splitlines() if line.startswith("GPU")]
    return names[0], len(names)


def write_data(source: str, root: str | None, folder: Path) -> None:
    """Folders of ``source`` in Fashion-MNIST's format below ``folder``: all images ("100"), the first 10 and 1 % of
    each class, and "tune", whose test images are the last :data:`HELD_OUT` % of the training images."""
    config = DataConfig(name=source, root=root, channels=1, pad=0)
    arrays = {}
    for split in ("train", "test"):
        images = build_dataset(config, split)  # type: ignore[arg-type]  # a literal
        count = range(len(images))
        arrays[split] = (
            np.stack([images.image(index) for index in count])[..., 0],
            np.array([images.label(index) for index in count], np.uint8),
        )
    (pixels, labels), test = arrays["train"], arrays["test"]
    kept = len(labels) - len(labels) * HELD_OUT // 100
    _write(folder / TUNE, (pixels[:kept], labels[:kept]), (pixels[kept:], labels[kept:]))
    for percent in (100, 10, 1):
        each = [np.flatnonzero(labels == label) for label in range(10)]
        chosen = np.sort(np.concatenate([rows[: max(1, len(rows) * percent // 100)] for rows in each]))
        _write(folder / str(percent), (pixels[chosen], labels[chosen]), test)


def _write(folder: Path, train: tuple[Pixels, Pixels], test: tuple[Pixels, Pixels]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, arrays in (("train", train), ("t10k", test)):
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays, strict=True):
            header = (0x0800 | array.ndim, *array.shape)
            content = np.array(header, ">u4").tobytes() + array.tobytes()
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(content)


@contextmanager
def mps(folder: Path, wanted: bool) -> Iterator[bool]:
    """Start CUDA's Multi-Process Service for the processes started within, if it works; whether it does."""
    control = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if control is None:
        yield False
        return
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps")}
    (folder / "mps").mkdir()
    os.environ.update(own)
    subprocess.run([control, "-d"], check=False)
    try:
        trial = "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"
        try:
            works = not subprocess.run([sys.executable, "-c", trial], timeout=60, check=False).returncode
        except subprocess.TimeoutExpired:
            works = False
        if not works:
            _end_mps(control, own)
        yield works
    finally:
        if own.items() <= os.environ.items():
            _end_mps(control, own)


def _end_mps(control: str, own: dict[str, str]) -> None:
    with suppress(subprocess.TimeoutExpired):
        subprocess.run([control], input="quit\n", text=True, timeout=20, check=False)
    for name in own:
        del os.environ[name]


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    path: Path
    slot: int
    began: float


class Pool:
    """Runs the jobs of ``plan`` until none is left or the time is over.

    Args:
        folder: of the data, the run folders and their output.
        at_once: processes of each GPU.
        limit: seconds; a training that would not end before them is not begun.
        machine: further overrides of dmjd pretrain and finetune, such as those that compile.
    """

    def __init__(
        self, plan: Plan, rows: Rows, folder: Path, at_once: int, limit: float, machine: Sequence[str], used_mps: bool
    ) -> None:
        self.plan, self.rows, self.folder, self.at_once, self.machine = plan, rows, folder, at_once, machine
        self.device, self.gpus = card()
        self.began, self.limit = time.monotonic(), limit
        self.running: list[Running] = []
        self.failed: set[tuple[str, str, int, float]] = set()
        self.costs: list[float] = []  # seconds of an image, of finished trainings
        self.host = {
            "device": self.device,
            "gpus": self.gpus,
            "at_once": at_once,
            "mps": used_mps,
            "torch": torch.__version__,
            "commit": _commit(),
            "date": date.today().isoformat(),
        }

    def run(self, jobs: Callable[[], Iterator[Job]] | None = None) -> list[dict[str, Any]]:
        """Run ``jobs``, by default those that the plan lacks; rows of this call in the order of their end."""
        pending = jobs or (lambda: self.plan.jobs(self.rows))
        ended: list[dict[str, Any]] = []
        try:
            while True:
                self._begin(pending())
                if not self.running or self.left < 0:
                    break
                time.sleep(POLL_SECONDS)
                ended += self._collect()
        finally:
            for each in self.running:
                each.process.kill()
                each.process.wait()
        return ended

    @property
    def left(self) -> float:
        return self.limit - (time.monotonic() - self.began)

    def _begin(self, jobs: Iterator[Job]) -> None:
        slots = set(range(self.at_once * self.gpus)) - {each.slot for each in self.running}
        taken = {each.job.key for each in self.running} | self.failed
        for job in jobs:
            if not slots:
                break
            if job.key in taken or (self.costs and self.plan.images(job) * median(self.costs) > self.left):
                continue
            slot = min(slots)
            slots.remove(slot)
            self.running.append(self._start(job, slot))

    def _start(self, job: Job, slot: int) -> Running:
        name = "-".join(map(str, job.key))
        path = self.folder / f"{name}.json"
        data = TUNE if job.stage == TUNE else str(job.arm.percent)
        own = dict(key.split("=", 1) for key in (*self.machine, *(f"{k}={v}" for k, v in job.arm.keys.items())))
        own |= {"epochs": str(job.epochs), "optim.base_lr": str(job.rate)}
        content = {
            "folder": str(self.folder / name),
            "keys": [f"{key}={value}" for key, value in own.items()],
            "data": str(self.folder / "data" / data),
            "objective": job.arm.objective,
            "seed": job.seed,
            "workers": 1,
            "untrained": job.untrained,
            "finetune": [*self.plan.finetune, *self.machine] if job.finetune else None,
        }
        path.write_text(json.dumps(content))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        if self.gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(slot % self.gpus)
        with path.with_suffix(".txt").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "evidence.arm", str(path)], stdout=log, stderr=log, env=environment
            )
        return Running(job, process, path, slot, time.monotonic())

    def _collect(self) -> list[dict[str, Any]]:
        """Store the rows of trainings that have ended."""
        ended = [each for each in self.running if each.process.poll() is not None]
        rows = []
        for each in ended:
            self.running.remove(each)
            seconds, job = time.monotonic() - each.began, each.job
            if each.process.returncode:
                self.failed.add(job.key)
                print(f"{job.arm.label}, seed {job.seed} failed:\n{each.path.with_suffix('.txt').read_text()[-2000:]}")
                continue
            self.costs.append(seconds / self.plan.images(job))
            arm, stage, seed, rate = job.key
            row = {
                "arm": arm,
                "label": job.arm.label,
                "stage": stage,
                "seed": seed,
                "rate": rate,
                **json.loads(each.path.with_suffix(".row").read_text()),
                "images": self.plan.images(job),
                "gpu_seconds": round(seconds / self.at_once, 1),
                **self.host,
            }
            self.rows.add(row)
            rows.append(row)
            print(
                f"{time.monotonic() - self.began:5.0f} s  {stage} {job.arm.label}, seed {seed}, rate {rate:g}: "
                f"probe {row['scores']['probe']:.2f}, {row['images_per_second']:.0f} images/s, {seconds:.0f} s",
                flush=True,
            )
        return rows


def rates_at_once(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Images per second of all trainings together: the sum of their rates, which is too high where not all of them
    trained at the same time, and all images over the time from the first to the last, which is too low then."""
    images = sum(row["images_per_second"] * (row["window"][1] - row["window"][0]) for row in rows)
    seconds = max(row["window"][1] for row in rows) - min(row["window"][0] for row in rows)
    return round(sum(row["images_per_second"] for row in rows)), round(images / seconds)


def _commit() -> str:
    """The commit of the working tree; "" outside a repository."""
    folder = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout.strip()
