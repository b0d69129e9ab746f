"""What a cluster calls its things: the site files of ``dmjd submit site=NAME``."""

from __future__ import annotations

import re
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
"""Variable of ours -> what it may be, if not anything; launchers/slurm/lib.sh says what they mean."""

_OPTIONS = {"TIMELIMIT": "time", "MEM_PER_NODE": "mem", "NO_REQUEUE": "no-requeue", "ARRAY_INX": "array"}
"""Where sbatch's variable is not named as its option is."""


def read_site(path: Path) -> dict[str, str]:
    """The ``NAME=value`` lines of a site file.

    Raises:
        ConfigError: naming a line that is something else, which lib.sh would pass over, or what a job would take for
            nothing or for something else.
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
            raise ConfigError(f"line {number} of {path}: {name} is none of {', '.join(VARIABLES)}")
        if value and VARIABLES.get(name) and value not in VARIABLES[name]:
            raise ConfigError(f"line {number} of {path}: {name} must be {' or '.join(VARIABLES[name])}, got {value!r}")
        site[name] = value
    return site


def _shown(line: str) -> str:
    """The line up to the end of a secret's name, however it goes on."""
    match = SECRET_NAME.search(line)
    return line[: match.end()] + MARK if match else line


def site_file(name: str) -> Path:
    """The file of a site that ships, or at a path. Raises ConfigError where there is none."""
    shipped = launchers_dir() / "slurm" / "sites"
    for path in (shipped / f"{name}.env", Path(name)):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in shipped.glob("*.env")))
    raise ConfigError(f"site={name} is neither a file nor one of {names}")


def site_header(site: Mapping[str, str]) -> dict[str, str | None]:
    """sbatch's own variables as its options."""
    names = {name.removeprefix("SBATCH_"): value for name, value in site.items() if name.startswith("SBATCH_")}
    return {_OPTIONS.get(name, name.lower().replace("_", "-")): value or None for name, value in names.items()}
