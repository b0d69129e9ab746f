"""``dmjd preflight key=value ...``: before a long job, whether its nodes are what it needs. Under a minute.

Started by the launcher that will start the run, with the run's own words. Every rank measures what it sees; rank 0
holds all of it against what the run needs, and says for each thing that is missing what to do about it.
"""

from __future__ import annotations

import fcntl
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import dmjd
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import build_dataset, training_batches, training_crop
from dmjd.data.shards.dataset import ShardDataset
from dmjd.errors import UserError
from dmjd.ops import build_info
from dmjd.parallel.build import build_engine, select_device
from dmjd.parallel.environment import prepare_environment
from dmjd.parallel.world import SHARDED, World, alone, join_world
from dmjd.train.builders import build_mask_spec, build_objective, build_tokenizer, token_grid
from dmjd.train.preparation import Preparation

GIB = 2**30
PREFETCH = 2
"""Batches that torch's loader has ready for each worker."""
CLOCK_SKEW_SECONDS = 2.0
LEAST_GB_PER_SECOND = {"one node": 5.0, "several nodes": 1.0}
"""Of NCCL. NVLink and InfiniBand give ten times as much; less than this is a socket where a faster way was meant."""
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
_GPU_COLUMNS = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    *(f"clocks_throttle_reasons.{name}" for name in SLOWDOWNS),
    "memory.used",
)


class Check(NamedTuple):
    """``fix`` is empty where all is well."""

    name: str
    found: str
    fix: str = ""


@dataclass
class Facts:
    """What one rank sees.

    data: the identity of the data set, and ``data_error`` why it has none; ``data_seconds`` to read a first batch.
    clock: seconds since 1970 at the moment all ranks are together.
    shm_free: bytes. disk_error: why the run folder cannot be written to or locked. gpus: a dict of each, from the
        first rank of a node.
    """

    rank: int
    host: str
    versions: dict[str, str] = field(default_factory=dict)
    data: str = ""
    data_error: str = ""
    data_seconds: float = 0.0
    clock: float = 0.0
    shm_free: int = 0
    disk_free: int = 0
    disk_error: str = ""
    gpus: list[dict[str, str]] = field(default_factory=list)
    gigabytes_per_second: float | None = None


@dataclass(frozen=True)
class Need:
    """What the run asks of its nodes, in bytes."""

    checkpoint: int
    checkpoints: int
    shm: int
    nccl: bool


def measure(config: PretrainConfig, world: World) -> list[Facts]:
    """The facts of every rank, on every rank. Collective."""
    facts = Facts(world.rank, platform.node(), _versions())
    began = time.monotonic()
    try:
        dataset = build_dataset(config.data, "train")
        facts.data = dataset.fingerprint if isinstance(dataset, ShardDataset) else f"{len(dataset)} images"
        training_batches(config.data, dataset, config.batch_size, config.seed, world.rank, world.size).load(0)
    except UserError as error:
        facts.data_error = str(error)
    facts.data_seconds = time.monotonic() - began
    facts.shm_free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    facts.disk_free, facts.disk_error = _disk(Path(config.run), world)
    if world.local_rank == 0 and shutil.which("nvidia-smi"):
        facts.gpus = _gpus()
    world.gather(None)  # together once more: whoever had a slow disk is here now
    facts.clock = time.time()
    facts.gigabytes_per_second = _bandwidth(world)
    return [Facts(**fields) for fields in world.gather(asdict(facts))]


def need(config: PretrainConfig, world: World, parameters: int) -> Need:
    """What a run of a model of so many parameters needs: float32 weights and two moments, and an average of them."""
    pixels = sum(height * width for height, width in training_crop(config.data).sizes)
    batch = config.batch_size // world.size * pixels * config.data.channels
    states = 3 + (config.ema_decay is not None)
    return Need(
        checkpoint=4 * parameters * states,
        checkpoints=config.keep_checkpoints + 2,  # one more while it is written, and one for a full disk's margin
        shm=batch * config.workers * (PREFETCH + 1) * world.local_size,
        nccl=world.device.type == "cuda",
    )


def judge(facts: Sequence[Facts], needed: Need) -> list[Check]:
    """The facts held against the need, check by check."""
    return [
        _judge_versions(facts),
        _judge_data(facts),
        _judge_shm(facts, needed),
        _judge_disk(facts, needed),
        _judge_clocks(facts),
        _judge_gpus(facts),
        _judge_bandwidth(facts, needed),
    ]


def _judge_versions(facts: Sequence[Facts]) -> Check:
    for name, value in facts[0].versions.items():
        other = next((fact for fact in facts if fact.versions.get(name) != value), None)
        if other is not None:
            found = f"{name} is {value} on {facts[0].host} and {other.versions.get(name, 'absent')} on {other.host}"
            return Check(
                "versions", found, "one environment for all nodes: a container, or a disk that all of them see"
            )
    return Check("versions", ", ".join(f"{name} {value}" for name, value in facts[0].versions.items()))


def _judge_data(facts: Sequence[Facts]) -> Check:
    broken = next((fact for fact in facts if fact.data_error), None)
    if broken is not None:
        fix = f"make data.root readable on {broken.host} as it is elsewhere; dmjd shards verify checks a shard set"
        return Check("data", f"rank {broken.rank} on {broken.host}: {broken.data_error}", fix)
    other = next((fact for fact in facts if fact.data != facts[0].data), None)
    if other is not None:
        found = f"{facts[0].data} on {facts[0].host}, {other.data} on {other.host}"
        return Check("data", found, "data.root must be the same data on every node")
    slowest = max(facts, key=lambda fact: fact.data_seconds)
    return Check("data", f"{facts[0].data[:24]}, the first batch in {slowest.data_seconds:.1f} s at the slowest rank")


def _judge_shm(facts: Sequence[Facts], needed: Need) -> Check:
    least = min(facts, key=lambda fact: fact.shm_free)
    found = f"{least.shm_free / GIB:.1f} GiB free on {least.host}, {needed.shm / GIB:.2f} GiB needed"
    if least.shm_free >= needed.shm:
        return Check("/dev/shm", found)
    return Check("/dev/shm", found, "fewer workers, or a larger /dev/shm (docker: --ipc=host or --shm-size)")


def _judge_disk(facts: Sequence[Facts], needed: Need) -> Check:
    broken = next((fact for fact in facts if fact.disk_error), None)
    if broken is not None:
        return Check(
            "run folder", f"{broken.host}: {broken.disk_error}", "name a folder on a disk that all nodes share"
        )
    least = min(facts, key=lambda fact: fact.disk_free)
    wanted = needed.checkpoint * needed.checkpoints
    found = f"{least.disk_free / GIB:.1f} GiB free, {wanted / GIB:.1f} GiB for {needed.checkpoints} checkpoints"
    if least.disk_free >= wanted:
        return Check("run folder", found)
    return Check("run folder", found, "free some space, name another disk with run=, or lower keep_checkpoints")


def _judge_clocks(facts: Sequence[Facts]) -> Check:
    first, last = (pick(facts, key=lambda fact: fact.clock) for pick in (min, max))
    skew = last.clock - first.clock
    if skew <= CLOCK_SKEW_SECONDS:
        return Check("clocks", f"{skew:.2f} s apart at most")
    fix = "tell the administrators (chrony, ntp): time budgets, signs of life and caches go by the clock"
    return Check("clocks", f"{last.host} is {skew:.1f} s ahead of {first.host}", fix)


def _judge_gpus(facts: Sequence[Facts]) -> Check:
    seen = 0
    for fact in facts:
        for gpu in fact.gpus:
            seen += 1
            name, where = (
                f"GPU {gpu['index']} of {fact.host}",
                f"leave {fact.host} out (sbatch --exclude) and report it",
            )
            errors = gpu["ecc.errors.uncorrected.volatile.total"]
            if errors.isdigit() and int(errors):
                return Check("GPUs", f"{name} has had {errors} uncorrectable memory error(s)", where)
            slow = [reason for reason in SLOWDOWNS if gpu[f"clocks_throttle_reasons.{reason}"] == "Active"]
            if slow:
                return Check("GPUs", f"{name} is slowed down ({', '.join(slow)})", where)
            if gpu["memory.used"].isdigit() and int(gpu["memory.used"]) > 8192:
                fix = "somebody else's process is on it: ask for whole nodes (--exclusive)"
                return Check("GPUs", f"{name} has {gpu['memory.used']} MiB in use", fix)
    return Check("GPUs", f"{seen} looked at, no memory errors, none slowed down" if seen else "none to be looked at")


def _judge_bandwidth(facts: Sequence[Facts], needed: Need) -> Check:
    speeds = [fact.gigabytes_per_second for fact in facts if fact.gigabytes_per_second is not None]
    if not speeds:
        return Check("all-reduce", "one process has nobody to talk to")
    kind = "one node" if len({fact.host for fact in facts}) == 1 else "several nodes"
    found = f"{min(speeds):.2f} GB/s over {len(facts)} ranks on {kind}"
    if not needed.nccl or min(speeds) >= LEAST_GB_PER_SECOND[kind]:
        return Check("all-reduce", found)
    return Check("all-reduce", found, "NCCL_DEBUG=INFO tells which way it takes; set NCCL_SOCKET_IFNAME, NCCL_IB_HCA")


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
    problem = "" if (run / ".preflight").is_file() else f"{run} does not show what rank 0 has written there"
    world.gather(None)
    world.on_main(lambda: (run / ".preflight").unlink(missing_ok=True))
    return shutil.disk_usage(run).free if not problem else 0, problem


def _outcome(act: Callable[[], str]) -> str:
    try:
        act()
    except OSError as error:
        return f"{error.filename or 'the run folder'} cannot be written to and locked ({error.strerror})"
    return ""


def _gpus() -> list[dict[str, str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_COLUMNS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(_GPU_COLUMNS, row, strict=True)) for row in rows if len(row) == len(_GPU_COLUMNS)]


def _bandwidth(world: World) -> float | None:
    """GB/s of an all-reduce as NCCL's tests count it: what every rank sends, 2 (n - 1) / n of its buffer."""
    if world.size == 1:
        return None
    cuda = world.device.type == "cuda"
    values, rounds = torch.ones((64 if cuda else 4) * 2**20, device=world.device), 10 if cuda else 2
    dist.all_reduce(values)
    if cuda:
        torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(rounds):
        dist.all_reduce(values)
    if cuda:
        torch.cuda.synchronize()
    sent = 2 * (world.size - 1) / world.size * values.nbytes * rounds
    return sent / (time.monotonic() - began) / 1e9


def report(checks: Sequence[Check]) -> str:
    """A line a check, and below each that fails what to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{'FAILS' if check.fix else 'ok':5}  {check.name:{width}}  {check.found}")
        if check.fix:
            lines.append(f"{'':7}{'':{width}}  fix: {check.fix}")
    return "\n".join(lines)


def preflight(config: PretrainConfig, warm: bool = False) -> list[Check]:
    """All checks, on every rank; with ``warm`` each node compiles the model once for the runs that follow.

    Raises:
        UserError: where the configuration itself does not hold.
    """
    prepare_environment(Path(config.run))
    world = join_world(select_device(config.engine.device), config.engine)
    try:
        tokenizer = build_tokenizer(config)
        parameters = sum(value.numel() for value in build_objective(config, tokenizer.dim).parameters())
        checks = judge(measure(config, world), need(config, world, parameters))
        if warm:
            checks.append(_warm(config, world))
        return checks
    finally:
        world.close()


def _warm(config: PretrainConfig, world: World) -> Check:
    """One step of zeros, with the shapes that the run will have, by the first rank of every node. Sharded models take
    all ranks, which then find each other's code."""
    began, sharded = time.monotonic(), config.engine.name in SHARDED
    if sharded or world.local_rank == 0:
        tokenizer, spec = build_tokenizer(config), build_mask_spec(config.mask, token_grid(config))
        engine = build_engine(
            build_objective(config, tokenizer.dim),
            config.engine,
            config.optim,
            world if sharded else alone(world.device),
        )
        part = config.batch_size // world.size // config.engine.accumulation
        batch = Batch.empty(part, training_crop(config.data).sizes, config.data.channels).to(engine.device)
        prepare = Preparation(
            spec,
            token_grid(config),
            tokenizer,
            tuple(config.data.mean),
            tuple(config.data.std),
            flip=config.data.flip,
            seed=config.seed,
            depth=len(engine.objective.model.encoder.blocks),
            drop_path=config.backbone.drop_path,
        )
        with engine.micro_batch(last=True):
            engine.backward(engine.module(*prepare(batch, 0).inputs).total)
    world.gather(None)
    return Check("compilation", f"{time.monotonic() - began:.0f} s on each node, kept for the runs that follow")
