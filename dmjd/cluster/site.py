"""Site files of ``dmjd submit site=NAME``: partition, account, GPUs, interpreter or container of a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dmjd.errors import ConfigError
from dmjd.files import read_file
from dmjd.redact import MARK, SECRET_NAME
from dmjd.resources import launchers_dir

VARIABLES: dict[str, tuple[str, ...]] = {
    "DMJD_GPUS": (),
    "DMJD_PYTHON": (),
    "DMJD_CONTAINER": (),
    "DMJD_MOUNTS": (),
    "DMJD_RENDEZVOUS": ("c10d", "static"),
    "DMJD_PROCESSES": (),
    "DMJD_REQUEUE": ("true", "false"),
    "DMJD_IDLE_LIMIT": (),
    "DMJD_CHECK_IDS": (),
    "DMJD_DISABLE_EXT": (),
}
"""Variable -> allowed values, if not any; launchers/slurm/lib.sh documents them."""

_OPTIONS = {"TIMELIMIT": "time", "MEM_PER_NODE": "mem", "NO_REQUEUE": "no-requeue", "ARRAY_INX": "array"}
"""SBATCH_ variables whose option has another name."""


def read_site(path: Path) -> dict[str, str]:
    """The ``NAME=value`` lines of a site file.

    Raises:
        ConfigError: for any other line, an unknown DMJD_ variable, or a value that is not allowed.
    """
    site = {}
    try:
        lines = read_file(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"site={path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z_]\w*)=(|[^\s\"'](?:(?!\s#).)*)", line.rstrip(), re.ASCII)
        if match is None:
            raise ConfigError(
                f"line {number} of {path} must be NAME=value, without quotes, export or a comment; got {_shown(line)!r}"
            )
        name, value = match.groups()
        if name.startswith("DMJD_") and name not in VARIABLES:
            raise ConfigError(f"line {number} of {path}: {name} must be one of {', '.join(VARIABLES)}")
        if value and VARIABLES.get(name) and value not in VARIABLES[name]:
            raise ConfigError(f"line {number} of {path}: {name} must be {' or '.join(VARIABLES[name])}, got {value!r}")
        site[name] = value
    return site


def _shown(line: str) -> str:
    """The line, cut after the name of a secret."""
    match = SECRET_NAME.search(line)
    return line[: match.end()] + MARK if match else line


def site_file(name: str) -> Path:
    """The site file of that name in launchers/slurm/sites, or at that path. Raises ConfigError if there is none."""
    shipped = launchers_dir() / "slurm" / "sites"
    for path in (shipped / f"{name}.env", Path(name)):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.env")))
    raise ConfigError(f"site={name} is neither a file nor one of {names}")


def site_header(site: Mapping[str, str]) -> dict[str, str | None]:
    """The SBATCH_ variables as options of sbatch."""
    names = {name.removeprefix("SBATCH_"): value for name, value in site.items() if name.startswith("SBATCH_")}
    return {_OPTIONS.get(name, name.lower().replace("_", "-")): value or None for name, value in names.items()}


def missing_here(site: Mapping[str, str]) -> list[str]:
    """Warnings about an image or interpreter of the site that this machine lacks; compute nodes may have it.

    Raises:
        ConfigError: if the interpreter is a folder or not executable.
    """
    container, python = site.get("DMJD_CONTAINER"), site.get("DMJD_PYTHON")
    if container:  # DMJD_PYTHON is a path in it
        is_file = container.endswith(".sif") or container.startswith(("/", "./", "../"))
        missing = is_file and not Path(container).exists()
        return [f"warning: DMJD_CONTAINER={container} is not on this machine; compute nodes need it"] * missing
    if not python:
        return []
    if "/" in python and Path(python).exists() and (Path(python).is_dir() or not os.access(python, os.X_OK)):
        raise ConfigError(
            f"DMJD_PYTHON={python} is not an executable file; set it to the interpreter of the compute nodes"
        )
    if shutil.which(python) is None:
        return [f"warning: DMJD_PYTHON={python} is not on this machine; compute nodes need it"]
    probe = (
        "from importlib.util import find_spec as f; print(*(n for n in ('torch', 'hydra') if f(n) is None), sep=', ')"
    )
    try:
        done = subprocess.run([python, "-c", probe], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"warning: DMJD_PYTHON={python} does not run on this machine: {error}"]
    if done.returncode:
        reason = " ".join(done.stderr.split())[-160:] or f"exit code {done.returncode}"
        return [f"warning: DMJD_PYTHON={python} does not run on this machine: {reason}"]
    absent = done.stdout.strip()
    return [f"warning: DMJD_PYTHON={python} lacks packages on this machine: {absent}"] if absent else []
