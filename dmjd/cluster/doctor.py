"""``dmjd doctor RUN``: what happened to a run, which rank, in which phase, and what to do. Imports no torch."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dmjd.cluster import flight
from dmjd.cluster.finding import CLOCK_SKEW_SECONDS, Finding
from dmjd.cluster.job_log import causes_of_death, gave_up, log_of_last_launch
from dmjd.cluster.launches import (
    began_at,
    ending,
    read_launch_record,
    read_launches,
    read_marker,
    recorded_at,
    refused_beside,
    slurm_state,
)
from dmjd.cluster.ranks import PHASE_ADVICE, alive_or_not, process_states, silent, unreadable
from dmjd.errors import ConfigError
from dmjd.files import obstacle
from dmjd.runs.heartbeat import Beat, read_heartbeats

_NEVER = (
    (r"(?i)held", "it will not start by itself: mend what the log says, then scontrol release {job}"),
    (r"DependencyNeverSatisfied", "it will never start: scancel {job}, and dmjd submit again"),
    (
        r"PartitionTimeLimit|PartitionNodeLimit|BadConstraints|PerJobLimit|InvalidAccount|InvalidQOS",
        "it asks for more than it may have: scancel {job}, and submit again with another time, "
        "nodes, partition, qos or account",
    ),
)
"""(pattern in Slurm's reason for which a job waits, what to do where waiting is in vain)"""

_SLURM_ADVICE = {
    "PENDING": "nothing: it waits for its turn; `squeue --start` may tell when that comes",
    "SUSPENDED": "scontrol resume lets it go on: somebody has suspended it, or a job of a higher priority has",
    "COMPLETING": "nothing: its processes are being cleared away",
    "CANCELLED": "dmjd submit again goes on from the newest checkpoint",
    "TIMEOUT": "dmjd submit again goes on; a longer lead such as --signal=USR1@600 lets it save before",
    "OUT_OF_MEMORY": "fewer workers, or --mem=0 in the job's header",
}


def examine(run: Path, now: float | None = None) -> list[Finding]:
    """Everything there is to say of a run, the most telling first.

    Raises:
        ConfigError: if ``run`` is no run folder.
    """
    if not any((run / name).exists() for name in ("config.yaml", "slurm", "checkpoints")):
        raise ConfigError(f"{run} is not a run folder; it has neither config.yaml nor checkpoints")
    now = time.time() if now is None else now
    beats, launches = read_heartbeats(run), read_launches(run)
    word = read_launch_record(run, launches[-1]) if launches else None
    stop = ending(read_marker(run, began_at(launches[-1] if launches else None) - CLOCK_SKEW_SECONDS), word)
    refused = "" if "step" in stop else refused_beside(word, beats)
    if refused:
        stop, launches = {}, [each for each in launches if each["job"] != launches[-1]["job"]]
    launch = launches[-1] if launches else None
    job = launch["job"] if launch else None
    state = slurm_state(job) if job else None
    # What ranks said in an earlier launch tells nothing of one that starts.
    began = max(began_at(launch), recorded_at(run)) - CLOCK_SKEW_SECONDS
    beats = [beat for beat in beats if beat.time >= began]
    running = state is None or state.startswith("RUNNING")
    findings = []
    if stop:
        findings.append(_ended(stop))
        findings += silent(beats) if stop["reason"] == "lost" else []
    elif beats and all(beat.phase == "stop" for beat in beats):
        findings.append(_unmarked(run, beats, job if state else None))
    elif beats and running:
        findings += alive_or_not(beats, now, job if state else None)
    elif beats and not (state or "").startswith("SUSPENDED"):
        findings += silent(beats)
    elif state and running:
        findings.append(Finding("it is starting: no rank has been heard of yet", PHASE_ADVICE["start"]))
    elif not beats:
        findings.append(Finding("no exit record and no heartbeat", "see the job's log"))
    findings += unreadable(run)
    if refused:
        findings.append(Finding(f"another launch was refused meanwhile: {refused}", "nothing, if this one shall go on"))
    if job and state:
        findings.append(Finding(f"Slurm: job {job} is {state}", _advice_on(state, job)))
    findings += [
        Finding(sentence, "look at that rank's node; the other ranks are its victims")
        for sentence in flight.explain(flight.read_stands(run, began))
    ]
    log = log_of_last_launch(run, launch)
    if log is not None:
        if stop.get("reason", "error") in ("error", "crashed", "lost"):
            findings += causes_of_death(*log)
        findings += gave_up(log[1])
    findings.append(_standing(run))
    return findings


def _advice_on(state: str, job: str) -> str:
    in_vain = (advice.format(job=job) for reason, advice in _NEVER if re.search(reason, state))
    usual = _SLURM_ADVICE.get(state.split()[0], "")
    return next(in_vain, usual) if state.startswith("PENDING") else usual


def _ended(stop: Mapping[str, Any]) -> Finding:
    words = {
        "finished": "it is finished",
        "diverged": "it diverged",
        "error": "it ended by an error",
        "crashed": "it crashed",
        "lost": "it lost a rank",
        "interrupted": "it was interrupted",
    }
    what = words.get(stop["reason"], f"it was asked to stop ({stop['reason']})")
    where = f"at step {stop['step']} of {stop['total_steps']}" if "step" in stop else "before its first step"
    return Finding(f"{what} {where}: {stop['detail']}", stop["next"])


def _unmarked(run: Path, beats: Sequence[Beat], job: str | None) -> Finding:
    """Every rank has stopped, and the run has no exit record."""
    marker, step = run / "STOP_REASON", max(beat.step for beat in beats)
    if any(state != "gone" for state in process_states(beats, job).values()):
        return Finding(f"it is stopping, at step {step}", "look again in a minute")
    is_there = "damaged, or of an earlier launch" if os.path.lexists(marker) else "absent"
    return Finding(
        f"it has stopped at step {step}; why is not known, because {marker} is {obstacle(marker) or is_there}",
        "the last lines of its log say how; move away what is not a file there, and the same command goes on",
    )


def _standing(run: Path) -> Finding:
    # Not a draft, step-00001000.tmp, nor somebody's copy, step-00001000-best.
    found = sorted(path.parent for path in (run / "checkpoints").glob(f"step-{'[0-9]' * 8}/manifest.json"))
    if not found:
        return Finding("it has no checkpoint: a new launch begins anew")
    when = datetime.fromtimestamp((found[-1] / "manifest.json").stat().st_mtime).isoformat(" ", "seconds")
    return Finding(f"newest checkpoint: {found[-1].name} of {when}, from which the same command goes on")
