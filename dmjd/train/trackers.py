"""Where a run's numbers and pictures go besides its folder: TensorBoard event files and a Weights & Biases run.

Both are conveniences. What is wrong before a run begins is refused; what breaks while it runs (a full disk, a network
that is gone) costs one warning and the tracker, never the run. Construct :class:`Trackers` on rank 0 alone.
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
from typing import Any, Protocol

import numpy as np
from PIL import Image

from dmjd.errors import ConfigError
from dmjd.files import replace_file
from dmjd.safe_load import parse_json

logger = logging.getLogger("dmjd")

TENSORBOARD_FOLDER = "tensorboard"
IDENTITIES = "trackers.json"


class Tracker(Protocol):
    """One place to follow a run in; any method may raise whatever its package raises."""

    def scalars(self, row: Mapping[str, float], step: int) -> None: ...

    def pictures(self, pictures: Mapping[str, Path], step: int) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """The trackers that a run asked for, none by default.

    Args:
        run_folder_path: of the run, existing. Event files go to ``tensorboard/``, W&B's files to ``wandb/``, and the id
            of the W&B run is kept in ``trackers.json``, so that a run killed and restarted stays one curve.
        tensorboard: whether to write event files.
        wandb_project: the W&B project, None for no W&B. W&B's own variables hold, such as ``WANDB_MODE=offline``.
        run_name: what W&B calls the run.
        config: what W&B shows as the run's configuration.
        resumed_step: steps that the checkpoint knows of, 0 without one; TensorBoard drops later points.

    Raises:
        ConfigError: if a package is not installed.
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
        check_packages(tensorboard=tensorboard, wandb_project=wandb_project)
        self._trackers: dict[str, Tracker] = {}
        if tensorboard:
            self._start("TensorBoard", lambda: TensorBoard(run_folder_path / TENSORBOARD_FOLDER, resumed_step))
        if wandb_project is not None:
            self._start("Weights & Biases", lambda: WeightsAndBiases(run_folder_path, wandb_project, run_name, config))

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """One row of the log, as it stands there; its ``step`` is the axis and no curve."""
        values = {name: value for name, value in row.items() if name != "step"}
        self._each(lambda tracker: tracker.scalars(values, step))

    def pictures(self, pictures: Mapping[str, Path], step: int) -> None:
        """PNG files by name, as they are after ``step`` steps."""
        self._each(lambda tracker: tracker.pictures(pictures, step))

    def close(self) -> None:
        """Write out what is held back; W&B waits for its uploads."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _start(self, name: str, make: Callable[[], Tracker]) -> None:
        # A requeued job must not die because a server does not answer, so this is no refusal.
        try:
            self._trackers[name] = make()
        except Exception as error:
            _warn(name, error)

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:
                del self._trackers[name]
                _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    reason = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    logger.warning("%s failed (%s) and is off until the run is started again; the run goes on", name, reason)


def check_packages(*, tensorboard: bool, wandb_project: str | None) -> None:
    """Refuse trackers whose package is not installed; touches nothing, so it can come before any work.

    Raises:
        ConfigError: with the line that installs the package.
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
        # Earlier W&B runs leave a folder of that name in the working directory, which imports as an empty package.
        raise ImportError("only a folder named wandb was found")
    return module


class TensorBoard:
    """Event files in ``folder``, one a launch.

    Points after ``resumed_step`` that an earlier launch wrote are purged: the steps are done again, and would else be
    drawn twice. ``purge_step`` is the first step to go, and the row of the checkpoint's own step stays in the log.
    """

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self._writer = _tensorboard().SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def scalars(self, row: Mapping[str, float], step: int) -> None:
        """One point a column."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        # As in RunLog: what a checkpoint counts as logged is not lost with the process.
        self._writer.flush()

    def pictures(self, pictures: Mapping[str, Path], step: int) -> None:
        """Each below ``pictures/``."""
        for name, path in pictures.items():
            with Image.open(path) as picture:
                self._writer.add_image(f"pictures/{name}", np.asarray(picture.convert("RGB")), step, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run of one id for the life of the run folder.

    W&B's own step cannot go back (wandb#4482), and after a restart ours does. So ``step`` is logged as a column, and
    every curve is drawn over it: steps done twice give the same point twice instead of being thrown away.
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
        """One row of the history."""
        self._run.log({**row, "step": step})

    def pictures(self, pictures: Mapping[str, Path], step: int) -> None:
        """Each below ``pictures/``."""
        images = {f"pictures/{name}": self._wandb.Image(str(path)) for name, path in pictures.items()}
        self._run.log({**images, "step": step})

    def close(self) -> None:
        self._run.finish()


def _kept_id(path: Path) -> str:
    """The id in ``path``; a new one is kept there before W&B hears of it, so that no crash can part the two."""
    if path.is_file():
        try:
            kept = parse_json(path.read_bytes())["wandb_id"]
        except (ValueError, LookupError, TypeError):
            kept = None
        if isinstance(kept, str) and re.fullmatch(r"[0-9a-z]{1,64}", kept):
            return kept
        raise ValueError(f"{path} holds no wandb_id; remove it to begin another curve")
    # Not from the random module: its state belongs to whoever seeded it.
    identity = secrets.token_hex(8)
    replace_file(path, json.dumps({"wandb_id": identity}))
    return identity
