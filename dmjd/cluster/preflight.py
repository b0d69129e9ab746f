"""``dmjd preflight key=value ...``: before a long job, whether its nodes are what it needs. Under a minute.

Started by the launcher that will start the run, with the run's own words. Every rank measures what it sees; rank 0
holds all of it against what the run needs, and says for each thing that is missing what to do about it.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import NoReturn

import torch
import torch.distributed as dist

import dmjd
from dmjd.builders import build_objective, build_tokenizer, check_data_timeout
from dmjd.builders.step import build_step
from dmjd.cluster.checks import HANGS, SLOWDOWNS, Check, Facts, Need, judge
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import training_batches, training_crop, training_source
from dmjd.data.identity import DataIdentity
from dmjd.data.loader import shared_memory_free, shared_memory_needed
from dmjd.data.shards.pool import shorten_socket_paths
from dmjd.errors import UserError
from dmjd.ops import build_info
from dmjd.parallel.build import select_device
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.environment import prepare_environment
from dmjd.parallel.world import World, alone, join_world

ALL_REDUCE_SECONDS = 60.0
"""By then NCCL has found its ways between any number of nodes, or never will."""
SMI_SECONDS = 20.0
UNKNOWN_COLUMN = 2
"""Exit code of an nvidia-smi that calls something otherwise, which is no fault of a node."""
_GPU_COLUMNS = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    *(f"clocks_throttle_reasons.{name}" for name in SLOWDOWNS),
    "memory.used",
)


def measure(config: PretrainConfig, world: World) -> list[Facts]:
    """The facts of every rank, on every rank. Collective."""
    facts = Facts(world.rank, platform.node(), _versions())
    began = time.monotonic()
    try:
        shorten_socket_paths()
        dataset = training_source(config.data)
        facts.data = str(DataIdentity.of(dataset) or f"{len(dataset)} images")
        training_batches(config.data, dataset, config.batch_size, config.seed, world.rank, world.size).load(0)
    except (UserError, OSError) as error:  # a disk that is gone has errors of its own
        facts.data_error = str(error)
    facts.data_seconds = time.monotonic() - began
    facts.shm_free = shared_memory_free()
    facts.disk_free, facts.disk_error = _disk(Path(config.run), world)
    if world.local_rank == 0 and shutil.which("nvidia-smi"):
        facts.gpus, facts.gpu_error = _gpus()
    world.gather(None)  # together once more: whoever had a slow disk is here now
    facts.clock = time.time()
    facts.gigabytes_per_second, facts.all_reduce_error = _all_reduce(world)
    return [Facts(**fields) for fields in world.gather(asdict(facts))]


def need(config: PretrainConfig, world: World, parameters: int) -> Need:
    """What a run of a model of so many parameters needs: float32 weights and two moments, and an average of them."""
    batch = Batch.nbytes(config.batch_size // world.size, training_crop(config.data).sizes, config.data.channels)
    states = 3 + (config.ema_decay is not None)
    return Need(
        checkpoint=4 * parameters * states,
        checkpoints=config.keep_checkpoints + 2,  # one more while it is written, and one for a full disk's margin
        shm=shared_memory_needed(batch, config.workers, world.local_size),
        nccl=world.device.type == "cuda",
    )


def _versions() -> dict[str, str]:
    info = build_info()
    return {
        "dmjd": dmjd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "CUDA": torch.version.cuda or "none",
        "native ops": "none" if info is None else f"for torch >= {info['torch_target']}",
    }


def _disk(run: Path, world: World) -> tuple[int, str]:
    """Free bytes where the run folder is or will be, and why it will not do. Every rank must see what rank 0 writes."""

    def put() -> str:
        run.mkdir(parents=True, exist_ok=True)
        with (run / ".preflight").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(platform.node())
        return platform.node()

    error = world.on_main(lambda: _outcome(put))
    if error:
        return 0, error
    free = 0

    def look() -> None:
        nonlocal free
        (run / ".preflight").read_bytes()
        free = shutil.disk_usage(run).free

    error = _outcome(look)
    world.gather(None)
    world.on_main(lambda: (run / ".preflight").unlink(missing_ok=True))
    return free, f"what rank 0 has written there is not seen: {error}" if error else ""


def _outcome(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return f"{error.filename or 'the run folder'} cannot be written to, locked and read ({error.strerror})"
    return ""


def _gpus() -> tuple[list[dict[str, str]], str]:
    """What nvidia-smi knows of each, or why it does not: of a GPU that has fallen off its bus it never answers."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_COLUMNS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi does not answer within {SMI_SECONDS:.0f} s"
    if done.returncode == UNKNOWN_COLUMN:
        return [], ""
    if done.returncode:
        return [], f"nvidia-smi fails: {' '.join((done.stdout + done.stderr).split())}"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(_GPU_COLUMNS, row, strict=True)) for row in rows if len(row) == len(_GPU_COLUMNS)], ""


def _all_reduce(world: World) -> tuple[float | None, str]:
    """:func:`_bandwidth`, or why there is none. It has a thread of its own, for NCCL may never come back."""
    outcome: list[float | None] = []
    error: list[RuntimeError] = []

    def act() -> None:
        try:
            outcome.append(_bandwidth(world))
        except RuntimeError as failure:
            error.append(failure)

    thread = Thread(target=act, name="all-reduce", daemon=True)
    thread.start()
    thread.join(ALL_REDUCE_SECONDS)
    if thread.is_alive():
        return None, f"{HANGS} within {ALL_REDUCE_SECONDS:.0f} s"
    return (None, " ".join(str(error[0]).split())[:300]) if error else (outcome[0], "")


def _bandwidth(world: World) -> float | None:
    """GB/s of an all-reduce as NCCL's tests count it: what every rank sends, 2 (n - 1) / n of its buffer."""
    if world.size == 1:
        return None
    cuda = world.device.type == "cuda"
    values, rounds = torch.ones((64 if cuda else 4) * 2**20, device=world.device), 10 if cuda else 2
    dist.all_reduce(values)
    if cuda:
        torch.cuda.synchronize(world.device)
    began = time.monotonic()
    for _ in range(rounds):
        dist.all_reduce(values)
    if cuda:
        torch.cuda.synchronize(world.device)
    sent = 2 * (world.size - 1) / world.size * values.nbytes * rounds
    return sent / (time.monotonic() - began) / 1e9


def preflight(config: PretrainConfig, warm: bool = False) -> list[Check]:
    """All checks, on every rank; with ``warm`` each node compiles the model once for the runs that follow.

    Raises:
        UserError: where the configuration itself does not hold.
    """
    prepare_environment(Path(config.run))
    world = join_world(select_device(config.engine.device), config.engine)
    broken = False
    try:
        check_data_timeout(config, world.size)
        tokenizer = build_tokenizer(config)
        parameters = sum(value.numel() for value in build_objective(config, tokenizer.dim).parameters())
        facts = measure(config, world)
        checks = judge(facts, need(config, world, parameters))
        broken = any(fact.all_reduce_error for fact in facts)
        if warm and not broken:
            checks.append(_warm(config, world))
        return checks
    finally:
        if broken:
            atexit.register(_leave)
        else:
            world.close()


def _leave() -> NoReturn:
    """End in spite of a collective that does not, which neither closing its group nor the interpreter's end would."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def _warm(config: PretrainConfig, world: World) -> Check:
    """One step of zeros, with the shapes that the run will have, by the first rank of every node. Sharded models take
    all ranks, which then find each other's code."""
    began, sharded = time.monotonic(), ENGINES[config.engine.name].collective
    if sharded or world.local_rank == 0:
        step = build_step(config, world if sharded else alone(world.device))
        images = config.batch_size // world.size
        batch = Batch.empty(images, training_crop(config.data).sizes, config.data.channels).to(step.engine.device)
        step.forward_backward(batch, 0)
    world.gather(None)
    return Check("compilation", f"{time.monotonic() - began:.0f} s on each node, kept for the runs that follow")
