"""``dmjd preflight key=value ...``: check the nodes of a long job against its needs, in under a minute.

Started by the launcher of the run, with the run's overrides. Every rank measures its node.
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
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import dmjd
from dmjd.builders import build_tokenizer, check_data_timeout
from dmjd.builders.step import TrainStep
from dmjd.builders.tasks import builders_of, classes_of
from dmjd.cluster.checks import HANGS, SLOWDOWNS, Check, Facts, Need, run_checks
from dmjd.config import DownstreamConfig, PretrainConfig, TrainConfig, check_batch
from dmjd.data.build import training_batches, training_source, training_transform
from dmjd.data.identity import DataIdentity
from dmjd.data.shards.pool import shorten_socket_paths
from dmjd.data.workers import shared_memory_free, shared_memory_needed
from dmjd.errors import UserError
from dmjd.ops import build_info
from dmjd.parallel.build import select_device
from dmjd.parallel.engines import ENGINES
from dmjd.parallel.environment import prepare_environment
from dmjd.parallel.world import World, alone, join_world
from dmjd.runs.folder import RunFolder
from dmjd.train.loop import downstream_task, resolve_pretraining, resolved

Build = Callable[[World], TrainStep[Any]]

ALL_REDUCE_SECONDS = 60.0
"""Longer than NCCL takes to connect any number of nodes."""
SMI_SECONDS = 20.0
UNKNOWN_COLUMN = 2
"""Exit code of an nvidia-smi that lacks one of the columns, which is no fault of a node."""
_GPU_COLUMNS = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    *(f"clocks_throttle_reasons.{name}" for name in SLOWDOWNS),
    "memory.used",
)


def measure(config: TrainConfig, world: World) -> list[Facts]:
    """Measure on every rank; returns the facts of all ranks. Collective."""
    facts = Facts(world.rank, platform.node(), _versions())
    began = time.monotonic()
    try:
        shorten_socket_paths()
        dataset = training_source(config.data)
        facts.data = str(DataIdentity.of(dataset) or f"{len(dataset)} images")
        training_batches(config.data, dataset, config.batch_size, config.seed, world.rank, world.size).load(0)
    except (UserError, OSError) as error:  # a stale mount raises OSError
        facts.data_error = str(error)
    facts.data_seconds = time.monotonic() - began
    facts.shm_free = shared_memory_free()
    facts.disk_free, facts.disk_error = _disk(Path(config.run), world)
    if world.local_rank == 0 and shutil.which("nvidia-smi"):
        facts.gpus, facts.gpu_error = _gpus()
    world.gather(None)  # a barrier: the disk of some rank may be slow
    facts.clock = time.time()
    facts.gigabytes_per_second, facts.all_reduce_error = _all_reduce(world)
    return [Facts(**fields) for fields in world.gather(asdict(facts))]


def need(config: TrainConfig, world: World, parameters: int) -> Need:
    """Needs of a run: a checkpoint holds float32 weights, two moments of each, and their average if there is one."""
    batch = training_transform(config.data).nbytes(config.batch_size // world.size, config.data.channels)
    states = 3 + (config.ema_decay is not None)
    return Need(
        checkpoint=4 * parameters * states,
        checkpoints=config.keep_checkpoints + 2,  # one that is being written, and one as a margin
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
    """Free bytes on the disk of the run folder, or an error. Every rank must see the file that rank 0 writes."""
    probe = run / ".preflight"

    def describe(error: OSError) -> str:
        return f"{error.filename or 'the run folder'} cannot be written to, locked and read ({error.strerror})"

    def write() -> str:
        try:
            run.mkdir(parents=True, exist_ok=True)
            with probe.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.write(platform.node())
        except OSError as error:
            return describe(error)
        return ""

    if error := world.on_main(write):
        return 0, error
    try:
        probe.read_bytes()
        result = shutil.disk_usage(run).free, ""
    except OSError as failure:
        result = 0, f"the file that rank 0 has written is not visible: {describe(failure)}"
    world.gather(None)
    world.on_main(lambda: probe.unlink(missing_ok=True))
    return result


def _gpus() -> tuple[list[dict[str, str]], str]:
    """Columns of nvidia-smi for each GPU, or an error. It hangs if a GPU has fallen off the bus."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_COLUMNS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi does not respond within {SMI_SECONDS:.0f} s"
    if done.returncode == UNKNOWN_COLUMN:
        return [], ""
    if done.returncode:
        return [], f"nvidia-smi fails: {' '.join((done.stdout + done.stderr).split())}"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(_GPU_COLUMNS, row, strict=True)) for row in rows if len(row) == len(_GPU_COLUMNS)], ""


def _all_reduce(world: World) -> tuple[float | None, str]:
    """:func:`_bandwidth`, or an error. In a thread of its own, since NCCL may never return."""
    outcome: list[tuple[float | None, str]] = []

    def act() -> None:
        try:
            outcome.append((_bandwidth(world), ""))
        except RuntimeError as error:
            outcome.append((None, " ".join(str(error).split())[:300]))

    thread = Thread(target=act, name="all-reduce", daemon=True)
    thread.start()
    thread.join(ALL_REDUCE_SECONDS)
    return outcome[0] if outcome else (None, f"{HANGS} within {ALL_REDUCE_SECONDS:.0f} s")


def _bandwidth(world: World) -> float | None:
    """Bus bandwidth of an all-reduce in GB/s as in nccl-tests: each rank sends 2 (n - 1) / n of its buffer."""
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


def preflight(config: TrainConfig, warm: bool = False) -> list[Check]:
    """Run all checks, on every rank; with ``warm`` each node also compiles the model, into the cache of the run.

    Raises:
        UserError: if the configuration is wrong.
    """
    prepare_environment(Path(config.run))
    world = join_world(select_device(config.engine.device), config.engine)
    broken = False
    try:
        config, parameters, build = _model(config, world)
        check_batch(config.batch_size, config.engine.grad_accum_steps, world.size)
        check_data_timeout(config, world.size)
        facts = measure(config, world)
        checks = run_checks(facts, need(config, world, parameters))
        broken = any(fact.all_reduce_error for fact in facts)
        if warm and not broken:
            checks.append(_warm(config, world, build))
        return checks
    except Exception as error:
        broken = broken or (world.size > 1 and not isinstance(error, UserError))  # the other ranks do not raise it
        raise
    finally:
        if broken:
            atexit.register(_leave)
        else:
            world.close()


def _model(config: TrainConfig, world: World) -> tuple[TrainConfig, int, Build]:
    """The configuration as the run resolves it, the parameters of its model, and the function that builds its step."""
    builders, classes = builders_of(config), 0
    run = RunFolder(Path(config.run))
    if isinstance(config, PretrainConfig):
        config = resolved(config, run, world, resolve_pretraining)
        world.all_or_none(partial(build_tokenizer, config))
    else:
        assert isinstance(config, DownstreamConfig)
        resolve, _ = downstream_task(config)
        config = resolved(config, run, world, resolve)
        classes = classes_of(config)
    with torch.device("meta"):
        objective, _ = builders.objective_and_inputs(config, classes, builders.pair)
    parameters = sum(value.numel() for value in objective.parameters())
    return config, parameters, partial(builders.step, config, classes)


def _leave() -> NoReturn:
    """Exit while a collective hangs: destroying its group, and the interpreter's exit, would wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2)


def _warm(config: TrainConfig, world: World, build: Build) -> Check:
    """Compile by one step on zeros, with the shapes of the run, on the first rank of every node.

    Sharded models take all ranks.
    """
    began, sharded = time.monotonic(), ENGINES[config.engine.name].collective

    def compile_step() -> None:
        step = build(world if sharded else alone(world.device))
        images = config.batch_size // world.size
        batch = training_transform(config.data).empty(images, config.data.channels).to(step.engine.device)
        if batch.labels.ndim == 1:  # of classes; without objects, detection has its full shapes
            batch = batch._replace(labels=torch.zeros_like(batch.labels))
        step.forward_backward(batch, 0)

    world.all_or_none(compile_step if sharded or world.local_rank == 0 else lambda: None)
    return Check("compilation", f"{time.monotonic() - began:.0f} s on each node, cached for the run")
