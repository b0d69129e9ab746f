"""``dmjd VERB key=value ...``. Heavy imports happen inside verbs, so that help and mistakes answer at once."""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dmjd import __version__
from dmjd.errors import ConfigError, UserError, printable_message
from dmjd.evaluate import EVALUATIONS, evaluate
from dmjd.files import at_home
from dmjd.redact import redact_output

_TRAINING_EXTRA = "pip install 'dmjd[train]'"


def _pretrain(words: Sequence[str]) -> None:
    """pre-train a masked image model into a run folder"""
    from dmjd.compose import compose

    config = compose("pretrain", words)
    from dmjd.train.loop import pretrain  # torch takes seconds to come: a typo need not wait for it

    judges = []
    if config.online_knn.every_epochs:
        from dmjd.data.build import resolve_auto
        from dmjd.evaluate.online import OnlineKnn

        config.data = resolve_auto(config.data)
        judges.append(OnlineKnn(config))
    atexit.register(gc.freeze)  # else the interpreter's end collects garbage for seconds
    run = pretrain(config, judges)
    if _rank() != 0:
        return
    ending = run.read_stop_reason()
    if not ending:
        print(
            f"{run.path}: this launch has ended; {run.stop_reason} does not say how, for another launch has begun "
            "there or it could not be written"
        )
        return
    stop = "" if ending["reason"] == "finished" else f" at step {ending['step']} of {ending['total_steps']}"
    print(f"{run.path}: {'stopped' if stop else 'finished'}{stop}, {ending['detail']}; next: {ending['next']}")


def _demo(words: Sequence[str]) -> None:
    """pre-train a small model in minutes, score it beside an untrained one, write a report; takes pretrain's keys"""
    from dmjd.demo import demo

    demo(words)


def _plan(words: Sequence[str]) -> None:
    """parameters, FLOPs, memory per GPU and GPU hours of a pre-training, before it is submitted"""
    from dmjd.compose import compose

    config = compose("plan", words)
    from dmjd.cluster.plan import Plan
    from dmjd.cluster.plan_page import page

    only = config.engine.name if any(word.startswith(("engine=", "engine.name=")) for word in words) else None
    print(*page(Plan(config), only), sep="\n")


def _of_checkpoint(words: Sequence[str]) -> list[str]:
    """`dmjd knn RUN` is short for `dmjd knn checkpoint=RUN`."""
    return [f"checkpoint={words[0]}", *words[1:]] if words and "=" not in words[0] else list(words)


def _evaluate(verb: str, words: Sequence[str]) -> None:
    from dmjd.compose import compose

    record = evaluate(verb, compose(verb, _of_checkpoint(words)))
    for score, column in EVALUATIONS[verb].columns.items():
        value = "-" if record[score] is None else f"{column.format(record[score])} {column.unit}".rstrip()
        print(f"{verb}: {column.meaning} {value}  ({record['weights']}, step {record['step']})")


def _report(words: Sequence[str]) -> None:
    """a run's report.html, or a comparison of several: dmjd report RUN [RUN ...] [baseline=RUN] [output=DIR]"""
    from dmjd.report import write_comparison, write_report

    keys = ("baseline", "output")
    runs = [word for word in words if word.partition("=")[0] not in keys]
    options = {key: at_home(value) for key, _, value in (word.partition("=") for word in words) if key in keys}
    if not runs or (len(runs) == 1 and options):
        raise ConfigError(
            "dmjd report takes one run folder, or several to compare: dmjd report RUN RUN [baseline=RUN] [output=DIR]"
        )
    paths = write_comparison(runs, **options) if len(runs) > 1 else [write_report(runs[0])]
    print(*paths, sep="\n")


def _ops(words: Sequence[str]) -> None:
    """which kernel serves which op on which device: dmjd ops status"""
    if list(words) != ["status"]:
        raise ConfigError("dmjd ops takes one word: dmjd ops status")
    import torch

    from dmjd.ops import build_info, status

    print(f"dmjd {__version__} on torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    info = build_info()
    if info is None:
        print("no native build: dmjd._core is not there")
    else:
        cuda = f"CUDA {info['cuda']} for {';'.join(info['cuda_archs'])}" if info["cuda"] else "without CUDA kernels"
        print(f"built by {info['compiler']} for torch >= {info['torch_target']}, {cuda}")
    rows = [("op", "CPU", "CUDA"), *((name, *kernels.values()) for name, kernels in status().items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _export(words: Sequence[str]) -> None:
    """write a checkpoint's encoder as safetensors for timm.create_model"""
    from dmjd.compose import compose

    config = compose("export", _of_checkpoint(words))
    from dmjd.evaluate.export import export, sidecar

    path = export(config)
    print(f"{path}: timm computes the same features from it; the call is in {sidecar(path)}")


def _consolidate(words: Sequence[str]) -> None:
    """write a checkpoint's weights and moments into one safetensors file that every engine reads"""
    from dmjd.compose import compose

    config = compose("consolidate", _of_checkpoint(words))
    from dmjd.runs.consolidate import consolidate

    print(consolidate(config))


def _convert(words: Sequence[str]) -> None:
    """a checkpoint of one code base for another: dmjd convert input=FILE output=FILE to=LAYOUT"""
    from dmjd.compose import compose

    config = compose("convert", words)
    from dmjd.evaluate.convert import convert

    done = convert(config)
    print(f"{done.path}: {done.tensors} tensors in the layout of {done.target}, from {done.source}")


def _shards(words: Sequence[str]) -> None:
    """make and check tar shards with an index: dmjd shards build|index|verify|stat|show"""
    from dmjd.data.shards.verbs import run

    for line in run(words):
        print(line)


def _submit(words: Sequence[str]) -> None:
    """submit a verb to Slurm: dmjd submit VERB site=NAME nodes=N key=value ... [--dry-run]"""
    from dmjd.cluster.submit import plan, submit, verbs

    words = list(words)
    dry = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    if not words:
        raise ConfigError(
            f"dmjd submit takes one of {', '.join(verbs())} and its words: dmjd submit pretrain nodes=4 ..."
        )
    verb, *rest = words
    if dry:
        job = plan(verb, rest)
        print(job.shown, end="")
        print("\n".join(f"# {line}" for line in [*job.explanation, "nothing was submitted"]))
    else:
        print("\n".join(submit(verb, rest)))


def _preflight(words: Sequence[str]) -> None:
    """check nodes before a long job, with its words, which are pretrain's: dmjd preflight [warm=true] key=value ..."""
    from dmjd.cluster.submit import WARM
    from dmjd.compose import compose

    warm = "warm=true" in words
    config = compose("pretrain", [word for word in words if word not in WARM])
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


def _doctor(words: Sequence[str]) -> None:
    """what happened to a run, which rank, in which phase, and what to do: dmjd doctor RUN"""
    from dmjd.cluster.doctor import examine

    if len(words) != 1:
        raise ConfigError("dmjd doctor takes one run folder: dmjd doctor RUN")
    for finding in examine(Path(words[0])):
        print(printable_message(finding.what))
        if finding.advice:
            print(f"    -> {printable_message(finding.advice)}")


VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    "pretrain": _pretrain,
    "demo": _demo,
    "plan": _plan,
    "report": _report,
    "ops": _ops,
    "export": _export,
    "consolidate": _consolidate,
    "convert": _convert,
    "shards": _shards,
    "submit": _submit,
    "preflight": _preflight,
    "doctor": _doctor,
}


def verbs() -> dict[str, tuple[str, Callable[[Sequence[str]], None]]]:
    """Verb -> its line in the help and its function; evaluations come after the others."""
    found = {name: ((run.__doc__ or "").strip(), run) for name, run in VERBS.items()}
    return found | {name: (each.summary, partial(_evaluate, name)) for name, each in EVALUATIONS.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 for a run that had to stop, 2 for a mistake the user can mend."""
    words = [word for word in (sys.argv[1:] if arguments is None else arguments) if not _local_rank(word)]
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")  # the name of a file is printed as it is
    redact_output()
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    logging.getLogger("dmjd").setLevel(logging.INFO)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] == "--version":
        print(f"dmjd {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    try:
        if verb not in verbs():
            raise ConfigError(f"no verb {verb!r}; choose from {', '.join(verbs())}")
        if "-h" in rest or "--help" in rest:
            print(_help(verb, [word for word in rest if word not in ("-h", "--help")]))
        elif "--cfg" in rest:
            print(_resolved(verb, [word for word in rest if word != "--cfg"]), end="")
        else:
            with _recorded_exit():
                verbs()[verb][1](rest)
    except UserError as error:
        if not error.reported:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "dmjd":
            raise
        print(f"error: dmjd {verb} needs {error.name}; {_TRAINING_EXTRA}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit complains once more
        return 141
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except MemoryError:
        print("error: memory ran out; take smaller images, batches or models, or fewer workers", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was finished is intact", file=sys.stderr)
        return 130
    except RuntimeError as error:
        if str(error).startswith("DataLoader worker"):  # torch's signal handler raises it wherever the run is
            said = " ".join(str(error).split()).rstrip(".")
            print(
                f"error: {said}; perhaps memory or /dev/shm was full: try fewer workers, the same command continues",
                file=sys.stderr,
            )
            return 1
        if "DefaultCPUAllocator: " in str(error):
            said = " ".join(str(error).partition("DefaultCPUAllocator: ")[2].split()).rstrip(".")
            print(
                f"error: {said}; take smaller images, batches or models, or fewer workers (a configuration that you "
                "did not write may ask for too much)",
                file=sys.stderr,
            )
            return 1
        if type(error).__name__ != "Diverged":
            raise
        if not getattr(error, "reported", False):
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _local_rank(word: str) -> bool:
    """Whether the word is what DeepSpeed's launcher adds unless told not to; it sets LOCAL_RANK as well."""
    return word.startswith(("--local_rank=", "--local-rank="))


def _rank() -> int:
    """This process's rank; 0 where the launcher's variables are wrong, which is then the error that is printed."""
    from dmjd.parallel.launch import read_launch

    try:
        return read_launch().rank
    except ConfigError:
        return 0


@contextmanager
def _recorded_exit() -> Iterator[None]:
    """Tell a batch script, which sees torchrun's exit code alone, why there was no run that could have said so."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "reported", False):
            from dmjd.runs.exit_record import exit_reason, write_launch_record

            write_launch_record(*exit_reason(error, _rank()))
        raise


def _usage() -> str:
    lines = [
        "dmjd VERB key=value ...   (dmjd VERB --help explains its keys, --cfg prints its configuration)",
        "",
        "verbs",
    ]
    lines += [f"  {name:11} {summary}" for name, (summary, _) in verbs().items()]
    return "\n".join(lines)


def _help(verb: str, words: Sequence[str]) -> str:
    lines = [f"dmjd {verb}: {verbs()[verb][0]}"]
    from dmjd.config import SCHEMAS
    from dmjd.manual import page

    if verb in SCHEMAS:
        lines += ["", *page(verb, _of_checkpoint(words) if verb not in ("pretrain", "plan", "convert") else words)]
    if verb == "submit":
        from dmjd.cluster.submit import OPTIONS

        lines += ["", *(f"  {name:12} {meaning}" for name, meaning in OPTIONS.items())]
    if verb == "shards":
        from dmjd.data.shards.verbs import VERBS as SHARD_VERBS

        lines += ["", *(f"  dmjd shards {shard_verb.usage}" for shard_verb in SHARD_VERBS.values())]
    return "\n".join(lines)


def _resolved(verb: str, words: Sequence[str]) -> str:
    from dmjd.compose import compose, to_yaml
    from dmjd.config import SCHEMAS

    if verb not in SCHEMAS:
        raise ConfigError(f"dmjd {verb} has no configuration; --cfg works with {', '.join(SCHEMAS)}")
    return to_yaml(compose(verb, words))
