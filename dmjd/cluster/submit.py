"""``dmjd submit COMMAND key=value ...``: submit a command of dmjd as a Slurm job.

The batch script is launchers/slurm/pretrain.sbatch for a training, preflight.sbatch, or evaluate.sbatch for an
evaluation, with its header filled in and the arguments written into it. It is kept in the run folder and can be
submitted again as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dmjd.cluster.site import missing_here, read_site, site_file, site_header
from dmjd.cluster.walltime import check_limit
from dmjd.compose import compose, with_first_key
from dmjd.config import PLANS, PretrainConfig, check_batch
from dmjd.config.fields import suggestion
from dmjd.config.parse import parse
from dmjd.errors import ConfigError, StorageError
from dmjd.evaluate import EVALUATIONS
from dmjd.explore import TOOLS
from dmjd.files import at_home, obstacle, replace_file
from dmjd.redact import MARK, is_secret, redact
from dmjd.resources import launchers_dir
from dmjd.source import START, snapshot

OPTIONS = {
    "site": "site file: a name in launchers/slurm/sites, or a path",
    "nodes": "number of nodes",
    "min_nodes": "elastic launch: if nodes fail, continue on at least this many nodes; default: requeue the job",
    "gpus": "GPUs per node; default: the site file's",
    "time": "time limit of one launch in Slurm's format, such as 24:00:00",
    "array": "indices of a job array, such as 0-2; %a in arguments is replaced by the index",
    "chain": "number of jobs to run one after another, for sites that do not requeue jobs",
    "name": "name of the job; default: dmjd-RUN",
    "account": "sbatch --account",
    "partition": "sbatch --partition",
    "qos": "sbatch --qos",
    "constraint": "sbatch --constraint",
}
"""Arguments of the job; all others are arguments of the command."""

PRETRAIN = PretrainConfig.command
_HEADER_OPTIONS = ("time", "array", "account", "partition", "qos", "constraint")


def training_of(arguments: Sequence[str]) -> tuple[str, list[str], bool]:
    """Of the arguments of preflight: the training that it checks, whose name may be the first and is pretrain without
    it; the overrides of its configuration; the value of warm, which is no override."""
    first = [text for text in arguments[:1] if text in PLANS]
    overrides = [text for text in arguments[len(first) :] if not text.startswith(_WARM)]
    warm = [parse("warm", text.removeprefix(_WARM), bool, {}) for text in arguments if text.startswith(_WARM)]
    return (first or [PRETRAIN])[0], overrides, any(warm[-1:])


_WARM = "warm="

KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Variables of Slurm that sbatch needs. It exports its environment, and variables of a surrounding job would make the
new one requeue that job, or stop at its time limit."""

SBATCH_SECONDS = 120.0
"""sbatch itself waits about 100 s for the controller."""

_OF_A_JOB = (
    *("SLURM_", "DMJD_CHAIN", "DMJD_COMMAND", "DMJD_RUN", "DMJD_EXIT_RECORD", "DMJD_LAST_WORD"),
    *("DMJD_MIN_NODES", "DMJD_FULL_WORLD_SIZE"),
)
"""Prefixes of variables of a surrounding job."""


@dataclass(frozen=True)
class Job:
    """A job to submit.

    script: the batch script, which may hold secrets. shown: the same without them, for printing.
    folder: that of the run, or a common one for the logs and scripts of an array.
    chain: number of submissions.
    look: how to follow the job.
    explanation: what the job will do, and warnings, as lines.
    """

    script: str
    shown: str
    folder: Path
    chain: int
    look: str
    explanation: list[str]


def on_one_gpu() -> dict[str, str]:
    """Command on one GPU -> its batch script."""
    scripts = {record.name: record.script for record in EVALUATIONS.values()}
    return scripts | {TOOLS[name].name: "evaluate" for name in ("embed", "predict")}


def submittable() -> list[str]:
    """The commands that can be submitted."""
    return [*PLANS, "preflight", *on_one_gpu()]


def plan(command: str, arguments: Sequence[str], code: Path | None = None) -> Job:
    """The job of ``dmjd COMMAND ARGUMENT...``; writes nothing.

    Args:
        arguments: of the command, and :data:`OPTIONS`.
        code: a copy of the source to run from; default: the installed package. A job in a container runs the dmjd of
            the container, and takes the launchers alone from the copy.

    Raises:
        ConfigError: if an option or the configuration of the command is wrong.
    """
    if command not in submittable():
        hint = suggestion(command, submittable())
        raise ConfigError(f"{command!r} cannot be submitted{hint or ';'} choose from {', '.join(submittable())}")
    arguments = [_at_home(argument) for argument in arguments]
    own = [text for text in arguments if text.partition("=")[0] not in OPTIONS]
    of, own, warm = training_of(own) if command == "preflight" else (command, own, False)
    own = with_first_key(of, own)
    options = _options(arguments)
    trains = command in PLANS
    several = trains or command == "preflight"  # processes
    site = read_site(site_file(options["site"])) if "site" in options else {}
    script_name = "pretrain" if trains else on_one_gpu().get(command, command)
    template = (launchers_dir() / "slurm" / f"{script_name}.sbatch").read_text()
    header = {**_header(template), **site_header(site)}
    kind, _, whole = (header.get("gpus-per-node") or "1").rpartition(":")  # as in a100:8
    nodes = _count(options, "nodes", header["nodes"])
    gpus = _count(options, "gpus", _count(site, "DMJD_GPUS", whole) if several else 1)
    chain = _count(options, "chain", 1)
    _count(site, "DMJD_IDLE_LIMIT", 3)
    if not several and nodes * gpus > 1:
        raise ConfigError(f"{command} runs on one GPU; leave nodes and gpus out")
    if "min_nodes" in options:
        least = _count(options, "min_nodes", None)
        if not trains or least >= nodes:
            raise ConfigError(
                f"min_nodes={least} must be below nodes={nodes}, and needs one of the commands {', '.join(PLANS)}"
            )
        if site.get("DMJD_RENDEZVOUS") == "static":
            raise ConfigError("min_nodes needs DMJD_RENDEZVOUS=c10d; the site file has DMJD_RENDEZVOUS=static")
    if chain > 1 and "array" in options:
        raise ConfigError("chain and array cannot be combined; submit one chain for each index")

    config = _compose(of, own, options.get("array"))
    processes = nodes * _count(site, "DMJD_PROCESSES", gpus)
    if several:
        check_batch(config.batch_size, config.engine.grad_accum_steps, processes)
    if several and processes > 1 and not any(argument.startswith("engine=") for argument in own):
        own.insert(0, "engine=ddp")
    folder = _folder(config, array="array" in options)
    if what := obstacle(folder, folder=True):
        raise ConfigError(f"run={config.run} is {what}; name a folder")
    container = site.get("DMJD_CONTAINER") or None
    if trains and container is None and (folder / "config.yaml").is_file():
        from dmjd.runs.folder import RunFolder  # imports torch, which takes seconds; most runs are new

        RunFolder(folder).check(config)

    header.update({key: options[key] for key in _HEADER_OPTIONS if key in options})
    if trains and header["time"]:
        check_limit(header["time"], header.get("signal"), config.time_margin if config.time_budget == "auto" else None)
    header["nodes"], header["gpus-per-node"] = str(nodes), f"{kind}:{gpus}" if kind else str(gpus)
    header["job-name"] = options.get("name", f"dmjd-{folder.name}")
    header["chdir"] = str(Path.cwd())  # relative paths stay valid, wherever the script is submitted from
    header["output"] = str((folder / "slurm" / ("%x-%A_%a.out" if "array" in options else "%x-%j.out")).absolute())
    exports = {"DMJD_LAUNCHERS": str(code / "launchers" if code else launchers_dir())}
    if trains:  # the shell cannot resolve experiments, quotes and ${...}
        exports |= {"DMJD_COMMAND": command, "DMJD_RUN": config.run}
    if "min_nodes" in options:
        header["no-kill"] = None  # a lost node does not end the job
        exports["DMJD_MIN_NODES"] = options["min_nodes"]
    # Written into the script, which later edits of the site file do not change.
    exports.update({name: value for name, value in site.items() if not name.startswith("SBATCH_")})
    if container is None and not site.get("DMJD_PYTHON"):
        exports["DMJD_PYTHON"] = sys.executable
    if container is None and code is not None:
        exports["DMJD_START"] = str(code / START)
    if chain > 1:
        header.pop("requeue", None)
        header["no-requeue"] = None
        exports["DMJD_CHAIN"] = f"chain-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"

    if command in on_one_gpu():
        own.insert(0, command)
    elif of != command and of != PRETRAIN:
        own.insert(0, of)
    own += ["warm=true"] * warm
    script = _render(template, header, exports, own)
    hidden = {name: MARK if is_secret(name, value) else value for name, value in exports.items()}
    redacted = {name: value and redact(value) for name, value in header.items()}
    shown = _render(template, redacted, hidden, list(map(redact, own)))
    many = f", {chain} jobs one after the other" if chain > 1 else ""
    many += f", array {header['array']}" if "array" in header else ""
    explanation = [
        f"{redacted['job-name']}: dmjd {command} on {nodes} node(s) with {header['gpus-per-node']} GPU(s) each, "
        f"up to {header['time']} a launch{many}",
        f"log: {redacted['output']}",
        *([f"container: {container}, with its own dmjd"] if container else []),
        *missing_here(site),
        *([f"code: {code}"] if code is not None else []),
        *(["secrets: in the script, which only you can read"] if shown != script else []),
    ]
    look = f"follow it with dmjd doctor {shlex.quote(config.run)}" if trains else "see its log"
    return Job(script, shown, folder, chain, look, explanation)


def _options(arguments: Sequence[str]) -> dict[str, str]:
    pairs = (argument.split("=", 1) for argument in arguments if "=" in argument)
    options = {key: value for key, value in pairs if key in OPTIONS}
    for key, value in options.items():
        if not value.strip() or "\n" in value:
            raise ConfigError(f"{key} needs a value of one line, got {value!r}")
    if "/" in options.get("name", ""):
        raise ConfigError(f"name={options['name']} is part of the log's file name; choose a name without a slash")
    return options


def _compose(command: str, own: Sequence[str], array: str | None) -> Any:
    """The configuration of the command, of an array that of its first index."""
    first = re.match(r"\d+", array or "")
    index = "%a" if array is None else first[0] if first else "0"

    def composed(index: str) -> Any:
        return compose(command, [text if text.startswith("run=") else text.replace("%a", index) for text in own])

    config = composed(index)
    if command not in on_one_gpu() and array is not None and composed(f"1{index}").run != config.run:
        raise ConfigError("run= of an array must not refer to an argument with %a; write %a in run= itself")
    return config


def submit(command: str, arguments: Sequence[str]) -> list[str]:
    """Copy the source, write the script into the run folder, submit it. Returns lines to print.

    Raises:
        ConfigError: as :func:`plan`, and if Slurm is not available or rejects the job.
        StorageError: if the run folder cannot be written to.
    """
    job = plan(command, arguments)  # raises before anything is written
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not installed here; submit from a login node, or print the script with --dry-run")
    try:
        (job.folder / "slurm").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{job.folder} cannot be written to ({error.strerror}); choose another folder") from error
    job = plan(command, arguments, snapshot(job.folder / "code"))
    path = job.folder / "slurm" / f"{command}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}.sbatch"
    replace_file(path, job.script, 0o666 if job.script == job.shown else 0o600)
    environment = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(_OF_A_JOB)}
    lines, ids = [*job.explanation, f"script: {path}"], list[str]()
    for _ in range(job.chain):
        dependency = [f"--dependency=afterany:{ids[-1]}"] if ids else []
        sbatch = ["sbatch", "--parsable", *dependency, str(path.absolute())]
        sent = f"; submitted so far: {', '.join(ids)}" if ids else ""
        try:
            done = subprocess.run(
                sbatch,
                env=environment,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                timeout=SBATCH_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"sbatch did not return within {SBATCH_SECONDS:g} s for {path}; check with sinfo whether Slurm is up, "
                f"with squeue --me whether the job is queued{sent}"
            ) from error
        if done.returncode:
            reason = " ".join(done.stderr.split()) or f"sbatch exited with code {done.returncode} without a message"
            raise ConfigError(f"Slurm rejected {path}: {reason}{sent}")
        numbers = re.findall(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)  # a site's sbatch may print more
        if not numbers:
            raise ConfigError(f"sbatch printed no job id for {path} but {done.stdout!r}; see squeue --me{sent}")
        ids.append(numbers[-1])
    return [*lines, f"submitted: {', '.join(ids)}; cancel it with scancel, {job.look}"]


def _at_home(argument: str) -> str:
    """The argument with ~ expanded: the shell of the script reads it too, and a container may have another home."""
    key, equals, value = argument.partition("=")
    return key + equals + "::".join(map(at_home, value.split("::")))


def _header(template: str) -> dict[str, str | None]:
    """The ``#SBATCH --option=value`` lines of a script; None for an option without a value."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", template, re.MULTILINE)
    return {name: value or None for name, value in found}


def _count(options: Mapping[str, str], key: str, default: int | str | None) -> int:
    text = options.get(key, str(default))
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{key} must be an integer above 0, got {text!r}")
    return int(text)


def _folder(config: Any, array: bool) -> Path:
    """The folder of scripts and logs: the run folder (%a of an array as "array"), or that of the checkpoint."""
    named = getattr(config, "run", None)
    if named is None:
        path = Path(getattr(config, "checkpoint", None) or config.checkpoints[0])
        folder = next((above for above in (path, *path.parents) if (above / "checkpoints").is_dir()), None)
        if folder is None:
            raise ConfigError(f"checkpoint={path} is neither a run folder with checkpoints nor in one")
    elif array and "%a" not in named:
        raise ConfigError(f"jobs of an array need separate run folders: set run={named}-%a")
    else:
        folder = Path(named.replace("%a", "array") if array else named)
    if re.search(r"\\|\n|%%|%\d*[AabJjNnrstux]", str(folder.absolute())):
        raise ConfigError(
            f"{str(folder.absolute())!r} contains a backslash, a line break or a file name pattern of Slurm such as "
            "%j, which Slurm would replace in the log's path; choose another folder (%a is the index of an array)"
        )
    return folder


def _render(template: str, header: Mapping[str, str | None], exports: Mapping[str, str], own: Sequence[str]) -> str:
    """The template with this header, followed by the exported variables and the arguments of the command."""
    # sbatch splits these lines at spaces and reads quotes as a shell does.
    options = [
        f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value is not None else "") for name, value in header.items()
    ]
    filled = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    filled += [f"set -- {shlex.join(own)}", ""]
    lines = template.splitlines()
    body = next(number for number, line in enumerate(lines) if number and not line.startswith("#"))
    return "\n".join([lines[0], *options, "", *filled, *lines[body:]]) + "\n"
