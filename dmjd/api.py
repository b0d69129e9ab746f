"""The Python interface of a run: :func:`pretrain`, :func:`finetune`, :func:`segment`, :func:`detect`, the evaluations,
and :class:`Run`. See docs/python.md.

A training is a child process that runs the command, such as ``dmjd pretrain``. Signal handlers, random generators,
logging, torch's settings and the environment of the caller therefore stay as they are, a notebook's event loop and
threads are not forked into loader workers, and the memory of a GPU is free again at the end.
"""

from __future__ import annotations

import codecs
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmjd.compose import compose
from dmjd.config import DownstreamConfig, PretrainConfig
from dmjd.errors import ConfigError, Diverged, UserError
from dmjd.files import at_home
from dmjd.keys import groups_of
from dmjd.keywords import as_overrides, of_checkpoint
from dmjd.runs.paths import RunPaths

if TYPE_CHECKING:
    from dmjd.encoder import Encoder

RECIPE = "own_photos"
"""Experiment of :func:`pretrain`, and preset of :func:`finetune`, unless another is named."""

_COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE")
"""Variables of a notebook's kernel under which rich draws bars that a notebook cannot show."""
_ERROR = "error: "
_POLL_SECONDS = 1.0
_STOP_SECONDS = 60.0
"""Time that a child process has to save a checkpoint and end."""

_CHILD = """
import ctypes, json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: save a checkpoint and stop if the caller is killed
if os.getppid() != {parent}:
    sys.exit(1)
sys.path[:] = [{root!r}] + [folder for folder in sys.path if folder]
from dmjd.cli import main
del sys.path[0]
sys.argv = ["dmjd", *json.load(sys.stdin)]
sys.exit(main(sys.argv[1:]))
"""
"""Arguments come through stdin: a command line is visible to other users and limited in length."""


class Run:
    """A run folder. ``dmjd.Run("runs/x")`` opens one that exists, also while it is trained.

    Functions that take the path of a run take it too (``os.PathLike``).

    Attributes:
        path: the run folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(at_home(os.fspath(path)))
        self._files = RunPaths(self.path)
        if not self._files.config.is_file():
            raise ConfigError(f"run={self.path} has no {self._files.config.name}; name the folder of a run")

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.stop_reason.get('reason', 'not ended')})"

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return bool(self.stop_reason.get("reason") == "finished")

    @property
    def stop_reason(self) -> dict[str, Any]:
        """The exit record of the last launch: ``reason``, ``detail``, ``step``, ``total_steps``, ``next``; empty while
        it runs."""
        return self._files.read_stop_reason()

    @property
    def log(self) -> list[dict[str, Any]]:
        """The rows of ``log.jsonl``: ``step``, ``epoch``, ``loss``, ``lr``, ..."""
        return self._files.read_log()

    @property
    def pictures(self) -> dict[str, Path]:
        """The pictures of the newest checkpoint: name, such as "views" (masks, targets, predictions) -> PNG file."""
        return {path.stem: path for path in sorted(self._files.pictures.glob("*.png"))}

    def encoder(self, **options: Any) -> Encoder:
        """Its trained encoder; options as for :func:`dmjd.load_encoder`."""
        from dmjd.encoder import load_encoder

        return load_encoder(self.path, **options)

    def report(self) -> Path:
        """Write ``report.html`` into the run folder and return its path."""
        from dmjd.report import write_report

        return write_report(self.path)


def pretrain(
    data: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    run: str | os.PathLike[str] | None = None,
    *,
    experiment: str | None = RECIPE,
    overrides: str | Sequence[str] = (),
    **keys: Any,
) -> Run:
    """Pre-train an encoder, or resume the run in the folder ``run``; returns when the run has ended.

    It runs ``dmjd pretrain`` in a child process, whose output is printed. KeyboardInterrupt (Ctrl-C, or the stop button
    of a notebook) stops the run with a checkpoint and is raised again after that; the same call resumes it. In another
    thread than the main one, create the file ``RUN/stop`` instead.

    Args:
        data: a folder of images, or the name of a data set (``dmjd pretrain --help`` lists them: "digits", ...); a
            ``Path`` is always a folder. A dict holds keys of the section: ``{"root": "photos", "val_percent": 20}``.
        run: the run folder.
        experiment: the recipe; None for the defaults of ``dmjd pretrain``.
        overrides: further keys as on the command line: ``["optim.base_lr=1e-3"]``; a string is one of them.
        keys: keys of ``dmjd pretrain``: ``epochs=20``, ``optim={"base_lr": 1e-3}``, ``**{"optim.base_lr": 1e-3}``.

    Raises:
        UserError: one line, as the command prints it, if keys, data or the run folder are not valid.
        Diverged: if there are more bad steps than ``guard`` allows.
        RuntimeError: if the child process crashed or was killed.
    """
    typed = [overrides] if isinstance(overrides, str) else overrides
    arguments = _arguments("pretrain", data, run, {"experiment": experiment}, typed, keys)
    config: PretrainConfig = compose("pretrain", arguments)
    _run_child(["pretrain", *arguments], Path(config.run))
    return Run(config.run)


def finetune(
    init: str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    run: str | os.PathLike[str] | None = None,
    *,
    preset: str | None = RECIPE,
    overrides: str | Sequence[str] = (),
    **keys: Any,
) -> Run:
    """Fine-tune an encoder with a classification head, or resume the run in the folder ``run``; as :func:`pretrain`.

    Args:
        init: a :class:`Run`, a run folder, a checkpoint folder or a file of weights; None for an untrained encoder.
        data: as for :func:`pretrain`, with labels; None for the images of the run ``init``.
        run: the run folder.
        preset: the recipe; None for the defaults of ``dmjd finetune``, MAE's for ViT-B.
        overrides: further keys as on the command line.
        keys: keys of ``dmjd finetune``: ``epochs=20``, ``optim={"layer_decay": 0.75}``.

    Raises:
        UserError, Diverged, RuntimeError: as :func:`pretrain`.
    """
    return _train_from("finetune", init, data, run, preset, overrides, keys)


def segment(
    init: str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    run: str | os.PathLike[str] | None = None,
    *,
    preset: str | None = None,
    overrides: str | Sequence[str] = (),
    **keys: Any,
) -> Run:
    """Train semantic segmentation from an encoder, or resume the run in the folder ``run``; as :func:`pretrain`.

    Args:
        init: as for :func:`finetune`.
        data: the folder of images and annotations, or a dict of keys of the section.
        run: the run folder.
        preset: the recipe; None for the defaults of ``dmjd segment``.
        overrides: further keys as on the command line.
        keys: keys of ``dmjd segment``: ``epochs=20``, ``test={"flip": True}``.

    Raises:
        UserError, Diverged, RuntimeError: as :func:`pretrain`.
    """
    return _train_from("segment", init, data, run, preset, overrides, keys)


def detect(
    init: str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    run: str | os.PathLike[str] | None = None,
    *,
    preset: str | None = None,
    overrides: str | Sequence[str] = (),
    **keys: Any,
) -> Run:
    """Train object detection from an encoder, or resume the run in the folder ``run``; arguments as for
    :func:`segment`, keys those of ``dmjd detect``."""
    return _train_from("detect", init, data, run, preset, overrides, keys)


def _train_from(
    command: str,
    init: str | os.PathLike[str] | None,
    data: str | os.PathLike[str] | Mapping[str, Any] | None,
    run: str | os.PathLike[str] | None,
    preset: str | None,
    overrides: str | Sequence[str],
    keys: dict[str, Any],
) -> Run:
    """Run ``dmjd COMMAND`` with these arguments; see :func:`finetune`."""
    typed = [overrides] if isinstance(overrides, str) else overrides
    arguments = [*as_overrides({"init": init}), *_arguments(command, data, run, {"preset": preset}, typed, keys)]
    config: DownstreamConfig = compose(command, arguments)
    _run_child([command, *arguments], Path(config.run))
    return Run(config.run)


def knn(checkpoint: str | os.PathLike[str], **keys: Any) -> dict[str, Any]:
    """k-nearest-neighbour accuracy of an encoder: the record of ``dmjd knn`` with ``top1`` in per cent.

    Args:
        checkpoint: a :class:`Run`, a run folder, a checkpoint folder or a file of weights.
        keys: keys of ``dmjd knn``, as for :func:`pretrain`.

    Raises:
        UserError: as the command.
    """
    return _evaluate("knn", checkpoint, keys)


def linprobe(checkpoint: str | os.PathLike[str], **keys: Any) -> dict[str, Any]:
    """Linear-probing accuracy of an encoder: the record of ``dmjd linprobe``; arguments as for :func:`knn`."""
    return _evaluate("linprobe", checkpoint, keys)


def validate(checkpoint: str | os.PathLike[str], **keys: Any) -> dict[str, Any]:
    """Accuracy of a fine-tuned classifier: the record of ``dmjd validate``; arguments as for :func:`knn`."""
    return _evaluate("validate", checkpoint, keys)


def miou(checkpoint: str | os.PathLike[str], **keys: Any) -> dict[str, Any]:
    """Mean IoU of a segmentation run: the record of ``dmjd miou``; arguments as for :func:`knn`."""
    return _evaluate("miou", checkpoint, keys)


def ap(checkpoint: str | os.PathLike[str], **keys: Any) -> dict[str, Any]:
    """Box and mask AP of a detection run: the record of ``dmjd ap``; arguments as for :func:`knn`."""
    return _evaluate("ap", checkpoint, keys)


def _evaluate(name: str, checkpoint: str | os.PathLike[str], keys: dict[str, Any]) -> dict[str, Any]:
    from dmjd.encoder import own_defaults
    from dmjd.evaluate import evaluate

    # No workers: forking a process that has threads, as a notebook has, may hang.
    config = compose(name, of_checkpoint(checkpoint, {"workers": 0, **keys}))
    with own_defaults():
        return evaluate(name, config)


def _arguments(
    command: str,
    data: str | os.PathLike[str] | Mapping[str, Any] | None,
    run: str | os.PathLike[str] | None,
    recipe: Mapping[str, str | None],
    typed: Sequence[str],
    keys: dict[str, Any],
) -> list[str]:
    """The overrides of a call of :func:`pretrain`: groups first, then keys, then ``typed``. ``recipe``: a group."""
    first: dict[str, Any] = {}
    for group, option in recipe.items():
        if option is not None and not any(text.startswith(f"{group}=") for text in typed):
            first[group] = option
    known = groups_of(command).get("data", [])
    if isinstance(data, str) and data in known:
        data = {"name": data}
    section = dict(data) if isinstance(data, Mapping) else {} if data is None else {"root": data}
    if not known:  # a data set with annotations
        pass
    elif "name" in section:
        first["data"] = section.pop("name")
    elif "root" in section and first.get("experiment") != RECIPE:  # which reads a folder
        first["data"] = "folder"
    first |= {f"data.{key}": value for key, value in section.items()}
    if run is not None:
        first["run"] = run
    return [*as_overrides(first), *as_overrides(keys), *typed]


def _run_child(arguments: list[str], run: Path) -> None:
    """Run ``dmjd ARGUMENTS`` in a child process and print its output; its errors become exceptions."""
    root = str(Path(__file__).resolve().parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(parent=os.getpid(), root=root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if name not in _COLOURS},
        start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
    )
    try:
        error, interrupted = _follow(process, json.dumps(arguments))
    except BaseException:
        process.terminate()  # it saves a checkpoint
        raise
    finally:
        _wait(process)
    code = process.returncode
    if interrupted:
        raise KeyboardInterrupt
    if code == 2:
        raise UserError(error)
    if code < 0:
        raise RuntimeError(
            f"run={run}: the training process was killed by {signal.Signals(-code).name}; the same call continues from "
            "the newest checkpoint"
        )
    if code:
        kind = Diverged if RunPaths(run).read_stop_reason().get("reason") == "diverged" else RuntimeError
        raise kind(error or f"run={run}: the training process crashed; its output above has the traceback")


def _follow(process: subprocess.Popen[bytes], arguments: str) -> tuple[str, bool]:
    """Print the output of the child process until it ends; pass each KeyboardInterrupt on as SIGINT.

    Returns:
        The message of its line ``error: ...``, which is not printed, and whether it was interrupted.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(arguments.encode())
    error, interrupted, text, ended = "", False, "", False
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not ended:
            try:
                if selector.select(_POLL_SECONDS):
                    chunk = os.read(process.stdout.fileno(), 1 << 16)
                    ended = not chunk
                    text += decoder.decode(chunk, final=ended)
                else:  # a process that the child has started may keep the pipe open
                    ended = process.poll() is not None
                *lines, text = text.split("\n")
                for line in [*lines, text] if ended and text else lines:
                    if line.startswith(_ERROR):
                        error = line.removeprefix(_ERROR)
                    else:
                        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
                        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    return error, interrupted


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the child process, which ends or was asked to end."""
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
