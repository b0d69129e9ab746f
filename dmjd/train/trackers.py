"""Trackers of a run: TensorBoard event files and a Weights & Biases run.

A package that is not installed is an error before the run begins. A failure during the run (a full disk, no network)
logs one warning and turns the tracker off; it never ends the run. Construct :class:`Trackers` on rank 0 alone.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from dmjd.errors import ConfigError
from dmjd.files import replace_file
from dmjd.safe_load import parse_json

logger = logging.getLogger("dmjd")

TENSORBOARD_FOLDER = "tensorboard"
IDENTITIES = "trackers.json"


class Trackers:
    """The trackers of a run, none by default; :func:`check_packages` comes first.

    Args:
        run_folder_path: an existing folder. Event files are written to ``tensorboard/``, W&B's files to ``wandb/``, and
            the id of the W&B run to ``trackers.json``, so that a resumed run continues the same curve.
        tensorboard: whether to write event files.
        wandb_project: the W&B project; None for no W&B. W&B's environment variables, such as ``WANDB_MODE=offline``,
            apply.
        run_name: the name of the W&B run.
        config: the configuration of the W&B run.
        resumed_step: the step of the checkpoint, 0 without one; TensorBoard removes later points.
    """

    def __init__(
        self,
        run_folder_path: Path,
        *,
        tensorboard: bool,
        wandb_project: str | None,
        run_name: str,
        config: dict[str, Any],
        resumed_step: int,
    ) -> None:
        self._trackers: dict[str, TensorBoard | WeightsAndBiases] = {}
        if tensorboard:
            self._start("TensorBoard", lambda: TensorBoard(run_folder_path / TENSORBOARD_FOLDER, resumed_step))
        if wandb_project is not None:
            self._start("Weights & Biases", lambda: WeightsAndBiases(run_folder_path, wandb_project, run_name, config))

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Log one row of the log; its ``step`` is the x axis."""
        values = {name: value for name, value in row.items() if name != "step"}
        self._each(lambda tracker: tracker.scalars(values, step))

    def pictures(self, pictures: Mapping[str, Path], step: int) -> None:
        """Log PNG files by name after ``step`` steps."""
        self._each(lambda tracker: tracker.pictures(pictures, step))

    def close(self) -> None:
        """Flush and close; W&B waits for its uploads."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _start(self, name: str, make: Callable[[], TensorBoard | WeightsAndBiases]) -> None:
        # Not an error of the run: a requeued job must not end because a server does not answer.
        try:
            self._trackers[name] = make()
        except Exception as error:
            _warn(name, error)

    def _each(self, act: Callable[[TensorBoard | WeightsAndBiases], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                del self._trackers[name]
                _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    reason = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    logger.warning("%s failed (%s) and is off until the run is started again; the run continues", name, reason)


def check_packages(*, tensorboard: bool, wandb_project: str | None) -> None:
    """Check that the packages of the trackers are installed; writes nothing.

    Raises:
        ConfigError: with the command that installs the package.
    """
    for wanted, key, module, extra in (
        (tensorboard, "tensorboard=true", _tensorboard, "train"),
        (wandb_project is not None, f"wandb={wandb_project}", _wandb, "wandb"),
    ):
        if not wanted:
            continue
        try:
            module()
        except ImportError as error:
            raise ConfigError(
                f"{key} needs the package {key.partition('=')[0]}, which cannot be imported ({error}); "
                f"pip install 'dmjd[{extra}]'"
            ) from error


def _tensorboard() -> ModuleType:
    return importlib.import_module("torch.utils.tensorboard")


def _wandb() -> ModuleType:
    module = importlib.import_module("wandb")
    if not hasattr(module, "init"):
        # The folder wandb/ of an earlier W&B run in the working directory imports as an empty package.
        raise ImportError("only a folder named wandb was found")
    return module


class TensorBoard:
    """Event files in ``folder``, one per launch.

    Points after ``resumed_step`` from an earlier launch are purged, since these steps are repeated. ``purge_step`` is
    the first step to purge; the row of the checkpoint's own step stays.
    """

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self._writer = _tensorboard().SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """One point per column."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        # As in RunLog: rows that a checkpoint counts as logged must not be lost with the process.
        self._writer.flush()

    def pictures(self, pictures: Mapping[str, Path], step: int) -> None:
        """Images named ``pictures/NAME``."""
        for name, path in pictures.items():
            with Image.open(path) as picture:
                self._writer.add_image(f"pictures/{name}", np.asarray(picture.convert("RGB")), step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run with one id for the life of the run folder.

    W&B's own step cannot decrease (wandb#4482), and that of a resumed run does. So ``step`` is logged as a column and
    is the x axis of every curve: repeated steps log the same point twice and are not dropped.
    """

    def __init__(self, run_folder_path: Path, project: str, run_name: str, config: dict[str, Any]) -> None:
        self._wandb = _wandb()
        self._run = self._wandb.init(
            project=project,
            name=run_name,
            id=_kept_id(run_folder_path / IDENTITIES),
            resume="allow",
            dir=str(run_folder_path),
            config=config,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """Log one row of the history."""
        self._run.log({**row, "step": step})

    def pictures(self, pictures: Mapping[str, Path], step: int) -> None:
        """Images named ``pictures/NAME``."""
        images = {f"pictures/{name}": self._wandb.Image(str(path)) for name, path in pictures.items()}
        self._run.log({**images, "step": step})

    def close(self) -> None:
        self._run.finish()


def _kept_id(path: Path) -> str:
    """The id in ``path``; a new one is written before W&B gets it, so that a crash cannot separate the two."""
    if path.is_file():
        try:
            kept = parse_json(path.read_bytes())["wandb_id"]
        except (ValueError, LookupError, TypeError):
            kept = None
        if isinstance(kept, str) and re.fullmatch(r"[0-9a-z]{1,64}", kept):
            return kept
        raise ValueError(f"{path} holds no wandb_id; remove it to start a new W&B run")
    # Not from the random module, whose state is saved in checkpoints.
    identity = secrets.token_hex(8)
    replace_file(path, json.dumps({"wandb_id": identity}))
    return identity
