"""``dmjd COMMAND key=value ...``. Commands import torch and the like inside, so help and errors take no seconds."""

from __future__ import annotations

import atexit
import codecs
import errno
import gc
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dmjd import __version__
from dmjd.config import PLANS, RENAMED, SCHEMAS, PretrainConfig
from dmjd.config.fields import suggestion
from dmjd.errors import ConfigError, Diverged, Interrupted, UserError, printable_line, printable_message
from dmjd.evaluate import EVALUATIONS, describe, evaluate
from dmjd.explore import TOOLS, Tool
from dmjd.files import at_home
from dmjd.parallel.environment import prepare_imports
from dmjd.progress import LogHandler, Progress, begin
from dmjd.redact import redact, redact_output

if TYPE_CHECKING:
    from dmjd.runs.folder import RunFolder
    from dmjd.train.callbacks import Callback

_TRAINING_EXTRA, _EXPLORE_EXTRA = "pip install 'dmjd[train]'", "pip install 'dmjd[explore]'"
_DENSE_EXTRA, _OF_DENSE = "pip install 'dmjd[dense]'", ("torchvision", "transformers", "faster_coco_eval")


def _pretrain(arguments: Sequence[str]) -> None:
    """Pre-train an encoder; writes a run folder, or resumes the run in it"""
    from dmjd.compose import compose

    config = compose("pretrain", arguments)
    prepare_imports()
    from dmjd.train.loop import pretrain  # after compose: an unknown key is reported before torch is imported

    def callbacks(config: PretrainConfig) -> Sequence[Callback]:
        from dmjd.evaluate.online import OnlineKnn

        return [OnlineKnn(config)] if config.online_knn.every_epochs else []

    _train(lambda: pretrain(config, callbacks), "pictures/")


def _from_encoder(command: str, results: str, summary: str) -> Callable[[Sequence[str]], None]:
    """A command that trains an encoder with a head, by the function of its name in dmjd.train.loop."""

    def run(arguments: Sequence[str]) -> None:
        from dmjd.compose import compose, with_first_key

        config = compose(command, with_first_key(command, arguments))
        prepare_imports()
        from dmjd.train import loop

        _train(lambda: getattr(loop, command)(config), results)

    run.__doc__ = f"{summary}; writes a run folder, or resumes the run in it"
    return run


def _train(act: Callable[[], RunFolder], results: str) -> None:
    """Train, and print how it ended."""
    atexit.register(gc.freeze)  # saves seconds of garbage collection at exit
    run = act()
    if _rank() != 0:
        return
    ending = run.read_stop_reason()
    if not ending:
        print(f"{run.path}: ended; {run.stop_reason} is missing: not writable, or another launch resumed the run")
        return
    stop = "" if ending["reason"] == "finished" else f" at step {ending['step']} of {ending['total_steps']}"
    print(f"{run.path}: {'stopped' if stop else 'finished'}{stop}, {ending['detail']}; next: {ending['next']}")
    if not stop:
        print(f"results in {run.path}: checkpoints/step-{ending['step']:08}, log.jsonl, {results}")


def _demo(arguments: Sequence[str]) -> None:
    """Pre-train a small model in minutes on a CPU, evaluate it, write a report; takes the keys of pretrain"""
    prepare_imports()
    from dmjd.demo import demo

    demo(arguments)


def _plan(arguments: Sequence[str]) -> None:
    """Estimate parameters, FLOPs, memory, GPU hours: dmjd plan [pretrain|finetune|segment|detect] key=value"""
    from dmjd.first_start import first_start

    config = first_start(*_of_task("plan", arguments))
    from dmjd.builders.plan import Plan
    from dmjd.cluster.plan_page import page
    from dmjd.parallel.engines import AUTO

    named = config.engine.name != AUTO and any(text.startswith(("engine=", "engine.name=")) for text in arguments)
    only = config.engine.name if named else None
    print(*page(Plan(config), only), sep="\n")


def _of_task(command: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """`dmjd plan finetune` has the configuration "plan_finetune"; `dmjd plan pretrain` is `dmjd plan`."""
    if command != "plan" or not arguments or arguments[0] not in PLANS:
        return command, list(arguments)
    return PLANS[arguments[0]], list(arguments[1:])


def _evaluate(command: str, arguments: Sequence[str]) -> None:
    from dmjd.compose import compose, with_first_key

    print(*describe(evaluate(command, compose(command, with_first_key(command, arguments)))), sep="\n")


def _explore(tool: Tool) -> Callable[[Sequence[str]], None]:
    def run(arguments: Sequence[str]) -> None:
        from dmjd.compose import compose, with_first_key

        for line in tool.run(compose(tool.name, with_first_key(tool.name, arguments))):
            print(line)

    run.__doc__ = tool.summary
    return run


def _report(arguments: Sequence[str]) -> None:
    """Write an HTML report of a run, or compare runs: dmjd report RUN [RUN ...] [baseline=RUN] [output=DIR]"""
    from dmjd.report import paper_text, write_comparison, write_report

    keys = ("baseline", "output")
    runs = [_run_folder(text) for text in arguments if text.partition("=")[0] not in keys]
    options = {key: at_home(value) for key, _, value in (text.partition("=") for text in arguments) if key in keys}
    if not runs or (len(runs) == 1 and options):
        raise ConfigError(
            "dmjd report takes one run folder, or several to compare: "
            "dmjd report RUN [RUN ...] [baseline=RUN] [output=DIR]"
        )
    paths = write_comparison(runs, **options) if len(runs) > 1 else [write_report(runs[0])]
    print(paper_text(runs), "", *paths, sep="\n")


def _ops(arguments: Sequence[str]) -> None:
    """List the kernel that each op uses on CPU and CUDA: dmjd ops status"""
    if list(arguments) != ["status"]:
        raise ConfigError("dmjd ops takes one argument: dmjd ops status")
    import torch

    from dmjd.ops import build_info, status

    print(f"dmjd {__version__} on torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    info = build_info()
    if info is None:
        print("no native build: dmjd._core is not installed")
    else:
        cuda = f"CUDA {info['cuda']} for {';'.join(info['cuda_archs'])}" if info["cuda"] else "without CUDA kernels"
        print(f"built by {info['compiler']} for torch >= {info['torch_target']}, {cuda}")
    rows = [("op", "CPU", "CUDA"), *((name, *kernels.values()) for name, kernels in status().items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _export(arguments: Sequence[str]) -> None:
    """Export encoder or classifier to timm, ONNX, Hugging Face: dmjd export RUN [format=timm|onnx|huggingface]"""
    from dmjd.compose import compose, with_first_key

    config = compose("export", with_first_key("export", arguments))
    from dmjd.evaluate.export import export

    path, line = export(config)
    print(f"{path}: for {config.format}; load it with\n{line}")


def _consolidate(arguments: Sequence[str]) -> None:
    """Merge a sharded checkpoint (weights and optimizer state) into whole tensors in safetensors files"""
    from dmjd.compose import compose, with_first_key

    config = compose("consolidate", with_first_key("consolidate", arguments))
    from dmjd.runs.consolidate import consolidate

    print(consolidate(config))


def _convert(arguments: Sequence[str]) -> None:
    """Convert weights between code bases (MAE, BEiT, timm, ...): dmjd convert input=FILE output=FILE to=LAYOUT"""
    from dmjd.compose import compose

    config = compose("convert", arguments)
    from dmjd.evaluate.convert import convert

    done = convert(config)
    print(f"{done.path}: {done.tensors} tensors in the layout of {done.target}, from {done.source}")


def _shards(arguments: Sequence[str]) -> None:
    """Build, index and verify webdataset tars: dmjd shards build|index|verify|stat|show"""
    from dmjd.data.shards.commands import run

    for line in run(arguments):
        print(line)


def _submit(arguments: Sequence[str]) -> None:
    """Submit a command as a Slurm job: dmjd submit COMMAND site=NAME nodes=N key=value ... [--dry-run]"""
    from dmjd.cluster.submit import plan, submit, submittable

    dry = "--dry-run" in arguments
    arguments = [text for text in arguments if text != "--dry-run"]
    if not arguments:
        raise ConfigError(
            f"dmjd submit takes one of {', '.join(submittable())} and its arguments: dmjd submit pretrain nodes=4 ..."
        )
    command, *rest = arguments
    if dry:
        job = plan(command, rest)
        print(job.shown, end="")
        print("\n".join(f"# {line}" for line in [*job.explanation, "nothing was submitted"]))
    else:
        print("\n".join(submit(command, rest)))


def _preflight(arguments: Sequence[str]) -> None:
    """Check the nodes of a job before a long run: dmjd preflight [finetune|segment|detect] key=value ..."""
    from dmjd.cluster.submit import training_of
    from dmjd.compose import compose, with_first_key

    command, arguments, warm = training_of(arguments)
    config = compose(command, with_first_key(command, arguments))
    from dmjd.cluster.checks import report
    from dmjd.cluster.preflight import preflight

    checks = preflight(config, warm)
    failed = [check.name for check in checks if check.fix]
    if _rank() == 0:
        print(report(checks))
    if failed:
        error = UserError(f"{len(failed)} check(s) failed: {', '.join(failed)}")
        error.reported = _rank() != 0
        raise error


def _doctor(arguments: Sequence[str]) -> None:
    """Explain why a run stopped or hangs: rank, phase, cause, what to do: dmjd doctor RUN"""
    from dmjd.cluster.doctor import examine

    if len(arguments) != 1:
        raise ConfigError("dmjd doctor takes one run folder: dmjd doctor RUN")
    for finding in examine(Path(_run_folder(arguments[0]))):
        print(printable_message(finding.what))
        if finding.advice:
            print(f"    -> {printable_message(finding.advice)}")


def _run_folder(text: str) -> str:
    """The run folder of an argument without a key, which other commands name by run=RUN."""
    return at_home(text if os.path.lexists(text) else text.removeprefix("run="))


def _completion(arguments: Sequence[str]) -> None:
    """Print a completion script for a shell: eval "$(dmjd completion bash)"; dmjd completion bash|zsh|fish"""
    from dmjd.completion import SHELLS, script

    if len(arguments) != 1 or arguments[0] not in SHELLS:
        raise ConfigError(f"dmjd completion takes one shell of {', '.join(SHELLS)}: dmjd completion bash")
    print(script(arguments[0], {name: _summary(name) for name in _names()}), end="")


def _version(arguments: Sequence[str]) -> None:
    """Print the version"""
    if arguments:
        raise ConfigError("dmjd version takes no arguments")
    print(f"dmjd {__version__}")


GROUPS: dict[str, dict[str, Callable[[Sequence[str]], None]]] = {
    "train": {
        "pretrain": _pretrain,
        "finetune": _from_encoder("finetune", "evaluations/", "Fine-tune an encoder with a classification head"),
        "segment": _from_encoder(
            "segment", "evaluations/, pictures/", "Train segmentation (UPerNet, ADE20K) from an encoder"
        ),
        "detect": _from_encoder(
            "detect", "evaluations/, pictures/", "Train detection (Mask R-CNN, COCO) from an encoder"
        ),
        "demo": _demo,
        "plan": _plan,
    },
    "evaluate": {"report": _report},
    "explore": {name: _explore(tool) for name, tool in TOOLS.items()},
    "checkpoints": {"export": _export, "consolidate": _consolidate, "convert": _convert},
    "data": {"shards": _shards},
    "cluster": {"submit": _submit, "preflight": _preflight, "doctor": _doctor},
    "installation": {"ops": _ops, "completion": _completion, "version": _version},
}
"""Commands by group, in the order of the usage page. A command's docstring is its line there.

The group evaluate begins with the registered evaluations.
"""
COMMANDS = {name: run for group in GROUPS.values() for name, run in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0; 1 for a run that had to stop; 2 for an error of the user's input."""
    arguments = [text for text in (sys.argv[1:] if argv is None else argv) if not _local_rank(text)]
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        codecs.register_error("dmjd", _encodable)
        sys.stdout.reconfigure(errors="dmjd")
    redact_output()
    # Read when torch is imported. By default its threads spin when they wait, also for one that has lost its core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["MPLBACKEND"] = "agg"  # a notebook's, which its commands inherit, may not be installed here
    begin()
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[LogHandler()], force=True)
    logging.getLogger("dmjd").setLevel(logging.INFO)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help", *arguments[2:]]
    command, *rest = arguments or ["--help"]
    command = "version" if command in ("--version", "-V") else command
    try:
        if command in _HELP:
            print(_usage())
            return 0
        if command not in _names():
            hint = suggestion(command, _names()) or f"; choose from {', '.join(_names())}"
            raise ConfigError(f"no command {redact(command)!r}{hint}")
        rest = list(_overrides(rest))
        for former in RENAMED.keys() & {text.partition("=")[0] for text in rest}:
            if _rank() == 0:
                logging.getLogger("dmjd").warning("%s is now called %s", former, RENAMED[former])
        if asked := [text for text in rest if text in _HELP]:
            everything = "--help-all" in asked or "all" in rest
            print(_help(command, [text for text in rest if text not in (*_HELP, "all")], everything))
        elif "--cfg" in rest:
            print(_resolved(command, [text for text in rest if text != "--cfg"]), end="")
        else:
            with _recorded_exit(), Progress(command, None):  # shown while no other progress is
                _evaluate(command, rest) if command in EVALUATIONS else COMMANDS[command](rest)
    except UserError as error:
        return 2 if error.reported else _fail(str(error), 2)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package == "dmjd":
            raise
        extra = _DENSE_EXTRA if package in _OF_DENSE else _EXPLORE_EXTRA if command in TOOLS else _TRAINING_EXTRA
        return _fail(f"dmjd {command} needs {package}; {extra}", 2)
    except BrokenPipeError:  # such as | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit would raise again
        return 141
    except OSError as error:
        if error.errno == errno.ENOENT and error.filename is None:  # os.getcwd()'s alone names nothing
            return _fail("the current folder does not exist any more; change into another folder", 1)
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _fail(printable_line(named), 1)
    except MemoryError:
        return _fail("out of memory; use smaller images, batches or models, or fewer workers", 1)
    except Interrupted as error:
        return 128 + error.signal
    except KeyboardInterrupt:
        print("interrupted; files written so far are complete", file=sys.stderr)
        return 130
    except Diverged as error:
        return 1 if error.reported else _fail(str(error), 1)
    except RuntimeError as error:
        if str(error).startswith("DataLoader worker"):  # raised by torch's signal handler, in any place
            reason = " ".join(str(error).split()).rstrip(".")
            return _fail(
                f"{reason}; memory or /dev/shm may have been full: use fewer workers, the same command resumes the run",
                1,
            )
        if "DefaultCPUAllocator: " in str(error):
            reason = " ".join(str(error).partition("DefaultCPUAllocator: ")[2].split()).rstrip(".")
            return _fail(
                f"{reason}; use smaller images, batches or models, or fewer workers (a run folder from others may have "
                "a configuration that needs more memory than this machine has)",
                1,
            )
        raise
    return 0


_HELP = ("-h", "--help", "--help-all")
_FLAGS = (*_HELP, "--cfg", "--dry-run")
"""Arguments without a value."""


def _encodable(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler of stdout: bytes of file names as they are, other characters outside the encoding as escapes."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


def _open_standard_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed: the next file would get its descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest descriptor that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def _names() -> list[str]:
    return [*COMMANDS, *EVALUATIONS]


def _overrides(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments with ``--key=value`` and ``--key value`` as ``key=value``; flags and all others stay."""
    left = iter(arguments)
    for text in left:
        key, equals, value = text.removeprefix("--").partition("=")
        if text in _FLAGS or not text.startswith("--"):
            yield text
            continue
        if not equals:
            value = next(left, "--")
            if value.startswith("--") or value in _FLAGS:
                hint = suggestion(text, _FLAGS)
                raise ConfigError(f"{redact(text)} needs a value: {redact(text)}=VALUE or {redact(key)}=VALUE{hint}")
        yield f"{key.replace('-', '_')}={value}"


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _local_rank(argument: str) -> bool:
    """Whether DeepSpeed's launcher has added this argument; it sets LOCAL_RANK as well."""
    return argument.startswith(("--local_rank=", "--local-rank="))


def _rank() -> int:
    """This process's rank; 0 if the launcher's variables are wrong, so that the error is printed."""
    from dmjd.parallel.launch import read_launch

    try:
        return read_launch().rank
    except ConfigError:
        return 0


@contextmanager
def _recorded_exit() -> Iterator[None]:
    """Write the exit reason for the batch script, which sees only torchrun's exit code, if the run did not start."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "reported", False):
            from dmjd.runs.exit_record import exit_reason, write_launch_record

            write_launch_record(*exit_reason(error, _rank()))
        raise


def _usage() -> str:
    lines = [
        "dmjd COMMAND [KEY=VALUE ...]",
        "",
        "  dmjd COMMAND --help              examples and the most used keys; --help-all: all keys",
        "  dmjd COMMAND KEY=VALUE --cfg     print the resolved configuration and exit",
        "  dmjd version                     print the version; dmjd --version does as well",
        "",
        "examples",
        "  dmjd demo                        pre-train and evaluate a small model on a CPU, in minutes",
        "  dmjd pretrain experiment=own_photos data.root=photos",
        "  dmjd knn runs/own_photos         score the encoder; then: dmjd report runs/own_photos",
        "  dmjd finetune runs/own_photos preset=own_photos",
    ]
    for group, commands in GROUPS.items():
        names = [*EVALUATIONS, *commands] if group == "evaluate" else commands
        lines += ["", group, *(f"  {name:11} {_summary(name)}" for name in names)]
    return "\n".join(lines)


def _summary(command: str) -> str:
    return EVALUATIONS[command].summary if command in EVALUATIONS else (COMMANDS[command].__doc__ or "").strip()


def _help(command: str, arguments: Sequence[str], everything: bool) -> str:
    from dmjd.compose import with_first_key
    from dmjd.keys import PATHS, SEVERAL, key_of_first, keys_of
    from dmjd.manual import OF_REPORT, examples, page

    lines = [f"dmjd {command}: {_summary(command)}", "", *examples(command)]

    command, arguments = _of_task(command, arguments)
    first = key_of_first(command)
    if first is not None:
        typed = f"dmjd {command.replace('_', ' ')}"
        several = f", {typed} A B for {typed} {first}=A,B" if first in SEVERAL else ""
        if PATHS in keys_of(command):
            several = f", {typed} RUN A B for {typed} {first}=RUN {PATHS}=A,B"
        lines += ["", f"{typed} RUN is short for {typed} {first}=RUN{several}"]
        arguments = with_first_key(command, arguments)
    if command in SCHEMAS:
        lines += ["", *page(command, arguments, everything)]
    if command in ("demo", "preflight"):
        lines += ["", "keys: those of dmjd pretrain; see dmjd pretrain --help"]
    if command == "preflight":
        lines += ["      or of finetune, segment or detect, if it comes first", "warm=true: also run one training step"]
    if command == "submit":
        from dmjd.cluster.submit import OPTIONS, submittable

        options = {"COMMAND": ", ".join(submittable()), "--dry-run": "print the script, submit nothing", **OPTIONS}
        lines += ["", *(f"  {name:12} {meaning}" for name, meaning in options.items())]
    if command == "report":
        lines += ["", *OF_REPORT]
    if command == "shards":
        from dmjd.data.shards.commands import manual

        lines += ["", *manual()]
    return "\n".join(lines)


def _resolved(command: str, arguments: Sequence[str]) -> str:
    from dmjd.compose import to_yaml
    from dmjd.first_start import first_start

    command, arguments = _of_task(command, arguments)
    if command not in SCHEMAS:
        configured = ", ".join(name for name in SCHEMAS if name in _names())
        raise ConfigError(f"dmjd {command} has no configuration; --cfg works with {configured}")
    return to_yaml(first_start(command, arguments))
