"""A Slurm that is played: programs of its names write down what they are asked, and srun does what a test says.

For what batch scripts decide, which takes milliseconds to see here and minutes on the real one of slurm.py.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

LAUNCHERS = Path(__file__).parents[2] / "launchers"

SRUN = 'eval "${PLAY:-:}"'
SCONTROL = """
case "$1 $2" in
    "requeue "*) [ "$(grep -c requeue "$0.asked")" -gt "${PLAY_DEAF:-0}" ] ;;
    "show hostnames") echo n1 ;;
    "show job")
        echo "   Requeue=1 Restarts=${PLAY_RESTARTS:-${SLURM_RESTART_COUNT:-0}} BatchFlag=1"
        echo "   StartTime=2026-11-28T05:00:00 EndTime=${PLAY_END-2026-11-28T06:00:00} Deadline=N/A"
        printf '   StdOut=%s\n' "${PLAY_LOG-/logs/job 7.out}" ;;
esac
"""


@dataclass
class PlayedSlurm:
    """A job on one node, whose scripts run in ``folder``."""

    folder: Path

    def __post_init__(self) -> None:
        for name, body in {"srun": SRUN, "scontrol": SCONTROL, "sleep": ""}.items():
            program = self.folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >>"$0.asked"\n{body}\n')
            program.chmod(0o755)

    def asked(self, name: str) -> list[str]:
        """All words that a program was called with."""
        path = self.folder / "bin" / f"{name}.asked"
        return path.read_text().splitlines() if path.is_file() else []

    def play(self, script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A batch script of launchers/slurm, from its start to its end. PLAY is the shell that srun runs."""
        return subprocess.run(
            ["bash", str(LAUNCHERS / "slurm" / script), *words],
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "n1",
                "SLURM_CPUS_ON_NODE": "8",
                "DMJD_LAUNCHERS": str(LAUNCHERS),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
