"""The log of a job: what its last launch died of, as far as others have said it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dmjd.cluster.finding import Finding
from dmjd.files import open_regular

LOG_BYTES = 200_000
"""So much of a log's end is read."""

LINE_LENGTH = 2_000
"""So much of each of its lines is searched."""

PATTERNS = (
    (
        r"CUDA out of memory|torch\.OutOfMemoryError",
        "a GPU ran out of memory",
        "a larger engine.grad_accum_steps, engine.activation_checkpointing=full, or more GPUs",
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


def log_of_last_launch(run: Path, launch: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """Name of the job's log, and its part from the last launch on. Array jobs have theirs in another folder."""
    found = (path for path in (run / "slurm").glob("*.out") if path.is_file())
    logs = sorted(found, key=lambda path: path.stat().st_mtime)
    named = Path(str((launch or {}).get("log") or "none"))
    with suppress(OSError):  # of a name that is longer than names are
        logs += [named] if named.is_file() else []
    if not logs:
        return None
    try:
        with open_regular(logs[-1]) as file:  # which NCCL_DEBUG=INFO makes gigabytes of
            size = os.fstat(file.fileno()).st_size  # 0 for files of /proc, of which a read may wait
            file.seek(max(0, size - LOG_BYTES))
            text = file.read(min(size, LOG_BYTES)).decode(errors="replace")
    except OSError:
        return None
    # A pattern with a gap takes a time that grows with the square of a line.
    text = "\n".join(line[:LINE_LENGTH] for line in text.split("\n"))
    # The batch script begins each launch with this line.
    begin = max((match.start() for match in re.finditer(r"^\S+ dmjd: job \S+ on ", text, re.MULTILINE)), default=0)
    return logs[-1].name, text[begin:]


def causes_of_death(name: str, text: str) -> Iterator[Finding]:
    """What the ``text`` of the log called ``name`` has of :data:`PATTERNS`."""
    for pattern, what, advice in PATTERNS:
        match = re.search(rf"^.*(?:{pattern}).*$", text, re.MULTILINE)
        if match is not None:
            yield Finding(f"{what} ({name}: {match.group().strip()[:160]})", advice)


def gave_up(text: str) -> Iterator[Finding]:
    """Why the batch script did not put the job back into the queue, if it did not."""
    said = re.findall(r"dmjd: (not requeued: .*)$", text, re.MULTILINE)
    if said:
        yield Finding(f"its job was {said[-1]}", "mend what ended it, then dmjd submit again")
