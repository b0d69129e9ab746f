"""``dmjd doctor RUN``: why a run ended or hangs, which rank in which phase, and what to do. Imports no torch.

Everything in the run folder may be damaged: a record that cannot be read counts as absent.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from dmjd.cluster import flight, job_log
from dmjd.errors import ConfigError
from dmjd.files import obstacle, read_file
from dmjd.runs.heartbeat import PHASES, Beat, ranks_with_heartbeat, read_heartbeats
from dmjd.runs.paths import with_path
from dmjd.safe_load import parse_json

CLOCK_SKEW_SECONDS = 10.0
"""Tolerated difference between the clocks of two nodes."""

STALE_SECONDS = 60.0
"""A phase that takes longer than this is more than a step of training."""

_SLURM_ADVICE = (
    (r"PENDING.*[Hh]eld", "it does not start by itself: fix what the log reports, then scontrol release {job}"),
    (r"PENDING.*DependencyNeverSatisfied", "it never starts: scancel {job}, and dmjd submit again"),
    (
        r"PENDING.*(PartitionTimeLimit|PartitionNodeLimit|BadConstraints|PerJobLimit|InvalidAccount|InvalidQOS)",
        "it exceeds a limit: scancel {job}, and submit again with another time, nodes, partition, qos or account",
    ),
    (r"PENDING", "wait: the job is queued; `squeue --start` may estimate its start"),
    (r"SUSPENDED", "scontrol resume {job}: a user or a job of higher priority has suspended it"),
    (
        r"OUT_OF_MEMORY",
        "a node ran out of host memory: use fewer workers, or --mem=0 for all of it; dmjd submit again resumes",
    ),
    (r"CANCELLED", "a user or Slurm cancelled it: dmjd submit again resumes"),
    (r"TIMEOUT", "a longer lead such as --signal=USR1@600 leaves time to save; dmjd submit again resumes"),
)
"""(pattern of ``STATE (reason)``, advice); the first match counts"""

_PHASE_ADVICE = {
    "start": "the first start compiles and reads the index of the data, which may take minutes",
    "data": "the next batch is not loaded: check the disk of the data, workers and data.cache",
    "checkpoint": "the checkpoint is not written: check quota and servers of the run folder's disk",
    "evaluate": "an evaluation runs on one rank while the others wait; a larger online_knn.every_epochs reduces this",
}

_PROCESS_STATES = {
    "gone": ("does not exist any more: it was killed or crashed", "see its last lines in the job's log"),
    "T": (
        "is stopped (SIGSTOP): all other ranks wait for it",
        "on {host}: kill -CONT {pid} continues it; kill -KILL {pid} ends the launch, and the job resumes from the "
        "newest checkpoint",
    ),
    "D": ("waits for a disk that does not respond", "on {host}: check the disks of the run, the data and data.cache"),
    "Z": ("has ended and is a zombie", "scancel the job and submit again"),
}
"""State letter of ps, or "gone" -> finding, advice"""


class Finding(NamedTuple):
    """An observation, and what to do about it."""

    what: str
    advice: str = ""


class _Launch(NamedTuple):
    """A line of ``slurm/launches.jsonl``. began: seconds since 1970."""

    job: str
    restart: str
    began: float
    log: str


def examine(run: Path, now: float | None = None) -> list[Finding]:
    """Findings about a run, the most telling first.

    Raises:
        ConfigError: if ``run`` is no run folder.
    """
    if not any((run / name).exists() for name in ("config.yaml", "slurm", "checkpoints")):
        raise ConfigError(f"{run} is not a run folder; it has neither config.yaml nor checkpoints")
    now = time.time() if now is None else now
    beats, launches = read_heartbeats(run), _read_launches(run)
    launch = launches[-1] if launches else None
    end, rejected = _read_end(run, launch, beats)
    if launch and rejected:  # two jobs were submitted for the run, and the other one holds it
        launch = next((other for other in reversed(launches) if other.job != launch.job), None)
    state = slurm_state(launch.job) if launch else None
    job = launch.job if launch and state else None
    # Heartbeats and flight records of an earlier launch do not describe this one.
    started = max(launch.began if launch else -math.inf, _seconds(_read_record(run / "provenance.json").get("started")))
    beats = [beat for beat in beats if beat.time >= started - CLOCK_SKEW_SECONDS]

    findings: list[Finding] = []
    if end:
        where = (
            f"at step {end['step']} of {end['total_steps']}"
            if {"step", "total_steps"} <= end.keys()
            else "before its first step"
        )
        findings.append(Finding(f"run ended {where} ({end['reason']}): {end['detail']}", end["next"]))
        findings += _killed(beats) if end["reason"] == "lost" else ()
    elif beats and all(beat.phase == "stop" for beat in beats):
        path, step = run / "STOP_REASON", max(beat.step for beat in beats)
        problem = obstacle(path) or ("damaged, or of an earlier launch" if os.path.lexists(path) else "absent")
        what = f"all ranks stopped at step {step}, without an exit record: {path} is {problem}"
        findings.append(Finding(what, "look again in a minute; else see the job's log; the same command resumes"))
    elif beats and (state or "RUNNING").startswith("RUNNING"):
        findings += _progress(beats, now, job)
    elif beats:
        findings += _killed(beats) if not (state or "").startswith("SUSPENDED") else ()
    elif (state or "").startswith("RUNNING"):
        findings.append(Finding("starting: no heartbeat yet", _PHASE_ADVICE["start"]))
    else:
        findings.append(Finding("no exit record and no heartbeat", "see the job's log"))
    unreadable = sorted({*ranks_with_heartbeat(run)} - {beat.rank for beat in read_heartbeats(run)})
    if unreadable:
        what = f"the heartbeat of rank(s) {', '.join(map(str, unreadable))} is damaged"
        findings.append(
            Finding(f"{what}, as after a node or a disk failed", "nothing to do: the next launch replaces it")
        )
    if rejected:
        findings.append(
            Finding(
                f"another launch was rejected meanwhile: {rejected}", "nothing to do if this run is the intended one"
            )
        )
    if job:
        advice = next((text for pattern, text in _SLURM_ADVICE if re.match(pattern, state or "")), "")
        findings.append(Finding(f"Slurm: job {job} is {state}", advice.format(job=job)))
    findings += [
        Finding(text, "check the node of that rank; the other ranks only wait for it")
        for text in flight.explain(flight.last_collectives(run, started - CLOCK_SKEW_SECONDS))
    ]
    failed = end.get("reason", "error") in ("error", "crashed", "lost")
    findings += starmap(Finding, job_log.search(run, launch.log if launch else "", causes=failed))
    findings.append(_newest_checkpoint(run, finished=end.get("reason") == "finished"))
    return findings


def _read_record(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        value = parse_json(read_file(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_lines(path: Path) -> list[str]:
    try:
        return read_file(path).decode(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _seconds(when: object) -> float:
    """Seconds since 1970 of a time in ISO 8601; minus infinity for anything else."""
    try:
        return datetime.fromisoformat(str(when).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return -math.inf


def _read_launches(run: Path) -> list[_Launch]:
    """The launches by jobs; damaged lines are passed over."""
    launches = []
    for line in _read_lines(run / "slurm" / "launches.jsonl"):
        with suppress(ValueError, AttributeError):
            values = parse_json(line)
            job, restart, log = (str(values.get(key, "")) for key in ("job", "restart", "log"))
            launch = _Launch(job, restart, _seconds(values.get("when")), log)
            # Both are part of a file's name, and the job is an argument of Slurm's commands.
            if launch.began > -math.inf and re.fullmatch(r"\w{1,64} \w{1,64}", f"{job} {restart}"):
                launches.append(launch)
    return launches


def _read_end(run: Path, launch: _Launch | None, beats: Sequence[Beat]) -> tuple[dict[str, Any], str]:
    """The newest exit record of the last launch: STOP_REASON, or the launch's own if it ended before the run began.

    The second value is the launch's own record if another launch holds the run, which has no exit record then.
    """
    end = _read_record(run / "STOP_REASON")
    when = _seconds(end.get("when"))
    whole = all(isinstance(end.get(key), str) for key in ("reason", "detail", "next")) and when > -math.inf
    end = with_path(end, run) if whole and not (launch and when < launch.began - CLOCK_SKEW_SECONDS) else {}
    if launch is None:
        return end, ""
    path = run / "slurm" / f"last_word-{launch.job}-{launch.restart}"
    lines = _read_lines(path)
    if len(lines) != 1:  # a run adds its advice; if ranks fail at once the two files may name different ones
        return end, ""
    written = path.stat().st_mtime
    if end and when >= written:
        return end, ""
    if any(beat.time > written for beat in beats):
        return {}, lines[0]
    reason, _, detail = lines[0].partition(": ")
    return {"reason": reason, "detail": detail, "next": "fix that, then dmjd submit again"}, ""


def slurm_state(job: str) -> str | None:
    """``STATE (reason)`` from scontrol, or STATE from the accounting of ended jobs; None where there is neither."""
    for command in (["scontrol", "show", "job", job], ["sacct", "-n", "-X", "-P", "-o", "State", "-j", job]):
        output = _output(command)
        state = re.search(r"JobState=(\S+)(?: Reason=(\S+))?", output)
        if state:
            return state[1] + (f" ({state[2]})" if state[2] not in (None, "None") else "")
        if output.strip():
            return output.split()[0]
    return None


def _output(command: list[str]) -> str:
    """The output of a program; empty if it is missing, fails or takes longer than 30 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _last_heartbeat(beat: Beat) -> str:
    return f"rank {beat.rank} (process {beat.pid} on {beat.host}), last heartbeat in {beat.phase} of step {beat.step}"


def _killed(beats: Sequence[Beat]) -> Iterator[Finding]:
    """The ranks without an exit record: one that ends on an error, its own or another's, reports the phase "stop"."""
    killed = [beat for beat in beats if beat.phase != "stop"]
    if killed:
        more = f", like {len(killed) - 1} more" if len(killed) > 1 else ""
        advice = f"see the last lines of {killed[0].host} in the log; out-of-memory kills and node failures leave none"
        yield Finding(f"{_last_heartbeat(killed[0])}, has no exit record: it was killed{more}", advice)


def _progress(beats: Sequence[Beat], now: float, job: str | None) -> Iterator[Finding]:
    """Whether a run that has not ended makes progress, and which rank keeps the others waiting if not."""
    last, first = (pick(beats, key=lambda beat: beat.time) for pick in (max, min))
    ahead = last.time - now
    if ahead < CLOCK_SKEW_SECONDS and now - first.time < STALE_SECONDS:
        yield Finding(f"running: step {last.step}, {last.phase}, {len(beats)} rank(s)")
        return
    if ahead >= CLOCK_SKEW_SECONDS:
        what = f"the clock of {last.host} is {ahead:.0f} s ahead of the local one, or one of them was set"
        yield Finding(what, "look again in a minute: a run that makes progress is at another step by then")
    states, found = _process_states(beats, job), False
    for beat in beats:
        if states.get(beat.rank) in _PROCESS_STATES:
            what, advice = _PROCESS_STATES[states[beat.rank]]
            yield Finding(f"{_last_heartbeat(beat)}, {what}", advice.format(host=beat.host, pid=beat.pid))
            found = True
    if not found:
        yield Finding(_last_heartbeat(last)) if ahead >= CLOCK_SKEW_SECONDS else _furthest_behind(beats, now)


def _furthest_behind(beats: Sequence[Beat], now: float) -> Finding:
    """All processes exist: the others wait for the rank with the least progress."""

    def progress(beat: Beat) -> tuple[int, int]:
        return beat.step, PHASES.index(beat.phase) if beat.phase in PHASES else len(PHASES)

    least, most = min(beats, key=progress), max(beats, key=progress)
    where = f"in {least.phase} of step {least.step} for {now - least.time:.0f} s"
    advice = _PHASE_ADVICE.get(least.phase, f"check {least.host}: nvidia-smi, dmesg, py-spy dump --pid {least.pid}")
    if progress(least) == progress(most):
        return Finding(f"all {len(beats)} rank(s) are {where}", advice)
    what = f"rank {least.rank} (process {least.pid} on {least.host}) is behind: {where}"
    return Finding(f"{what}, while rank {most.rank} is in {most.phase} of step {most.step}", advice)


_PRINT_STATES = """for pid in "$@"; do
    state=$(sed 's/.*) \\(.\\).*/\\1/' "/proc/$pid/stat" 2>/dev/null) || state=gone
    echo "$pid $state"
done"""


def _process_states(beats: Sequence[Beat], job: str | None) -> dict[int, str]:
    """Rank -> state letter of its process as in ps, or "gone"; without ranks whose node cannot be reached."""

    def states_on(host: str) -> dict[int, str]:
        pids = (str(beat.pid) for beat in beats if beat.host == host)
        command = ["sh", "-c", _PRINT_STATES, "sh", *pids]
        if host != platform.node():
            if job is None or shutil.which("srun") is None:
                return {}
            # Slurm knows a node by its short name. Without --overlap the step would wait for the training to end.
            node = host.partition(".")[0]
            command = ["srun", "--overlap", f"--jobid={job}", f"--nodelist={node}", "-N1", "-n1", *command]
        # A site's scripts around a step may print lines of their own.
        lines = re.findall(r"^(\d+) (\w+)$", _output(command), re.MULTILINE)
        return {int(pid): state for pid, state in lines}

    hosts = sorted({beat.host for beat in beats})
    with ThreadPoolExecutor(max_workers=16) as pool:  # each node that does not respond takes 30 s
        states = dict(zip(hosts, pool.map(states_on, hosts), strict=True))
    return {beat.rank: states[beat.host][beat.pid] for beat in beats if beat.pid in states[beat.host]}


def _newest_checkpoint(run: Path, *, finished: bool) -> Finding:
    # Neither a draft, step-00001000.tmp, nor a user's copy, step-00001000-best.
    found = sorted((run / "checkpoints").glob(f"step-{'[0-9]' * 8}/manifest.json"))
    if not found:
        return Finding("no checkpoint: a new launch starts from scratch")
    when = datetime.fromtimestamp(found[-1].stat().st_mtime).isoformat(" ", "seconds")
    resumed = "" if finished else ", from which the same command resumes"
    return Finding(f"newest checkpoint: {found[-1].parent.name} of {when}{resumed}")
