"""The registry of evaluations: one record each. Commands, help, Slurm jobs and reports read it; it imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from dmjd.config import SCHEMAS, DenseDataConfig, EvaluationConfig
from dmjd.errors import ConfigError, DataError, NoSplit
from dmjd.files import obstacle, standing_place
from dmjd.runs.paths import RunPaths

if TYPE_CHECKING:
    from dmjd.data.dataset import ImageDataset, Split
    from dmjd.evaluate.encoder import FrozenEncoder

Config = TypeVar("Config", bound=EvaluationConfig)


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
    """values: score -> number or None; those without a column are kept in the file only, among them ``chosen`` (setting
    -> the value that the training images chose), ``SCORE_best_on_test`` (the highest of all choices, which the test
    images chose) and ``table``. settings: the conditions under which they were measured, as JSON; scores are compared
    under equal settings only."""

    values: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Context(Generic[Config]):
    """An evaluation's configuration and the frozen encoder that it evaluates.

    opened: data sets opened so far. few_shot: settings of the few-shot subset of the training images, if it is one.
    """

    config: Config
    frozen: FrozenEncoder
    needs: str
    opened: dict[tuple[Split, int | None], ImageDataset] = field(default_factory=dict)
    few_shot: dict[str, Any] = field(default_factory=dict)

    def dataset(self, split: Split, count: int | None = None) -> ImageDataset:
        """The images of ``split``; of "train" those of ``few_shot`` or ``labels``, and of these at most ``count``.

        Raises:
            DataError: if they lack what is needed, or their labels are out of range; as
                :func:`~dmjd.data.few_shot.few_shot_subset`.
        """
        if self.needs == "labels" and isinstance(self.frozen.data, DenseDataConfig):
            raise DataError(
                f"{self.frozen.source}: the images have annotations, and no label of a whole image; name labelled ones "
                "with data=folder data.root=DIR"
            )
        if (split, count) not in self.opened:
            self.opened[split, count] = self._open(split, count)
        dataset = self.opened[split, count]
        if self.needs == "labels":
            from dmjd.data.build import check_labels

            check_labels(dataset, f"{self.frozen.source}: the {'training' if split == 'train' else split} images")
        return dataset

    def _open(self, split: Split, count: int | None) -> ImageDataset:
        percent, names = self.config.few_shot, self.config.labels
        selects = split == "train" and (percent is not None or names is not None)
        try:
            dataset = self.frozen.dataset(split, None if selects else count)
        except NoSplit as error:
            if self.frozen.data.name != "folder":
                raise
            raise DataError(
                f"{error}. The encoder was trained on all images of this folder; for a score on unseen images, set "
                "data.val_percent=10 in pre-training"
            ) from error
        if selects:
            from dmjd.data.dataset import EvenSubset
            from dmjd.data.few_shot import few_shot_settings, few_shot_subset

            dataset = few_shot_subset(dataset, percent, names)
            self.few_shot.update(few_shot_settings(dataset, percent, names))
            dataset = dataset if count is None else EvenSubset(dataset, count)
        return dataset

    def image_settings(self) -> dict[str, Any]:
        """Settings of the images: data set, size, crop, mean, std and few-shot subset."""
        data = self.frozen.data
        settings = {"data": self.frozen.source, "crop_pct": data.crop_pct, "mean": data.mean, "std": data.std}
        return settings | self.few_shot | self.frozen.differs


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a frozen encoder: ``dmjd NAME checkpoint=RUN``.

    name: the command; evaluations/NAME-*.json hold its scores and configs/NAME.yaml the defaults of its configuration.
    summary: its line in ``dmjd --help``.
    config: a dataclass derived from :class:`~dmjd.config.EvaluationConfig`.
    run: measures the scores; its module imports torch inside this function.
    columns: score -> column of the report, the main score first.
    needs: "labels" if the images must have labels.
    script: launchers/slurm/SCRIPT.sbatch is its batch script; it gets the command and its arguments.
    shown: settings that its lines name.
    """

    name: str
    summary: str
    config: type
    run: Callable[[Context[Any]], Scores]
    columns: Mapping[str, Column]
    needs: Literal["labels", "none"] = "labels"
    script: str = "evaluate"
    shown: tuple[str, ...] = ()


def references(train: ImageDataset, test: ImageDataset) -> dict[str, float | None]:
    """Values of a classification's record beside its accuracy: ``chance``, the accuracy of a uniform guess,
    ``majority``, that of always the most frequent class of ``train``, both in per cent, and ``test_images``."""
    counts = Counter(train.label(index) for index in range(len(train)))
    frequent = max(sorted(counts), key=counts.__getitem__)
    hits = sum(test.label(index) == frequent for index in range(len(test)))
    return {"chance": 100 / train.num_classes, "majority": 100 * hits / len(test), "test_images": len(test)}


SEEN, SEEN_WITH_LABELS = "seen_in_pretraining", "seen_in_finetuning"
"""Settings that are true if test images were training images."""


def seen_notes(settings: Mapping[str, Any]) -> list[str]:
    """Texts for the settings :data:`SEEN` and :data:`SEEN_WITH_LABELS`."""
    notes = ["the test images were part of pre-training"] * bool(settings.get(SEEN))
    return notes + ["fine-tuning used some of the test images with their labels"] * bool(settings.get(SEEN_WITH_LABELS))


BASELINES = ("untrained", "majority", "chance")
"""Values of a record that are shown beside its main score, in its unit."""
CHEAP = 5e12
"""Multiply-adds: 300 images of 224 x 224 through a ViT-B, a minute on two CPU cores."""
EVALUATIONS: dict[str, Evaluation] = {}
"""Name -> evaluation, in the order of a comparison's columns."""


def register(evaluation: Evaluation) -> None:
    """Add an evaluation: its command with help and configuration, its Slurm job and its columns in reports."""
    EVALUATIONS[evaluation.name] = evaluation
    SCHEMAS[evaluation.name] = evaluation.config


def evaluate(name: str, config: Any) -> dict[str, Any]:
    """Run the evaluation ``name`` and write its record to RUN/evaluations/NAME-WEIGHTS-step########-DIGEST.json.

    Returns:
        The record: ``verb`` (the name), ``weights``, ``step``, the scores, ``untrained`` if it was measured (the main
        score of the initial weights), and ``settings``, of which DIGEST is a hash: scores under other settings do not
        overwrite each other.

    Raises:
        CheckpointError, ConfigError: as :func:`~dmjd.evaluate.encoder.load_encoder`.
        ConfigError: if the output folder cannot be written to; before anything is computed.
        DataError: if the images lack what the evaluation needs.
    """
    from dmjd.evaluate.encoder import load_encoder

    evaluation, frozen = EVALUATIONS[name], load_encoder(config)
    folder = frozen.run if config.output is None else RunPaths(Path(config.output))
    check_writable(folder)
    initial = load_encoder(replace(config, weights="untrained")) if config.untrained else None
    context = Context(config, frozen, evaluation.needs)
    values, settings = evaluation.run(context)
    if config.untrained is None and _has_cheap_baseline(frozen, config.weights, values, settings):
        initial = load_encoder(replace(config, weights="untrained"))
    if initial is not None:
        main = next(iter(evaluation.columns))
        values["untrained"] = evaluation.run(replace(context, frozen=initial)).values[main]
    if frozen.path.is_file():
        settings |= {"checkpoint": frozen.path.name}
    record = {"verb": name, "weights": frozen.weights, "step": frozen.step, **values, "settings": settings}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    folder.write_evaluation(f"{name}-{frozen.weights}-step{frozen.step:08d}-{digest}", record)
    return record


def describe(record: Mapping[str, Any]) -> list[str]:
    """One line per score of an evaluation's record: the score, its baselines, and the conditions."""
    name, settings, lines = record["verb"], record["settings"], []
    for score, column in EVALUATIONS[name].columns.items():
        value = "-" if record[score] is None else f"{column.format(record[score])} {column.unit}".rstrip()
        beside = {"balanced": record.get(f"balanced_{score}"), **{key: record.get(key) for key in BASELINES}}
        beside["best on the test images"] = record.get(f"{score}_best_on_test")
        if column.format(beside["balanced"] or 0) == column.format(record[score] or 0):  # classes of equal size
            del beside["balanced"]
        shown = [f"{key} {column.format(number)}" for key, number in beside.items() if number is not None]
        conditions = [
            record["weights"],
            *[f"step {record['step']}"] * ("checkpoint" not in settings),
        ]  # unknown of a file
        conditions += [f"protocol {settings['protocol']}"] if "protocol" in settings else []
        conditions += [f"{key.replace('_', ' ')} {value:g}" for key, value in record.get("chosen", {}).items()]
        conditions += filter(None, [settings.get("selection"), settings.get("data")])
        if few := settings.get("few_shot"):
            conditions += ["a list of labels" if few == "list" else f"{few:g} % of the labels"]
        conditions += [f"{key.replace('_', ' ')} {settings[key]}" for key in settings if key.startswith("trained_")]
        conditions += [_condition(key, settings[key]) for key in EVALUATIONS[name].shown if settings.get(key)]
        conditions += seen_notes(settings)
        parts = [", ".join(part) for part in (shown, conditions) if part]
        lines.append(f"{name}: {column.meaning} {value}  ({'; '.join(parts)})")
    return lines


def _condition(key: str, value: Any) -> str:
    """ "flip", "mode slide", "scales 0.5,1": as on the command line."""
    shown = ",".join(f"{each:g}" for each in value) if isinstance(value, list) else f"{value}"
    return key.replace("_", " ") + f" {shown}" * (value is not True)


def _has_cheap_baseline(
    frozen: FrozenEncoder, weights: str, values: Mapping[str, Any], settings: Mapping[str, Any]
) -> bool:
    """Whether the untrained encoder is evaluated by default: that of a run with random initial weights, whose images
    are encoded once, for at most :data:`CHEAP` multiply-adds."""
    if weights == "untrained" or frozen.path.is_file() or frozen.trained.init is not None or settings.get("augment"):
        return False
    train, test = settings.get("train_images"), values.get("test_images")
    return train is not None and test is not None and frozen.cost(train + test) <= CHEAP


def check_writable(folder: RunPaths) -> None:
    """Raise ConfigError unless a score can be written into ``folder``."""
    if what := obstacle(folder.evaluations, folder=True):
        raise ConfigError(
            f"{folder.evaluations} is {what}, where scores need a folder; move it away, or name a folder for the score "
            "with output=FOLDER"
        )
    standing = standing_place(folder.path)
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise ConfigError(f"{standing} cannot be written to; name a folder for the score with output=FOLDER")
