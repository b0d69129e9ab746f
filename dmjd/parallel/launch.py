"""Environment variables by which torchrun, DeepSpeed and Slurm describe a process, checked as untrusted input.

Unchecked, torch fails on a wrong one with a traceback, or after half an hour. This module imports no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from dmjd.errors import ConfigError

_LAUNCHER = "start the processes by a launcher such as torchrun, which sets it, or `unset {name}` to run one by itself"
_ELASTIC = "start elastic launches by the scripts in launchers, which set it, or `unset {name}`"
_SLURM = "`unset {name}`, which Slurm sets for its jobs alone"
FULL_WORLD_SIZE = "DMJD_FULL_WORLD_SIZE"
MOST_PROCESSES = 1_000_000
LATEST = 253_402_300_799
"""Seconds from 1970 to the end of the year 9999."""


@dataclass(frozen=True)
class Launch:
    """Rank ``rank`` of ``size`` processes, and rank ``local_rank`` of ``local_size`` on this host.

    full_size: processes of an elastic launch while all its nodes are there (DMJD_FULL_WORLD_SIZE); 0 if the launch is
        not elastic.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    full_size: int = 0


def read_launch() -> Launch:
    """The launcher's variables; one process by itself where there are none.

    Raises:
        ConfigError: one line with the variable, its value, what is allowed, and the cure.
    """
    size = _whole("WORLD_SIZE", 1, MOST_PROCESSES, _LAUNCHER, 1)
    among = f"below WORLD_SIZE={size}" if "WORLD_SIZE" in os.environ else "without WORLD_SIZE, which counts processes"
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 else ():
        if name not in os.environ:
            raise ConfigError(f"WORLD_SIZE={size} is set and {name} is not; {_LAUNCHER.format(name='WORLD_SIZE')}")
    rank = _whole("RANK", 0, size - 1, _LAUNCHER, 0, among)
    local_size = _whole("LOCAL_WORLD_SIZE", 1, size, _LAUNCHER, 1, f"not above WORLD_SIZE={size}")
    if "LOCAL_WORLD_SIZE" in os.environ:
        local_rank = _whole("LOCAL_RANK", 0, local_size - 1, _LAUNCHER, 0, f"below LOCAL_WORLD_SIZE={local_size}")
    else:  # DeepSpeed's launcher does not set it
        local_rank = _whole("LOCAL_RANK", 0, size - 1, _LAUNCHER, 0, among)
    if size > 1:
        _whole("MASTER_PORT", 1, 65535, _LAUNCHER, 0)
        address = os.environ["MASTER_ADDR"]
        if not re.fullmatch(r"[\w.:%-]{1,253}", address, re.ASCII):
            raise ConfigError(
                f"MASTER_ADDR={address!r} must be the name or address of rank 0's host; "
                f"{_LAUNCHER.format(name='WORLD_SIZE')}"
            )
    full_size = _whole(
        FULL_WORLD_SIZE, size, MOST_PROCESSES, _ELASTIC, 0, f"the processes with all nodes, of which {size} are there"
    )
    return Launch(rank, size, local_rank, local_size, full_size)


def is_elastic() -> bool:
    """Whether the launcher starts the ranks again, on the remaining nodes, after the loss of a node."""
    return FULL_WORLD_SIZE in os.environ


def in_slurm_job() -> bool:
    """Whether Slurm started this process."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def slurm_step() -> str:
    """The srun that started this process beside others, each of them alone; empty where torchrun or nobody did."""
    if "WORLD_SIZE" in os.environ or _whole("SLURM_STEP_NUM_TASKS", 1, MOST_PROCESSES, _SLURM, 1) == 1:
        return ""
    job, step = (_whole(f"SLURM_{name}_ID", 0, 2**32 - 1, _SLURM, 0) for name in ("JOB", "STEP"))
    return f"of step {job}.{step} in launch {_whole('SLURM_RESTART_COUNT', 0, 2**32 - 1, _SLURM, 0) + 1}"


def slurm_times() -> tuple[int | None, int | None]:
    """When this process's Slurm job began and when it ends, in seconds since 1970; None for what Slurm does not say."""
    began, ends = (
        _whole(name, 0, LATEST, _SLURM + ", or set time_budget=null", -1, "seconds since 1970")
        for name in ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME")
    )
    return (None if began < 0 else began), (None if ends < 0 else ends)


def _whole(name: str, least: int, most: int, cure: str, default: int, meaning: str = "") -> int:
    value = os.environ.get(name)
    if value is None or (not value and name.startswith("SLURM_")):  # launchers/slurm exports times it was not given
        return default
    if not re.fullmatch(r"[0-9]{1,15}", value) or not least <= int(value) <= most:
        allowed = str(least) if least == most else f"a whole number from {least} to {most}"
        raise ConfigError(
            f"{name}={value[:40]!r} must be {allowed}{', ' * bool(meaning)}{meaning}; {cure.format(name=name)}"
        )
    return int(value)
