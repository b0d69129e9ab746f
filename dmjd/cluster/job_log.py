"""Known causes of failure in the log of a job."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dmjd.files import open_regular

LOG_BYTES = 200_000
"""Bytes that are read, from the end."""

LINE_LENGTH = 2_000
"""Characters of each line that are searched: a pattern with a gap takes time quadratic in them."""

# fmt: off
PATTERNS = (
    (r"CUDA out of memory|torch\.OutOfMemoryError", "a GPU ran out of memory",
     "use a larger engine.grad_accum_steps, engine.activation_checkpointing=full, or more GPUs"),
    (r"oom[-_ ]kill|Out [Oo]f [Mm]emory: Killed|Detected \d+ oom", "the host ran out of memory and killed a process",
     "use fewer workers, or --mem=0 in the job's header for all memory of the node"),
    (r"[Bb]us error|unable to mmap|No space left on device.*shm|shared memory",
     "a DataLoader worker ran out of shared memory",
     "use a larger /dev/shm (docker: --ipc=host) or fewer workers; dmjd preflight measures it"),
    (r"No space left on device|Disk quota exceeded", "a disk was full",
     "free space or lower keep_checkpoints; the same command resumes"),
    (r"uncorrectable ECC|Xid.*(48|63|64|79|94|95)|CUDA error: unspecified launch failure", "a GPU failed",
     "exclude that node (sbatch --exclude=NODE) and report it to the administrators"),
    (r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (recv|send)", "a collective timed out",
     "see the rank that is behind"),
    (r"Rendezvous(Connection|Timeout|Closed)?Error.*timed out|RendezvousTimeoutError|gai error",
     "the rendezvous of the nodes timed out",
     "set DMJD_RENDEZVOUS=static and the right GLOO_SOCKET_IFNAME in the site file"),
    (r"connectFullMesh|Connection refused.*127\.0\.0\.1", "gloo connected to the loopback address: a host name "
     "resolves to it", "set GLOO_SOCKET_IFNAME=eth0, or another interface that `ip address` lists, in the site file"),
    (r"Address already in use|EADDRINUSE", "the port of the rendezvous was taken",
     "submit again: another job uses another port"),
    (r"Connection (reset|closed) by peer|Broken pipe|NCCL.*remote process exited", "the connection to a rank was lost",
     "see the first error in the log, which is that of the rank that died"),
    (r"NODE_FAIL|Node failure on|DUE TO NODE FAILURE", "a node failed",
     "nothing: Slurm requeues the job; exclude a node that fails again (sbatch --exclude=NODE)"),
    (r"DUE TO TIME LIMIT", "the time limit was reached before the run had saved",
     "leave more time to save: --signal=USR1@600"),
)
# fmt: on
"""(pattern, cause, advice), causes before their consequences"""


def search(run: Path, named: str, causes: bool) -> Iterator[tuple[str, str]]:
    """(finding, advice) from the log of the last launch.

    Args:
        named: path of the log as the launch recorded it; array jobs write theirs to another folder.
        causes: whether to search for :data:`PATTERNS`, besides why the batch script did not requeue the job.
    """
    name, text = _read(run, named)
    for pattern, cause, advice in PATTERNS if causes else ():
        match = re.search(rf"^.*(?:{pattern}).*$", text, re.MULTILINE)
        if match is not None:
            yield f"{cause} ({name}: {match.group().strip()[:160]})", advice
    reasons = re.findall(r"dmjd: (not requeued: .*)$", text, re.MULTILINE)
    if reasons:
        yield f"its job was {reasons[-1]}", "fix the cause, then dmjd submit again"


def _read(run: Path, named: str) -> tuple[str, str]:
    """Name of the newest log, and its part from the last launch on; empty where there is none."""
    found = (path for path in (run / "slurm").glob("*.out") if path.is_file())
    logs = sorted(found, key=lambda path: path.stat().st_mtime)
    with suppress(OSError):  # of a name that is too long
        logs += [Path(named)] if Path(named).is_file() else []
    try:
        with open_regular(logs[-1]) as file:  # gigabytes with NCCL_DEBUG=INFO
            size = os.fstat(file.fileno()).st_size  # 0 for files of /proc, of which a read may block
            file.seek(max(0, size - LOG_BYTES))
            text = file.read(min(size, LOG_BYTES)).decode(errors="replace")
    except (OSError, IndexError):
        return "", ""
    text = "\n".join(line[:LINE_LENGTH] for line in text.split("\n"))
    # The batch script begins each launch with this line.
    begin = max((match.start() for match in re.finditer(r"^\S+ dmjd: job \S+ on ", text, re.MULTILINE)), default=0)
    return logs[-1].name, text[begin:]
