"""Many trainings at once on the GPUs of one host, each in a process of its own, under CUDA MPS where it works.

Floors of a step of 1024 images, two views, on an H200: products 1.36e12 operations, 4 ms at the 350 TFLOP/s that
products of width 192 may reach; about 12 GB of activations, 3 ms. So 7 ms, or 140,000 images/s, if the host is never
the bound: an image costs a loader worker 13 us, so 100,000 images/s are 1.3 cores, and a CUDA graph replaces the
launches of the step's kernels.
"""

from __future__ import annotations

import json
import os
import re
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
from evidence.elpv import write_folds
from evidence.studies import HELD_OUT, SOURCES, TUNE, Job, Plan, Rows

ON_GPU = ("engine.compile=model", "engine.cuda_graphs=true")
POLL_SECONDS = 0.2


def card() -> tuple[str, list[str]]:
    """Name of the GPUs and the UUID of each that CUDA_VISIBLE_DEVICES leaves; this process makes no CUDA context.
    Without any, "CPU" and one empty string."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "CPU", [""]
    found = re.findall(r"^GPU (\d+): (.+) \(UUID: (\S+)\)$", listed, re.MULTILINE)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = [uuid for index, _, uuid in found if visible is None or {index, uuid} & set(visible.split(","))]
    return found[0][1], chosen


def write_data(source: str, root: str | None, folder: Path) -> None:
    """Folders of ``source`` below ``folder``. elpv: :func:`evidence.elpv.write_folds`. Others, in Fashion-MNIST's
    format: all images ("100"), the first 10 and 1 % of each class, and "tune", whose test images are the last
    :data:`HELD_OUT` % of the training images."""
    if source == "elpv":
        assert root is not None
        return write_folds(Path(root), folder)
    config = DataConfig(name=source, root=root, channels=1, pad=0)
    arrays = {}
    for split in ("train", "test"):
        images = build_dataset(config, split)
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
    process: subprocess.Popen[str]
    path: Path
    slot: int
    began: float


class Pool:
    """Runs jobs of ``plan`` until none is left or the time is over.

    A process that will run the next training of a slot is started with the current one, so that its imports take no
    time of a GPU. Of a step that is not compiled yet one training begins first where there are others, and the later
    ones find its kernels in the compiler's cache.

    Args:
        folder: of the data, the run folders and their output.
        at_once: processes of each GPU.
        limit: seconds; a training that would not end before them is not begun.
        machine: further overrides of dmjd pretrain and finetune, such as those that compile.
        host: further columns of every row.
    """

    def __init__(
        self,
        plan: Plan,
        rows: Rows,
        folder: Path,
        at_once: int,
        limit: float,
        machine: Sequence[str],
        host: dict[str, Any],
    ) -> None:
        self.plan, self.rows, self.folder, self.at_once, self.machine = plan, rows, folder, at_once, machine
        self.device, self.gpus = card()
        self.workers = max(1, len(os.sched_getaffinity(0)) // (at_once * len(self.gpus)) - 1)
        self.began, self.limit = time.monotonic(), limit
        self.running: list[Running] = []
        self.waiting: dict[int, subprocess.Popen[str]] = {}  # slot -> the process of its next training
        self.compiled: set[str] = set()
        self.failed: set[tuple[str, str, int, float]] = set()
        self.costs: list[tuple[float, float]] = []  # of finished trainings: seconds of start and scores, of an image
        self.host = {
            "device": self.device,
            "gpus": len(self.gpus),
            "at_once": at_once,
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            **host,
        }

    def run(self, pending: Callable[[], Iterator[Job]]) -> list[dict[str, Any]]:
        """Run the jobs that ``pending`` gives, which is called again as trainings end; rows in the order of their
        end."""
        ended: list[dict[str, Any]] = []
        try:
            while True:
                self._begin(pending())
                if not self.running or self.left < 0:
                    break
                time.sleep(POLL_SECONDS)
                ended += self._collect()
        finally:
            for process in [*(each.process for each in self.running), *self.waiting.values()]:
                process.kill()
                process.communicate()
        return ended

    @property
    def left(self) -> float:
        return self.limit - (time.monotonic() - self.began)

    def _begin(self, pending: Iterator[Job]) -> None:
        slots = set(range(self.at_once * len(self.gpus))) - {each.slot for each in self.running}
        if not slots:
            return
        taken = {each.job.key for each in self.running} | self.failed
        jobs = [job for job in pending if job.key not in taken and self._seconds(job) <= self.left]
        for slot in sorted(slots)[: len(jobs)]:
            cold = {each.job.arm.step.id for each in self.running} - self.compiled
            job = next((job for job in jobs if job.arm.step.id not in cold), jobs[0])
            jobs.remove(job)
            self.running.append(self._start(job, slot))
        for each in self.running[: len(jobs)]:
            if each.slot not in self.waiting:
                self.waiting[each.slot] = self._process(each.slot)

    def _process(self, slot: int) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        if self.gpus[0]:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        command = [sys.executable, "-m", "evidence.arm", *["compile"] * bool(self.machine)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, text=True)

    def _seconds(self, job: Job) -> float:
        """The time that ``job`` will take, by those that have ended; 0 before one has."""
        if not self.costs:
            return 0
        fixed, of_image = (median(column) for column in zip(*self.costs, strict=True))
        return fixed + of_image * job.images

    def _start(self, job: Job, slot: int) -> Running:
        name = "-".join(map(str, job.key))
        path = self.folder / f"{name}.json"
        own = dict(key.split("=", 1) for key in (*self.machine, *(f"{k}={v}" for k, v in job.arm.keys.items())))
        own |= {"epochs": str(job.epochs), "optim.base_lr": str(job.rate)}
        content = {
            "folder": str(self.folder / name),
            "keys": [f"{key}={value}" for key, value in own.items()],
            "source": job.arm.source,
            "data": str(self.folder / "data" / job.data),
            "objective": job.arm.objective,
            "seed": job.seed,
            "workers": self.workers,
            "untrained": job.untrained,
            "finetune": [*self.plan.finetune, *self.machine] if job.finetune else None,
        }
        path.write_text(json.dumps(content))
        process = self.waiting.pop(slot, None)
        if process is None or process.poll() is not None:
            process = self._process(slot)
        assert process.stdin is not None
        process.stdin.write(f"{path}\n")
        process.stdin.close()
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
                log = each.path.with_suffix(".txt")
                output = log.read_text()[-2000:] if log.is_file() else "before its output was opened"
                print(f"{job.arm.label}, seed {job.seed} failed:\n{output}")
                continue
            arm, stage, seed, rate = job.key
            images = job.images
            self.compiled.add(job.arm.step.id)
            row = {
                "arm": arm,
                "label": job.arm.label,
                "stage": stage,
                "seed": seed,
                "rate": rate,
                "epochs": job.epochs,
                **json.loads(each.path.with_suffix(".row").read_text()),
                "images": images,
                "gpu_seconds": round(seconds / self.at_once, 1),
                **self.host,
            }
            of_image = 1 / row["images_per_second"]
            self.costs.append((seconds - of_image * images, of_image))
            self.rows.add(row)
            rows.append(row)
            main = SOURCES[job.arm.source].scores[0]
            print(
                f"{time.monotonic() - self.began:5.0f} s  {stage} {job.arm.label}, seed {seed}, rate {rate:g}: "
                f"{main} {row['scores'][main]:.2f}, {row['images_per_second']:.0f} images/s, {seconds:.0f} s",
                flush=True,
            )
        return rows


def rates_at_once(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Images per second of all trainings together: the sum of their rates, which is too high where not all of them
    trained at the same time, and all images over the time from the first to the last, which is too low then."""
    images = sum(row["images_per_second"] * (row["window"][1] - row["window"][0]) for row in rows)
    seconds = max(row["window"][1] for row in rows) - min(row["window"][0] for row in rows)
    return round(sum(row["images_per_second"] for row in rows)), round(images / seconds)


def commit() -> str:
    """The commit of the working tree; "" outside a repository."""
    folder = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout.strip()
