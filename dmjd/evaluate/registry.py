"""The registry of evaluations: one record each. Commands, help, Slurm jobs and reports read it; it imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from dmjd.config import SCHEMAS
from dmjd.errors import ConfigError, DataError
from dmjd.files import obstacle, standing_place
from dmjd.runs.paths import RunPaths

if TYPE_CHECKING:
    from dmjd.data.dataset import ImageDataset, Split
    from dmjd.evaluate.encoder import FrozenEncoder

Config = TypeVar("Config")


@dataclass(frozen=True)
class Column:
    """One score of an evaluation as reports show it.

    title: head of its column in a comparison: "Lin.".
    meaning: its full name: "linear-probing top-1".
    unit: "%", "ms", or "" for a plain number.
    """

    title: str
    meaning: str
    unit: str = "%"
    higher_is_better: bool = True

    def format(self, value: float, sign: str = "") -> str:
        """``value`` without its unit: two decimals in per cent, else four digits. ``sign="+"`` for a difference."""
        return f"{value:{sign}{'.2f' if self.unit == '%' else '.4g' if abs(value) < 1e4 else '.0f'}}"


class Scores(NamedTuple):
    """values: score -> number; those without a column are kept in the file only. settings: the conditions under which
    they were measured, as JSON; scores are compared under equal settings only."""

    values: dict[str, float | None]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Context(Generic[Config]):
    """An evaluation's configuration and the frozen encoder that it evaluates."""

    config: Config
    frozen: FrozenEncoder
    needs: str

    def dataset(self, split: Split, count: int | None = None) -> ImageDataset:
        """The images of ``split``, or ``count`` of them. Raises DataError if they lack what is needed."""
        dataset = self.frozen.dataset(split, count)
        if self.needs not in ("none", *["labels"] * bool(dataset.num_classes)):
            cure = "put them into class folders" if self.needs == "labels" else "data sets have labels at most"
            raise DataError(f"{self.frozen.source}: the {split} images have no {self.needs}; {cure}")
        if self.needs == "labels" and dataset.num_classes < 2:
            raise DataError(
                f"{self.frozen.source}: the images have one class, and a score needs two or more; put the images of "
                "each class into a folder of its own"
            )
        return dataset

    def image_settings(self) -> dict[str, Any]:
        """Settings of the images: data set, size, crop, mean and std."""
        data = self.frozen.data
        return {"data": self.frozen.source, "crop_pct": data.crop_pct, "mean": data.mean, "std": data.std}


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a frozen encoder: ``dmjd NAME checkpoint=RUN``.

    name: the command; evaluations/NAME-*.json hold its scores and configs/NAME.yaml the defaults of its configuration.
    summary: its line in ``dmjd --help``.
    config: a dataclass derived from :class:`~dmjd.config.EvaluationConfig`.
    run: measures the scores; its module imports torch inside this function.
    columns: score -> column of the report, the main score first.
    needs: annotations that the images must have.
    script: launchers/slurm/SCRIPT.sbatch is its batch script; it gets the command and its arguments.
    """

    name: str
    summary: str
    config: type
    run: Callable[[Context[Any]], Scores]
    columns: Mapping[str, Column]
    needs: Literal["labels", "masks", "boxes", "none"] = "labels"
    script: str = "evaluate"


EVALUATIONS: dict[str, Evaluation] = {}
"""Name -> evaluation, in the order of a comparison's columns."""


def register(evaluation: Evaluation) -> None:
    """Add an evaluation: its command with help and configuration, its Slurm job and its columns in reports."""
    EVALUATIONS[evaluation.name] = evaluation
    SCHEMAS[evaluation.name] = evaluation.config


def evaluate(name: str, config: Any) -> dict[str, Any]:
    """Run the evaluation ``name`` and write its record to RUN/evaluations/NAME-WEIGHTS-step########-DIGEST.json.

    Returns:
        The record: ``verb`` (the name), ``weights``, ``step``, the scores, and ``settings``, of which DIGEST is a hash:
        scores under other settings do not overwrite each other.

    Raises:
        CheckpointError, ConfigError: as :func:`~dmjd.evaluate.encoder.load_encoder`.
        ConfigError: if the output folder cannot be written to; before anything is computed.
        DataError: if the images lack what the evaluation needs.
    """
    from dmjd.evaluate.encoder import load_encoder

    evaluation, frozen = EVALUATIONS[name], load_encoder(config)
    folder = frozen.run if config.output is None else RunPaths(Path(config.output))
    _check_writable(folder)
    values, settings = evaluation.run(Context(config, frozen, evaluation.needs))
    if frozen.path.is_file():
        settings |= {"checkpoint": frozen.path.name}
    record = {"verb": name, "weights": config.weights, "step": frozen.step, **values, "settings": settings}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    folder.write_evaluation(f"{name}-{config.weights}-step{frozen.step:08d}-{digest}", record)
    return record


def _check_writable(folder: RunPaths) -> None:
    if what := obstacle(folder.evaluations, folder=True):
        raise ConfigError(
            f"{folder.evaluations} is {what}, where scores need a folder; move it away, or name a folder for the score "
            "with output=FOLDER"
        )
    standing = standing_place(folder.path)
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise ConfigError(f"{standing} cannot be written to; name a folder for the score with output=FOLDER")
