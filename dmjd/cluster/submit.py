"""``dmjd submit VERB key=value ...``: from words and a site to a job of Slurm.

The script is the launcher that ships, launchers/slurm/VERB.sbatch (evaluate.sbatch for evaluations), with its header
filled in and the words written into it: what is in the run folder is what runs, and it can be submitted again as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dmjd.cluster.site import read_site, site_file, site_header
from dmjd.cluster.walltime import check_limit
from dmjd.compose import compose
from dmjd.errors import ConfigError, StorageError
from dmjd.evaluate import EVALUATIONS
from dmjd.files import at_home, replace_file
from dmjd.redact import MARK, is_secret, redact
from dmjd.resources import launchers_dir
from dmjd.source import START, snapshot

OPTIONS = {
    "site": "a file of launchers/slurm/sites, or a path to one like them",
    "nodes": "how many",
    "gpus": "on each node; those of the site if left out",
    "time": "limit of one launch, as Slurm writes it: 24:00:00",
    "array": "indices, such as 0-2; %a in a word is the index",
    "chain": "that many jobs one after the other, where requeueing is disabled",
    "name": "of the job; dmjd-RUN if left out",
    "account": "as sbatch's",
    "partition": "as sbatch's",
    "qos": "as sbatch's",
    "constraint": "as sbatch's",
}
"""Words that are the job's and not the verb's."""

WARM = ("warm=true", "warm=false")
"""The word of preflight that is none of the run's."""

KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Of Slurm's variables around us, what says where Slurm is. sbatch hands the others on, and a job that is submitted
from within a job of an array would requeue that one, or stop when that one's time is over."""

SBATCH_SECONDS = 120.0
"""sbatch itself gives up on a controller that does not answer after about 100 s."""

_OF_A_JOB = ("SLURM_", "DMJD_CHAIN", "DMJD_RUN", "DMJD_EXIT_RECORD")
"""How the names begin of variables that are of the job around us, if there is one."""


@dataclass(frozen=True)
class Job:
    """What will be submitted.

    script: the whole of it, which may hold secrets. shown: the same without them, for people.
    folder: of the run it belongs to, or of an array's jobs together.
    chain: how many times.
    look: how to see what became of it.
    notes: what the user should know before.
    """

    verb: str
    script: str
    shown: str
    folder: Path
    chain: int
    look: str
    notes: list[str] = field(default_factory=list)

    @property
    def explanation(self) -> list[str]:
        """What it will do, line by line."""
        options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", self.script, re.MULTILINE))
        size = f"{options['nodes']} node(s) with {options.get('gpus-per-node', 'no')} GPU(s) each"
        many = f", {self.chain} jobs one after the other" if self.chain > 1 else ""
        many += f", array {options['array']}" if "array" in options else ""
        lines = [f"{options['job-name']}: dmjd {self.verb} on {size}, up to {options['time']} a launch{many}"]
        lines += [f"log: {options['output']}"]
        return lines + self.notes


def verbs() -> list[str]:
    """The commands that can be submitted."""
    return ["pretrain", "preflight", *EVALUATIONS]


def plan(verb: str, words: Sequence[str], code: Path | None = None) -> Job:
    """The job of ``dmjd VERB WORD...``; writes nothing.

    Args:
        words: of the verb, and of :data:`OPTIONS`.
        code: a copy of the source to run from, by default what is installed. A job in a container, which has a dmjd of
            its own, takes the launchers alone.

    Raises:
        ConfigError: naming the word and what it may be; of the verb's own words too.
    """
    if verb not in verbs():
        raise ConfigError(f"dmjd submit knows no verb {verb!r}; choose from {', '.join(verbs())}")
    words = [_at_home(word) for word in words]
    options = dict(word.split("=", 1) for word in words if word.partition("=")[0] in OPTIONS and "=" in word)
    own = [word for word in words if word.partition("=")[0] not in OPTIONS]
    for key, value in options.items():
        if not value.strip() or "\n" in value:
            raise ConfigError(f"{key} needs a value of one line, got {value!r}")
    if "/" in options.get("name", ""):
        raise ConfigError(f"name={options['name']}: a job's log is named after it, so take a name without a slash")
    site = read_site(site_file(options["site"])) if "site" in options else {}
    script_name, arguments = (EVALUATIONS[verb].script, [verb]) if verb in EVALUATIONS else (verb, [])
    template = launchers_dir() / "slurm" / f"{script_name}.sbatch"
    header = _header(template.read_text())
    header.update(site_header(site))
    kind, _, whole = (header.get("gpus-per-node") or "1").rpartition(":")  # as in a100:8
    trains = verb in ("pretrain", "preflight")
    nodes = _count(options, "nodes", header["nodes"])
    gpus = _count(options, "gpus", _count(site, "DMJD_GPUS", whole) if trains else 1)
    chain = _count(options, "chain", 1)
    _count(site, "DMJD_IDLE_LIMIT", 3)
    if not trains and nodes * gpus > 1:
        raise ConfigError(f"{verb} works on one GPU; leave nodes and gpus out")
    if chain > 1 and "array" in options:
        raise ConfigError("chain and array do not go together; submit one chain for each index")
    first = re.match(r"\d*", options.get("array", ""))
    index = ((first.group() if first else "") or "0") if "array" in options else "%a"  # which stays what it is

    def composed(index: str) -> Any:
        said = [word if word.startswith("run=") else word.replace("%a", index) for word in own if word not in WARM]
        return compose("pretrain" if trains else verb, said)

    config = composed(index)
    if trains:
        if "array" in options and composed(f"1{index}").run != config.run:
            raise ConfigError("run= of an array's jobs may refer to no word that has %a; write %a in it")
        processes = nodes * _count(site, "DMJD_PROCESSES", gpus)
        _check_batch(config, processes)
        if processes > 1 and not any(word.startswith("engine=") for word in own):
            own.insert(0, "engine=ddp")
    folder = _folder(config, array="array" in options)
    container = site.get("DMJD_CONTAINER") or None
    if verb == "pretrain" and container is None and (folder / "config.yaml").is_file():
        from dmjd.runs.folder import RunFolder  # torch takes seconds to come, and most runs are new

        RunFolder(folder).check(config)
    header.update(
        {key: options[key] for key in ("time", "array", "account", "partition", "qos", "constraint") if key in options}
    )
    if verb == "pretrain" and header["time"]:
        check_limit(header["time"], header.get("signal"), config.time_margin if config.time_budget == "auto" else None)
    header["nodes"], header["gpus-per-node"] = str(nodes), f"{kind}:{gpus}" if kind else str(gpus)
    header["job-name"] = options.get("name", f"dmjd-{folder.name}")
    header["chdir"] = str(Path.cwd())  # where words name files, whoever submits the script from wherever
    header["output"] = str((folder / "slurm" / ("%x-%A_%a.out" if "array" in options else "%x-%j.out")).absolute())
    exports = {"DMJD_LAUNCHERS": str(code / "launchers" if code else launchers_dir())}
    if verb == "pretrain":  # an experiment may name it, and a word in quotes or with ${...} is not what it says
        exports["DMJD_RUN"] = config.run
    # Into the script, so that it stays what it is when the site's file changes.
    exports.update({name: value for name, value in site.items() if not name.startswith("SBATCH_")})
    if container is None and not site.get("DMJD_PYTHON"):
        exports["DMJD_PYTHON"] = sys.executable
    if container is None and code is not None:
        exports["DMJD_START"] = str(code / START)
    if chain > 1:
        header.pop("requeue", None)
        header["no-requeue"] = None
        exports["DMJD_CHAIN"] = f"chain-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    notes = [f"container: {container}, with the dmjd that is in it"] if container else []
    notes += _missing_here(site)
    notes += [f"code: {code}"] if code is not None else []
    look = f"look with dmjd doctor {shlex.quote(config.run)}" if verb == "pretrain" else "its log tells the rest"
    arguments += own
    script = _render(template.read_text(), header, exports, arguments)
    hidden = {name: MARK if is_secret(name, value) else value for name, value in exports.items()}
    header = {name: value and redact(value) for name, value in header.items()}
    shown = _render(template.read_text(), header, hidden, list(map(redact, arguments)))
    if shown != script:
        notes.append("secrets: in the script, which only you can read")
    return Job(verb, script, shown, folder, chain, look, notes)


def submit(verb: str, words: Sequence[str]) -> list[str]:
    """Copy the source, write the script into the run folder, submit it. Returns lines for people.

    Raises:
        ConfigError: as :func:`plan`, and where Slurm is absent or refuses the job.
    """
    job = plan(verb, words)  # refuses what is wrong before anything is written
    if shutil.which("sbatch") is None:
        raise ConfigError("no sbatch here; submit from a login node, or add --dry-run to see the script")
    try:
        (job.folder / "slurm").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{job.folder} cannot be written to ({error.strerror}); name another folder") from error
    job = plan(verb, words, snapshot(job.folder / "code"))
    path = job.folder / "slurm" / f"{verb}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}.sbatch"
    replace_file(path, job.script, 0o666 if job.script == job.shown else 0o600)
    around = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(_OF_A_JOB)}
    lines, ids = [*job.explanation, f"script: {path}"], list[str]()
    for _ in range(job.chain):
        dependency = [f"--dependency=afterany:{ids[-1]}"] if ids else []
        command = ["sbatch", "--parsable", *dependency, str(path.absolute())]
        sent = f"; submitted so far: {', '.join(ids)}" if ids else ""
        try:
            done = subprocess.run(
                command, env=around, capture_output=True, text=True, errors="surrogateescape", timeout=SBATCH_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"sbatch does not answer within {SBATCH_SECONDS:g} s for {path}; see sinfo whether Slurm is up, and "
                f"squeue --me whether the job is queued{sent}"
            ) from error
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"sbatch left with {done.returncode} and no word"
            raise ConfigError(f"Slurm refuses {path}: {said}{sent}")
        numbers = re.findall(r"^(\d+)(?:;.*)?$", done.stdout, re.MULTILINE)  # a site's sbatch may have more to say
        if not numbers:
            raise ConfigError(f"sbatch names no job for {path} but says {done.stdout!r}; see squeue --me{sent}")
        ids.append(numbers[-1])
    return [*lines, f"submitted: {', '.join(ids)}; stop it with scancel, {job.look}"]


def _missing_here(site: Mapping[str, str]) -> list[str]:
    """Warnings of what a site names and this machine lacks, though compute nodes may have it.

    Raises:
        ConfigError: if the interpreter is a folder or not executable.
    """
    container, python = site.get("DMJD_CONTAINER"), site.get("DMJD_PYTHON")
    if container:  # the interpreter is one of the container
        is_file = container.endswith(".sif") or container.startswith(("/", "./", "../"))
        missing = is_file and not Path(container).exists()
        return [f"warning: DMJD_CONTAINER={container} is not on this machine; compute nodes need it"] * missing
    if not python:
        return []
    if "/" in python and Path(python).exists() and (Path(python).is_dir() or not os.access(python, os.X_OK)):
        raise ConfigError(f"DMJD_PYTHON={python} is not an executable file; name the interpreter of the compute nodes")
    if shutil.which(python) is None:
        return [f"warning: DMJD_PYTHON={python} is not on this machine; compute nodes need it"]
    probe = (
        "from importlib.util import find_spec as f; print(*(n for n in ('torch', 'hydra') if f(n) is None), sep=', ')"
    )
    try:
        done = subprocess.run([python, "-c", probe], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"warning: DMJD_PYTHON={python} does not run on this machine: {error}"]
    said = " ".join(done.stderr.split())[-160:] if done.returncode else done.stdout.strip()
    said = said or f"exit code {done.returncode}" * bool(done.returncode)
    lacks = "does not run on this machine:" if done.returncode else "lacks on this machine:"
    return [f"warning: DMJD_PYTHON={python} {lacks} {said}"] * bool(said)


def _at_home(word: str) -> str:
    """A script's shell reads the words too, and in a container they would mean another home."""
    key, equals, value = word.partition("=")
    return key + equals + "::".join(map(at_home, value.split("::")))


def _header(template: str) -> dict[str, str | None]:
    """``--option=value`` lines of a script; None for an option without a value."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", template, re.MULTILINE)
    return {name: value or None for name, value in found}


def _check_batch(config: Any, processes: int) -> None:
    """What the run itself would refuse, after hours in the queue."""
    parts = config.engine.grad_accum_steps * processes
    if config.batch_size % parts:
        raise ConfigError(
            f"batch_size={config.batch_size} is not divisible by "
            f"engine.grad_accum_steps={config.engine.grad_accum_steps} times {processes} process(es); "
            "take other nodes or gpus, or another batch_size"
        )


def _count(options: Mapping[str, str], key: str, default: int | str | None) -> int:
    text = options.get(key, str(default))
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{key} must be a whole number above 0, got {text!r}")
    return int(text)


def _folder(config: Any, array: bool) -> Path:
    """Where job files go: the run folder, for an array with "array" for its %a, or that of the checkpoint."""
    named = getattr(config, "run", None)
    if named is None:
        path = Path(config.checkpoint)
        folder = next((above for above in (path, *path.parents) if (above / "checkpoints").is_dir()), None)
        if folder is None:
            raise ConfigError(f"checkpoint={path} is neither a run folder with checkpoints nor in one")
    elif array and "%a" not in named:
        raise ConfigError(f"an array's jobs need a folder each: write run={named}-%a")
    else:
        folder = Path(named.replace("%a", "array") if array else named)
    if re.search(r"\\|\n|%%|%\d*[AabJjNnrstux]", str(folder.absolute())):
        raise ConfigError(
            f"{str(folder.absolute())!r} holds a backslash, a line break or one of Slurm's patterns such as %j: a job "
            "could not write its log there; name another folder (%a is the index of an array)"
        )
    return folder


def _render(template: str, header: Mapping[str, str | None], exports: Mapping[str, str], words: Sequence[str]) -> str:
    """The template with another header, and behind it the variables and words that it would be called with."""
    # sbatch splits such a line at spaces, and takes quotes as a shell does.
    options = [
        f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value is not None else "") for name, value in header.items()
    ]
    filled = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    filled += [f"set -- {shlex.join(words)}", ""]
    lines = template.splitlines()
    body = next(number for number, line in enumerate(lines) if number and not line.startswith("#"))
    return "\n".join([lines[0], *options, "", *filled, *lines[body:]]) + "\n"
