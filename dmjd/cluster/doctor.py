"""``dmjd doctor RUN``: what happened to a run, which rank, in which phase, and what to do. Imports no torch."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from dmjd.cluster import flight
from dmjd.cluster.heartbeat import PHASES, Beat, ranks_heard_of, read_heartbeats
from dmjd.errors import ConfigError

STALE_SECONDS = 60.0
"""A rank that has been in one phase for so long is not on its way through a step, but in something that takes time."""

CLOCK_SKEW_SECONDS = 10.0
"""By so much a node's clock may be behind that of the node on which a launch began."""

LOG_BYTES = 200_000
"""So much of a log's end is read."""

PATTERNS = (
    (
        r"CUDA out of memory|torch\.OutOfMemoryError",
        "a GPU ran out of memory",
        "a larger engine.accumulation, engine.activation_checkpointing=full, or more GPUs",
    ),
    (
        r"oom[-_ ]kill|Out [Oo]f [Mm]emory: Killed|Detected \d+ oom",
        "the host ran out of memory, and its kernel killed a process",
        "fewer workers, or --mem=0 in the job's header to have all of the node",
    ),
    (
        r"[Bb]us error|unable to mmap|No space left on device.*shm|shared memory",
        "a data worker could not get shared memory",
        "a larger /dev/shm (docker: --ipc=host), or fewer workers; dmjd preflight measures it",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "a disk was full",
        "free some space or lower keep_checkpoints; the same command goes on",
    ),
    (
        r"uncorrectable ECC|Xid.*(48|63|64|79|94|95)|CUDA error: unspecified launch failure",
        "a GPU failed",
        "leave that node out (sbatch --exclude=NODE) and tell the administrators",
    ),
    (
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (recv|send)",
        "ranks waited for each other until a time-out",
        "see which rank was behind, below",
    ),
    (
        r"Rendezvous(Connection|Timeout|Closed)?Error.*timed out|RendezvousTimeoutError|gai error",
        "the nodes did not find each other",
        "DMJD_RENDEZVOUS=static in the site file, and the right GLOO_SOCKET_IFNAME",
    ),
    (
        r"connectFullMesh|Connection refused.*127\.0\.0\.1",
        "gloo connected to the loopback address: a host name resolves to it",
        "GLOO_SOCKET_IFNAME=eth0, or whatever `ip address` shows, in the site file",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "the port of the rendezvous was taken",
        "submit again: another job has another port",
    ),
    (
        r"Connection (reset|closed) by peer|Broken pipe|NCCL.*remote process exited",
        "a rank died, and the others lost their connection to it",
        "look for the first error in the log: the rank that died says why, those that lost it do not",
    ),
    (
        r"NODE_FAIL|Node failure on|DUE TO NODE FAILURE",
        "a node failed",
        "nothing: Slurm starts the job anew; leave a node out that fails again (sbatch --exclude=NODE)",
    ),
    (r"DUE TO TIME LIMIT", "the time limit came before the run had saved", "a longer lead: --signal=USR1@600"),
)
"""(pattern in a log, what it means, what to do), the cause before its consequences."""


class Finding(NamedTuple):
    """What was found, and what to do about it."""

    what: str
    advice: str = ""


def examine(run: Path, now: float | None = None) -> list[Finding]:
    """Everything there is to say of a run, the most telling first.

    Raises:
        ConfigError: if ``run`` is no run folder.
    """
    if not any((run / name).exists() for name in ("config.yaml", "slurm", "checkpoints")):
        raise ConfigError(f"{run} is not a run folder; it has neither config.yaml nor checkpoints")
    now = time.time() if now is None else now
    beats, launches, stop = read_heartbeats(run), _launches(run), _stop(run)
    refused = "" if "step" in stop else _refused_beside(run, beats)
    if refused:
        stop, launches = {}, [each for each in launches if each["job"] != launches[-1]["job"]]
    launch = launches[-1] if launches else None
    job = launch["job"] if launch else None
    state = _slurm_state(job) if job else None
    # What ranks said in an earlier launch tells nothing of one that starts.
    began = max(_began(launch), _recorded(run)) - CLOCK_SKEW_SECONDS
    beats = [beat for beat in beats if beat.time >= began]
    running = state is None or state.startswith("RUNNING")
    findings = []
    if stop:
        findings.append(_ended(stop))
        findings += _silent(beats) if stop["reason"] == "lost" else []
    elif beats and running:
        findings += _alive_or_not(beats, now, job if state else None)
    elif beats and not (state or "").startswith("SUSPENDED"):
        findings += _silent(beats)
    elif state and running:
        findings.append(Finding("it is starting: no rank has been heard of yet", _PHASE_ADVICE["start"]))
    elif not beats:
        findings.append(Finding("it left no word of its end, and no sign of life", "see the job's log"))
    findings += _unreadable(run)
    if refused:
        findings.append(Finding(f"another launch was refused meanwhile: {refused}", "nothing, if this one shall go on"))
    if state:
        findings.append(Finding(f"Slurm: job {job} is {state}", _SLURM_ADVICE.get(state.split()[0], "")))
    findings += [
        Finding(sentence, "look at that rank's node; the other ranks are its victims")
        for sentence in flight.explain(flight.read_stands(run, began))
    ]
    log = _log_of_last_launch(run, launch)
    if log is not None:
        if stop.get("reason", "error") in ("error", "crashed", "lost"):
            findings += _causes_of_death(*log)
        findings += _gave_up(log[1])
    findings.append(_standing(run))
    return findings


_SLURM_ADVICE = {
    "PENDING": "nothing: it waits for its turn; `squeue --start` may tell when that comes",
    "SUSPENDED": "scontrol resume lets it go on: somebody has suspended it, or a job of a higher priority has",
    "COMPLETING": "nothing: its processes are being cleared away",
    "CANCELLED": "dmjd submit again goes on from the newest checkpoint",
    "TIMEOUT": "dmjd submit again goes on; a longer lead such as --signal=USR1@600 lets it save before",
    "OUT_OF_MEMORY": "fewer workers, or --mem=0 in the job's header",
}


def _stop(run: Path) -> dict[str, Any]:
    """What the last launch left: its marker, or else its last word, of a launch that never became a run."""
    path = run / "STOP_REASON"
    if path.is_file():
        try:
            marker = json.loads(path.read_text())
        except ValueError:
            return {}
        return marker if isinstance(marker, dict) and marker.keys() >= {"reason", "detail", "next"} else {}
    reason, _, detail = _last_word(run).partition(": ")
    return {"reason": reason, "detail": detail, "next": "mend that, then dmjd submit again"} if reason else {}


def _last_word(run: Path) -> str:
    path = run / "slurm" / "last_word"
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def _refused_beside(run: Path, beats: Sequence[Beat]) -> str:
    """The last word of a launch, if ranks of another were heard of after it: two jobs had been submitted for a run."""
    word = _last_word(run)
    when = (run / "slurm" / "last_word").stat().st_mtime if word else 0.0
    return word if any(beat.time > when for beat in beats) else ""


def _began(launch: Mapping[str, Any] | None) -> float:
    return datetime.fromisoformat(launch["when"].replace("Z", "+00:00")).timestamp() if launch else 0.0


def _recorded(run: Path) -> float:
    """When the last launch that became a run did so, by whatever it was started."""
    path = run / "provenance.json"
    try:
        return datetime.fromisoformat(json.loads(path.read_text())["started"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


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


def _silent(beats: Sequence[Beat]) -> Iterator[Finding]:
    """Ranks that left no word. A rank that is ended by an error, its own or another's, gets to say that it stops."""
    silent = [beat for beat in beats if beat.phase != "stop"]
    more = f", and so do {len(silent) - 1} more" if len(silent) > 1 else ""
    for beat in silent[:1]:
        advice = f"the log's last lines from {beat.host}; a kernel out of memory and a node that dies leave none"
        yield Finding(f"{_last_of(beat)}, says nothing of its end: it was killed{more}", advice)


def _last_of(beat: Beat) -> str:
    return f"rank {beat.rank} (process {beat.pid} on {beat.host}), last heard of in {beat.phase} of step {beat.step}"


def _alive_or_not(beats: Sequence[Beat], now: float, job: str | None) -> Iterator[Finding]:
    """The ranks' signs of life, and the state of those that have gone quiet."""
    ages = {beat.rank: now - beat.time for beat in beats}
    last = max(beats, key=lambda beat: beat.time)
    if all(-CLOCK_SKEW_SECONDS < age < STALE_SECONDS for age in ages.values()):
        yield Finding(f"it is running: step {last.step}, {last.phase}, {len(beats)} rank(s)")
        return
    ahead = -ages[last.rank] >= CLOCK_SKEW_SECONDS
    if ahead:
        what = f"the clock of {last.host} is {-ages[last.rank]:.0f} s ahead of the one here, or one of them was set"
        yield Finding(what, "look again in a minute: a run that goes on is at another step by then")
    suspects = []
    states = process_states(beats, job)
    for beat in beats:
        state, where = states.get(beat.rank, ""), _last_of(beat)
        if state == "gone":
            suspects.append(
                Finding(f"{where}, is gone: it was killed or crashed", "see its last lines in the job's log")
            )
        elif state == "T":
            advice = (
                f"on {beat.host}: kill -CONT {beat.pid} lets it go on; kill -KILL {beat.pid} ends the launch, "
                "and the job goes on from the newest checkpoint"
            )
            suspects.append(Finding(f"{where}, is stopped (SIGSTOP): all others wait for it", advice))
        elif state == "D":
            advice = f"look at the disks of {beat.host}: the run folder's, the data's and its cache's"
            suspects.append(Finding(f"{where}, waits for a disk that does not answer", advice))
        elif state == "Z":
            suspects.append(Finding(f"{where}, has ended and is a zombie", "scancel the job and submit again"))
    if not suspects:
        suspects = [Finding(_last_of(last)) if ahead else _furthest_behind(beats, ages)]
    yield from suspects


def _furthest_behind(beats: Sequence[Beat], ages: dict[int, float]) -> Finding:
    """All processes are there. The rank that got least far is the one the others wait for."""

    def progress(beat: Beat) -> tuple[int, int]:
        return beat.step, PHASES.index(beat.phase) if beat.phase in PHASES else len(PHASES)

    least, most = min(beats, key=progress), max(beats, key=progress)
    if progress(least) == progress(most):
        return Finding(
            f"all {len(beats)} rank(s) have been in {least.phase} of step {least.step} for {min(ages.values()):.0f} s",
            _PHASE_ADVICE.get(least.phase, "wait for the time-out (engine.step_timeout), which tells who was behind"),
        )
    return Finding(
        f"rank {least.rank} (process {least.pid} on {least.host}) is behind: in {least.phase} of step {least.step} for "
        f"{ages[least.rank]:.0f} s, while rank {most.rank} is in {most.phase} of step {most.step}",
        _PHASE_ADVICE.get(least.phase, f"look at {least.host}: nvidia-smi, dmesg, py-spy dump --pid {least.pid}"),
    )


_PHASE_ADVICE = {
    "start": "the first start compiles and reads the data's index, which may take minutes; dmjd preflight warm=true",
    "data": "its data do not come: look at the disk they are on, at workers, and at data.cache",
    "checkpoint": "the run folder's disk does not take the checkpoint: look at its quota and its servers",
    "evaluate": "an evaluation on one rank keeps the others waiting; a larger online_knn.every_epochs",
}


_LOOK = """for pid in "$@"; do
    state=$(sed 's/.*) \\(.\\).*/\\1/' "/proc/$pid/stat" 2>/dev/null) || state=gone
    echo "$pid $state"
done"""


def process_states(beats: Sequence[Beat], job: str | None) -> dict[int, str]:
    """By rank, the letter that ps shows for its process or "gone"; of ranks that cannot be seen from here, nothing."""
    hosts: dict[str, list[Beat]] = defaultdict(list)
    for beat in beats:
        hosts[beat.host].append(beat)
    # All at once: each that does not answer takes its time.
    with ThreadPoolExecutor(max_workers=16) as pool:
        seen = pool.map(lambda host: _states_on(host, [beat.pid for beat in hosts[host]], job), hosts)
        return {
            beat.rank: states[beat.pid]
            for host, states in zip(hosts, seen, strict=True)
            for beat in hosts[host]
            if beat.pid in states
        }


def _states_on(host: str, pids: Sequence[int], job: str | None) -> dict[int, str]:
    look = ["sh", "-c", _LOOK, "sh", *map(str, pids)]
    if host != platform.node():
        if job is None or shutil.which("srun") is None:
            return {}
        # Slurm knows a node by its short name. Steps are exclusive: without --overlap this one would wait for the
        # training to end.
        node = host.partition(".")[0]
        look = ["srun", "--overlap", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", *look]
    try:
        done = subprocess.run(look, capture_output=True, text=True, errors="replace", timeout=30)
    except subprocess.TimeoutExpired:
        return {}
    # A site's scripts around a step may say something as well.
    return {int(pid): state for pid, state in re.findall(r"^(\d+) (\w+)$", done.stdout, re.MULTILINE)}


def _unreadable(run: Path) -> Iterator[Finding]:
    lost = sorted({*ranks_heard_of(run)} - {beat.rank for beat in read_heartbeats(run)})
    if lost:
        what = f"what rank(s) {', '.join(map(str, lost))} said last is damaged, as by a node or a disk that died"
        yield Finding(what, "nothing: the next launch writes it anew")


def _launches(run: Path) -> list[dict[str, Any]]:
    """Launches of jobs. A line that a killed job or a full disk left half written is passed over."""
    path, launches = run / "slurm" / "launches.jsonl", []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with suppress(ValueError):
            launches.append(json.loads(line))
    return launches


def _slurm_state(job: str) -> str | None:
    """``STATE (reason)``, from Slurm's memory of the job or from its accounting; None where there is neither."""
    for command in (["scontrol", "show", "job", job], ["sacct", "-n", "-X", "-P", "-o", "State", "-j", job]):
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0 and done.stdout.strip():
            state = re.search(r"JobState=(\S+)(?: Reason=(\S+))?", done.stdout)
            if state is None:
                return done.stdout.split()[0]
            return state.group(1) + (f" ({state.group(2)})" if state.group(2) not in (None, "None") else "")
    return None


def _log_of_last_launch(run: Path, launch: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """Name of the job's log, and its part from the last launch on. Array jobs have theirs in another folder."""
    logs = sorted((run / "slurm").glob("*.out"), key=lambda path: path.stat().st_mtime)
    named = Path((launch or {}).get("log") or "none")
    logs += [named] if named.is_file() else []
    if not logs:
        return None
    with logs[-1].open("rb") as file:  # which NCCL_DEBUG=INFO makes gigabytes of
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        text = file.read().decode(errors="replace")
    # The batch script begins each launch with this line.
    begin = max((match.start() for match in re.finditer(r"^\S+ dmjd: job \S+ on ", text, re.MULTILINE)), default=0)
    return logs[-1].name, text[begin:]


def _causes_of_death(name: str, text: str) -> Iterator[Finding]:
    for pattern, what, advice in PATTERNS:
        match = re.search(rf"^.*(?:{pattern}).*$", text, re.MULTILINE)
        if match is not None:
            yield Finding(f"{what} ({name}: {match.group().strip()[:160]})", advice)


def _gave_up(text: str) -> Iterator[Finding]:
    said = re.findall(r"dmjd: (not requeued: .*)$", text, re.MULTILINE)
    if said:
        yield Finding(f"its job was {said[-1]}", "mend what ended it, then dmjd submit again")


def _standing(run: Path) -> Finding:
    # Not a draft, step-00001000.tmp, nor somebody's copy, step-00001000-best.
    found = sorted(path.parent for path in (run / "checkpoints").glob(f"step-{'[0-9]' * 8}/manifest.json"))
    if not found:
        return Finding("it has no checkpoint: a new launch begins anew")
    when = datetime.fromtimestamp((found[-1] / "manifest.json").stat().st_mtime).isoformat(" ", "seconds")
    return Finding(f"newest checkpoint: {found[-1].name} of {when}, from which the same command goes on")
