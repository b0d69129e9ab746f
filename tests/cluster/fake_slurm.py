"""A fake Slurm: programs of its names record their arguments, and srun runs the script of a test.

For the decisions of batch scripts: they take milliseconds here, and minutes on the real Slurm of slurm.py.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

LAUNCHERS = Path(__file__).parents[2] / "launchers"

SRUN = 'eval "${FAKE_SRUN:-:}"'
SCONTROL = """
case "$1 $2" in
    "requeue "*) [ "$(grep -c requeue "$0.asked")" -gt "${FAKE_FAILURES:-0}" ] ;;
    "show hostnames") echo n1 ;;
    "show job")
        echo "   Requeue=1 Restarts=${FAKE_RESTARTS:-${SLURM_RESTART_COUNT:-0}} BatchFlag=1"
        echo "   StartTime=2026-11-28T05:00:00 EndTime=${FAKE_END-2026-11-28T06:00:00} Deadline=N/A"
        printf '   StdOut=%s\n' "${FAKE_LOG-/logs/job 7.out}" ;;
esac
"""


@dataclass
class FakeSlurm:
    """A job on one node, whose scripts run in ``folder``."""

    folder: Path

    def __post_init__(self) -> None:
        for name, body in {"srun": SRUN, "scontrol": SCONTROL, "sleep": ""}.items():
            program = self.folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >>"$0.asked"\n{body}\n')
            program.chmod(0o755)

    def asked(self, name: str) -> list[str]:
        """All arguments that a program was called with."""
        path = self.folder / "bin" / f"{name}.asked"
        return path.read_text().splitlines() if path.is_file() else []

    def submit(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a batch script of launchers/slurm to its end. FAKE_SRUN: the shell script that srun runs."""
        return subprocess.run(
            ["bash", str(LAUNCHERS / "slurm" / script), *arguments],
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
