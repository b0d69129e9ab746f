"""What ranks see of their nodes, held against what a run needs: a line for each check, and what to do where it fails.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

GIB = 2**30
CLOCK_SKEW_SECONDS = 2.0
LEAST_GB_PER_SECOND = {"one node": 5.0, "several nodes": 1.0}
"""Of NCCL. NVLink and InfiniBand give ten times as much; less than this is a socket where a faster way was meant."""
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")


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
        first rank of a node, and ``gpu_error`` why it has none. all_reduce_error: why there is no bandwidth.
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
    """What the run asks of its nodes, in bytes."""

    checkpoint: int
    checkpoints: int
    shm: int
    nccl: bool


def judge(facts: Sequence[Facts], needed: Need) -> list[Check]:
    """The facts held against the need, check by check."""
    return [
        _judge_versions(facts),
        _judge_data(facts),
        _judge_shm(facts, needed),
        _judge_disk(facts, needed),
        _judge_clocks(facts),
        _judge_gpus(facts, needed),
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
        if all(fact.data_error for fact in facts):
            fix = "it is so on every node: the run itself would be refused"
        return Check("data", f"rank {broken.rank} on {broken.host}: {broken.data_error}", fix)
    other = next((fact for fact in facts if fact.data != facts[0].data), None)
    if other is not None:
        found = f"{facts[0].data} on {facts[0].host}, {other.data} on {other.host}"
        return Check("data", found, "data.root must be the same data on every node")
    slowest = max(facts, key=lambda fact: fact.data_seconds)
    return Check("data", f"{facts[0].data}, the first batch in {slowest.data_seconds:.1f} s at the slowest rank")


def _judge_shm(facts: Sequence[Facts], needed: Need) -> Check:
    least = min(facts, key=lambda fact: fact.shm_free)
    found = f"{_size(least.shm_free)} free on {least.host}, {_size(needed.shm)} needed"
    if least.shm_free >= needed.shm:
        return Check("/dev/shm", found)
    return Check(
        "/dev/shm", found, "fewer workers, or workers=0; or a larger /dev/shm (docker: --ipc=host or --shm-size)"
    )


def _judge_disk(facts: Sequence[Facts], needed: Need) -> Check:
    broken = next((fact for fact in facts if fact.disk_error), None)
    if broken is not None:
        return Check(
            "run folder", f"{broken.host}: {broken.disk_error}", "name a folder on a disk that all nodes share"
        )
    least = min(facts, key=lambda fact: fact.disk_free)
    wanted = needed.checkpoint * needed.checkpoints
    found = f"{_size(least.disk_free)} free, {_size(wanted)} for {needed.checkpoints} checkpoints"
    if least.disk_free >= wanted:
        return Check("run folder", found)
    return Check("run folder", found, "free some space, name another disk with run=, or lower keep_checkpoints")


def _size(count: float) -> str:
    """Bytes in GiB, or in MiB below one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def _judge_clocks(facts: Sequence[Facts]) -> Check:
    first, last = (pick(facts, key=lambda fact: fact.clock) for pick in (min, max))
    skew = last.clock - first.clock
    if skew <= CLOCK_SKEW_SECONDS:
        return Check("clocks", f"{skew:.2f} s apart at most")
    fix = "tell the administrators (chrony, ntp): time budgets, signs of life and caches go by the clock"
    return Check("clocks", f"{last.host} is {skew:.1f} s ahead of {first.host}", fix)


def _judge_gpus(facts: Sequence[Facts], needed: Need) -> Check:
    seen = 0
    for fact in facts:
        if fact.gpu_error and needed.nccl:
            return Check(
                "GPUs", f"{fact.host}: {fact.gpu_error}", f"leave {fact.host} out (sbatch --exclude), report it"
            )
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


_WAYS = "NCCL_DEBUG=INFO tells which way it takes; set NCCL_SOCKET_IFNAME, NCCL_IB_HCA"
HANGS = "it does not end"


def _judge_bandwidth(facts: Sequence[Facts], needed: Need) -> Check:
    broken = [fact for fact in facts if fact.all_reduce_error]
    if broken:
        first = min(broken, key=lambda fact: fact.all_reduce_error.startswith(HANGS))  # who hangs is a victim of others
        found = f"rank {first.rank} on {first.host}: {first.all_reduce_error}"
        return Check("all-reduce", found, f"{_WAYS}, so that they name a network that all nodes share")
    speeds = [fact.gigabytes_per_second for fact in facts if fact.gigabytes_per_second is not None]
    if not speeds:
        return Check("all-reduce", "one process has nobody to talk to")
    kind = "one node" if len({fact.host for fact in facts}) == 1 else "several nodes"
    found = f"{min(speeds):.2f} GB/s over {len(facts)} ranks on {kind}"
    if not needed.nccl or min(speeds) >= LEAST_GB_PER_SECOND[kind]:
        return Check("all-reduce", found)
    return Check("all-reduce", found, _WAYS)


def report(checks: Sequence[Check]) -> str:
    """A line a check, and below each that fails what to do."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{'FAILS' if check.fix else 'ok':5}  {check.name:{width}}  {check.found}")
        if check.fix:
            lines.append(f"{'':7}{'':{width}}  fix: {check.fix}")
    return "\n".join(lines)
