"""The ranks of a run from outside: their last signs of life, and the state of the processes that gave them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dmjd.cluster.finding import CLOCK_SKEW_SECONDS, Finding
from dmjd.runs.heartbeat import PHASES, Beat, ranks_heard_of, read_heartbeats

STALE_SECONDS = 60.0
"""A rank that has been in one phase for so long is not on its way through a step, but in something that takes time."""

PHASE_ADVICE = {
    "start": "the first start compiles and reads the data's index, which may take minutes; dmjd preflight warm=true",
    "data": "its data do not come: look at the disk they are on, at workers, and at data.cache",
    "checkpoint": "the run folder's disk does not take the checkpoint: look at its quota and its servers",
    "evaluate": "an evaluation on one rank keeps the others waiting; a larger online_knn.every_epochs",
}


def silent(beats: Sequence[Beat]) -> Iterator[Finding]:
    """Ranks that left no word. A rank that is ended by an error, its own or another's, gets to say that it stops."""
    quiet = [beat for beat in beats if beat.phase != "stop"]
    more = f", and so do {len(quiet) - 1} more" if len(quiet) > 1 else ""
    for beat in quiet[:1]:
        advice = f"the log's last lines from {beat.host}; a kernel out of memory and a node that dies leave none"
        yield Finding(f"{_last_of(beat)}, says nothing of its end: it was killed{more}", advice)


def _last_of(beat: Beat) -> str:
    return f"rank {beat.rank} (process {beat.pid} on {beat.host}), last heard of in {beat.phase} of step {beat.step}"


def alive_or_not(beats: Sequence[Beat], now: float, job: str | None) -> Iterator[Finding]:
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
            PHASE_ADVICE.get(least.phase, "wait for the time-out (engine.step_timeout), which tells who was behind"),
        )
    return Finding(
        f"rank {least.rank} (process {least.pid} on {least.host}) is behind: in {least.phase} of step {least.step} for "
        f"{ages[least.rank]:.0f} s, while rank {most.rank} is in {most.phase} of step {most.step}",
        PHASE_ADVICE.get(least.phase, f"look at {least.host}: nvidia-smi, dmesg, py-spy dump --pid {least.pid}"),
    )


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


def unreadable(run: Path) -> Iterator[Finding]:
    """Signs of life that cannot be read."""
    lost = sorted({*ranks_heard_of(run)} - {beat.rank for beat in read_heartbeats(run)})
    if lost:
        what = f"what rank(s) {', '.join(map(str, lost))} said last is damaged, as by a node or a disk that died"
        yield Finding(what, "nothing: the next launch writes it anew")
