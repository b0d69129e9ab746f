"""The checks of ``dmjd preflight``: facts that ranks measured, compared with the needs of a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

GIB = 2**30
CLOCK_SKEW_SECONDS = 2.0
MIN_GB_PER_SECOND = {"one node": 5.0, "several nodes": 1.0}
"""Of NCCL's all-reduce. NVLink and InfiniBand reach ten times as much; less than this is a fallback to sockets."""
MAX_MIB_IN_USE = 8192
"""GPU memory in use before a run starts, in MiB. More is a process of another user."""
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
HANGS = "it does not end"


class Check(NamedTuple):
    """Result of a check. ``fix`` is empty if it passed."""

    name: str
    found: str
    fix: str = ""


@dataclass
class Facts:
    """Measurements of one rank.

    data: identity of the data set, or ``data_error``. data_seconds: time to read the first batch.
    clock: seconds since 1970, read when all ranks have met.
    shm_free, disk_free: bytes. disk_error: why the run folder cannot be written to or locked.
    gpus: columns of nvidia-smi for each GPU, from the first rank of a node, or ``gpu_error``.
    gigabytes_per_second: all-reduce bandwidth, None with one process, or ``all_reduce_error``.
    """

    rank: int
    host: str
    versions: dict[str, str] = field(default_factory=dict)
    data: str = ""
    data_error: str = ""
    data_seconds: float = 0.0
    clock: float = 0.0
    shm_free: float = 0
    disk_free: int = 0
    disk_error: str = ""
    gpus: list[dict[str, str]] = field(default_factory=list)
    gpu_error: str = ""
    gigabytes_per_second: float | None = None
    all_reduce_error: str = ""


@dataclass(frozen=True)
class Need:
    """Needs of a run: bytes per checkpoint, number of checkpoints, bytes of /dev/shm per node, whether it uses NCCL."""

    checkpoint: int
    checkpoints: int
    shm: int
    nccl: bool


def run_checks(facts: Sequence[Facts], need: Need) -> list[Check]:
    """Compare the facts of all ranks with the needs of the run."""
    return [Check(name, *check(facts, need)) for name, check in _CHECKS.items()]


def _versions(facts: Sequence[Facts], need: Need) -> tuple[str, ...]:
    for name, value in facts[0].versions.items():
        for other in facts:
            if other.versions.get(name) != value:
                found = f"{name} is {value} on {facts[0].host} and {other.versions.get(name, 'absent')} on {other.host}"
                return found, "use one environment on all nodes: a container, or a shared disk"
    return (", ".join(f"{name} {value}" for name, value in facts[0].versions.items()),)


def _data(facts: Sequence[Facts], need: Need) -> tuple[str, ...]:
    broken = [fact for fact in facts if fact.data_error]
    if broken:
        fix = (
            f"make data.root readable on {broken[0].host} as on the other nodes; dmjd shards verify checks a shard set"
        )
        if len(broken) == len(facts):
            fix = "the same on every node: the run itself would end with this error"
        return f"rank {broken[0].rank} on {broken[0].host}: {broken[0].data_error}", fix
    other = next((fact for fact in facts if fact.data != facts[0].data), None)
    if other is not None:
        found = f"{facts[0].data} on {facts[0].host}, {other.data} on {other.host}"
        return found, "data.root must be the same data on every node"
    seconds = max(fact.data_seconds for fact in facts)
    return (f"{facts[0].data}, the first batch in {seconds:.1f} s on the slowest rank",)


def _shared_memory(facts: Sequence[Facts], need: Need) -> tuple[str, ...]:
    least = min(facts, key=lambda fact: fact.shm_free)
    found = f"{_size(least.shm_free)} free on {least.host}, {_size(need.shm)} needed"
    fix = "fewer workers, or workers=0; or a larger /dev/shm (docker: --ipc=host or --shm-size)"
    return found, "" if least.shm_free >= need.shm else fix


def _run_folder(facts: Sequence[Facts], need: Need) -> tuple[str, ...]:
    broken = next((fact for fact in facts if fact.disk_error), None)
    if broken is not None:
        return f"{broken.host}: {broken.disk_error}", "set run= to a folder on a disk that all nodes share"
    free, needed = min(fact.disk_free for fact in facts), need.checkpoint * need.checkpoints
    found = f"{_size(free)} free, {_size(needed)} for {need.checkpoints} checkpoints"
    return found, "" if free >= needed else "free space, set run= to another disk, or lower keep_checkpoints"


def _size(count: float) -> str:
    """Bytes in GiB, or in MiB below one GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _clocks(facts: Sequence[Facts], need: Need) -> tuple[str, ...]:
    first, last = (pick(facts, key=lambda fact: fact.clock) for pick in (min, max))
    skew = last.clock - first.clock
    if skew <= CLOCK_SKEW_SECONDS:
        return (f"at most {skew:.2f} s apart",)
    fix = "report it to the administrators (chrony, ntp): time budgets, heartbeats and caches depend on the clock"
    return f"{last.host} is {skew:.1f} s ahead of {first.host}", fix


def _gpus(facts: Sequence[Facts], need: Need) -> tuple[str, ...]:
    for fact in facts:
        exclude = f"exclude {fact.host} (sbatch --exclude) and report it"
        if fact.gpu_error and need.nccl:
            return f"{fact.host}: {fact.gpu_error}", exclude
        for gpu in fact.gpus:
            name = f"GPU {gpu['index']} of {fact.host}"
            errors, used = gpu["ecc.errors.uncorrected.volatile.total"], gpu["memory.used"]
            slow = [reason for reason in SLOWDOWNS if gpu[f"clocks_throttle_reasons.{reason}"] == "Active"]
            if errors.isdigit() and int(errors):  # else not supported
                return f"{name} has had {errors} uncorrectable memory error(s)", exclude
            if slow:
                return f"{name} is slowed down ({', '.join(slow)})", exclude
            if used.isdigit() and int(used) > MAX_MIB_IN_USE:
                fix = "a process of another job is on it: request whole nodes (--exclusive)"
                return f"{name} has {used} MiB in use", fix
    count = sum(len(fact.gpus) for fact in facts)
    return (f"{count} checked, no memory errors, none slowed down" if count else "none found",)


def _all_reduce(facts: Sequence[Facts], need: Need) -> tuple[str, ...]:
    fix = "NCCL_DEBUG=INFO logs the transport; set NCCL_SOCKET_IFNAME, NCCL_IB_HCA"
    broken = [fact for fact in facts if fact.all_reduce_error]
    if broken:
        first = min(broken, key=lambda fact: fact.all_reduce_error.startswith(HANGS))  # which follows from other errors
        found = f"rank {first.rank} on {first.host}: {first.all_reduce_error}"
        return found, f"{fix} to a network that all nodes share"
    speeds = [fact.gigabytes_per_second for fact in facts if fact.gigabytes_per_second is not None]
    if not speeds:
        return ("not measured with one process",)
    kind = "one node" if len({fact.host for fact in facts}) == 1 else "several nodes"
    found = f"{min(speeds):.2f} GB/s over {len(facts)} ranks on {kind}"
    return found, fix if need.nccl and min(speeds) < MIN_GB_PER_SECOND[kind] else ""


_CHECKS: dict[str, Callable[[Sequence[Facts], Need], tuple[str, ...]]] = {
    "versions": _versions,
    "data": _data,
    "/dev/shm": _shared_memory,
    "run folder": _run_folder,
    "clocks": _clocks,
    "GPUs": _gpus,
    "all-reduce": _all_reduce,
}


def report(checks: Sequence[Check]) -> str:
    """A line for each check, followed by its fix if it failed."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{'FAILS' if check.fix else 'ok':5}  {check.name:{width}}  {check.found}")
        lines += [f"{'':7}{'':{width}}  fix: {check.fix}"] * bool(check.fix)
    return "\n".join(lines)
