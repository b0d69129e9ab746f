"""Scores of runs, and when a run had them. They compare only under equal evaluation, weights and settings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from dmjd.evaluate import EVALUATIONS, Column
from dmjd.evaluate.registry import SEEN, SEEN_WITH_LABELS, seen_notes
from dmjd.report.format import look_up, plain
from dmjd.report.run import Record, Run, columns_of
from dmjd.report.trainings import TRAININGS

_ONLINE_SETTINGS = {
    **{key: ("online_knn", key) for key in ("pooling", "neighbours", "temperature", "train_images")},
    "data": ("data", "name"),
    **{key: ("data", key) for key in ("root", "image_size", "crop_pct", "mean", "std", "val_percent", "val_seed")},
}
"""Setting of an online score -> its key in the configuration; it is measured on the run's own data."""

_REPEATS = ("seed", "run", "init_step")
"""Settings in which measurements of one quantity differ: the seed, and of a fine-tuning its folder and the step of the
checkpoint that it began from."""

DIGEST = "config"
"""Setting of a fine-tuning: a digest of its configuration."""

AVERAGE = "val_ema_"
"""Beginning of the columns of validations of the moving average."""

ABOUT_TRAINING = ("trained_size", "trained_mean", "trained_std", SEEN, SEEN_WITH_LABELS)
"""Settings that :func:`unlike_training` describes."""


class Point(NamedTuple):
    """A score, and the wall seconds and epochs until then; None where the log does not have them."""

    score: float
    seconds: float | None
    epoch: float | None = None


@dataclass(frozen=True)
class Metric:
    """One column of a comparison: a score of an evaluation under fixed conditions.

    settings: as JSON with sorted keys, so that metrics are hashable; without the seed.
    online: measured during training, not on a finished checkpoint.
    """

    evaluation: str
    score: str
    weights: str
    settings: str
    online: bool = False

    @property
    def column(self) -> Column:
        return columns_of(self.evaluation)[self.score]

    @property
    def title(self) -> str:
        """Short name; the same for metrics that differ in their settings only."""
        return self.column.title + " online" * self.online + " EMA" * (self.weights == "ema")

    @property
    def heading(self) -> str:
        """Head of its column: the title with the unit, unless that is per cent."""
        return self.title if self.column.unit in ("%", "") else f"{self.title}, {self.column.unit}"

    @property
    def description(self) -> str:
        """Full name, unit, direction and all conditions, as one sentence."""
        column = self.column
        settings = ", ".join(f"{key} {plain(value)}" for key, value in json.loads(self.settings).items())
        parts = [f"{column.meaning} in {column.unit}" if column.unit else column.meaning]
        parts += [] if column.higher_is_better else ["lower is better"]
        parts += ["best while training" if self.online else "of the latest checkpoint that was evaluated"]
        parts += ["moving average of the weights"] if self.weights == "ema" else []
        return f"{', '.join(parts)}{f' ({settings})' if settings else ''}."

    def best(self, values: Iterable[float]) -> float | None:
        """The best of ``values``; None if there are none."""
        return (max if self.column.higher_is_better else min)(values, default=None)

    def first_reach(self, curve: Sequence[Point], target: float) -> Point | None:
        """The earliest point that is as good as ``target``; None if there is none."""
        return next((point for point in curve if self.best((point.score, target)) == point.score), None)

    def differing(self, others: Sequence[Metric]) -> str:
        """The settings in which ``others`` are not all equal: "k 20, pooling mean"; the digest of a fine-tuning's
        configuration only if they are equal in all others."""
        every = [json.loads(metric.settings) for metric in others]
        mine = json.loads(self.settings)
        keys = [key for key in mine if any(other.get(key) != mine[key] for other in every)]
        alike = [other for other in every if all(other.get(key) == mine[key] for key in keys if key != DIGEST)]
        if len({other.get(DIGEST) for other in alike}) == 1:
            keys = [key for key in keys if key != DIGEST]
        return ", ".join(f"{key} {plain(mine[key])}" for key in keys)


def metrics(runs: Sequence[Run]) -> list[Metric]:
    """Every metric that some run has: online curves first, then the evaluations as registered, then unknown ones."""
    found = dict.fromkeys(metric for run in runs for metric in _metrics_of(run))
    known = [*EVALUATIONS, *TRAININGS]

    def order(metric: Metric) -> tuple[Any, ...]:
        rank = known.index(metric.evaluation) if metric.evaluation in known else len(known)
        score = list(columns_of(metric.evaluation)).index(metric.score)
        return not metric.online, rank, metric.evaluation, score, metric.weights != "trained", metric.settings

    return sorted(found, key=order)


def points(run: Run, metric: Metric) -> list[Point]:
    """The scores of ``run`` in the order of its steps: a whole curve online, else only the latest evaluation, of which
    repeats with several seeds are averaged."""
    if metric.online:
        rows = online_rows(run) if metric in _metrics_of(run) else []
        return [Point(row[online_key(run)], run.seconds_at(row["step"]), row.get("epoch")) for row in rows]
    latest = latest_of(run, metric)
    if not latest:
        return []
    # Steps of a training are not those of the run that it began from.
    elsewhere = metric.evaluation in TRAININGS and "run" in latest[0].settings and run.training is None
    seconds = run.last("seconds") if elsewhere else run.seconds_at(latest[0].step)
    return [Point(mean(record.scores[metric.score] for record in latest), seconds)]


def latest_of(run: Run, metric: Metric) -> list[Record]:
    """The records of ``metric`` at the latest step that was evaluated: one for each seed, the last by its file's name.

    The step of a fine-tuning is that of the checkpoint that it began from, then its own.
    """

    def step(record: Record) -> tuple[int, int]:
        began = record.settings.get("init_step")
        return began if isinstance(began, int) else 0, record.step

    records = records_of(run, metric)
    latest = max(map(step, records), default=None)
    return [*{plain(record.settings.get("seed")): record for record in records if step(record) == latest}.values()]


def repeats_of(runs: Sequence[Run], metric: Metric) -> list[tuple[Run, Record]]:
    """:func:`latest_of` all ``runs``, which differ in their seeds only: one record for each combination of the seeds of
    pre-training, run and evaluation, since equal seeds give equal scores."""
    found: dict[tuple[str, ...], tuple[Run, Record]] = {}
    for run in runs:
        seeds = [plain(each.config.get("seed")) for each in (run, run.origin) if each]
        for record in latest_of(run, metric):
            found.setdefault((*seeds, plain(record.settings.get("seed"))), (run, record))
    return [*found.values()]


def unlike_training(run: Run, record: Record) -> str:
    """Image size and normalisation of ``record`` that differ from pre-training's, and test images that it saw."""
    pretrained = run.config.get("data")
    size = look_up(pretrained, ("image_size",))
    trained = "x".join(map(str, size)) if isinstance(size, list) else plain(size)
    source, _, measured = str(record.settings.get("data", "")).rpartition(", ")
    differing = []
    if source and size is not None and measured != trained:
        differing.append(f"images of {measured} pixels, pre-trained on {trained}")
    for key in ("mean", "std"):
        here, there = record.settings.get(key), look_up(pretrained, (key,))
        if here is not None and there is not None and here != there:
            differing.append(f"{key} {plain(here)}, pre-trained with {plain(there)}")
    parts = [f"unlike pre-training: {'; '.join(differing)}"] if differing else []
    return "; ".join([*parts, *seen_notes(record.settings)])


def online_references(run: Run) -> dict[str, float]:
    """Scores that the online kNN compares with: untrained, majority and chance, from the records of evaluations.

    Untrained weights count if they were scored under the settings of the online score, chance and majority if on the
    same images.
    """
    found: dict[str, float] = {}
    settings = json.loads(_online_settings(run))
    for record in run.evaluations:
        if not _of_own_images(record, settings):
            continue
        found |= {name: record.references[name] for name in ("majority", "chance") if name in record.references}
        untrained = record.untrained("top1")
        if record.evaluation == "knn" and untrained is not None and _as_online(record.settings, settings):
            found["untrained"] = untrained
    return {name: found[name] for name in ("untrained", "majority", "chance") if name in found}


def references(run: Run, metric: Metric) -> dict[str, float]:
    """Untrained, majority and chance scores beside ``metric``, as far as ``run`` has them."""
    if metric.online:
        return online_references(run) if metric in _metrics_of(run) else {}
    records = records_of(run, metric)
    found: dict[str, float] = {}
    for record in records:
        if metric.score == record.main_score:
            found |= record.references
    for record in run.evaluations:
        alike = (record.evaluation, _settings(record)) == (metric.evaluation, metric.settings)
        if records and alike and record.weights == "untrained" and metric.score in record.scores:
            found["untrained"] = record.scores[metric.score]
    return found


def _settings(record: Record) -> str:
    """The conditions of a record: settings without those of repeats, and without those that earlier records lack."""
    kept = {key: value for key, value in record.settings.items() if key not in _REPEATS and value is not None}
    return json.dumps(kept, sort_keys=True)


def _of_own_images(record: Record, online: dict[str, Any]) -> bool:
    """Whether ``record`` measured the images of the online score: data set, folder, held-out part and size."""
    source = str(record.settings.get("data"))
    name = str(online.get("data")) + (f" in {online['root']}" if "root" in online else "")
    size = f", {'x'.join(map(str, online.get('image_size', [])))}"
    if "val_percent" not in online:
        return source == name + size
    return source.startswith(f"{name}, {online['val_percent']:g} % held out") and source.endswith(size)


def _as_online(record: dict[str, Any], online: dict[str, Any]) -> bool:
    """Whether the settings of a kNN record are those of the online score, whose bank may be smaller than its limit."""
    same = ("pooling", "temperature", "crop_pct", "mean", "std")
    images, limit = record.get("train_images"), online.get("train_images", math.inf)
    if not all(record.get(key) == online.get(key) for key in same):
        return False
    return online.get("neighbours") in (None, record.get("k")) and isinstance(images, int) and images <= limit


def records_of(run: Run, metric: Metric) -> list[Record]:
    """The evaluations of ``run`` that hold ``metric``; none for an online one."""
    return [] if metric.online else [record for record in run.evaluations if metric in _metrics(record)]


def _metrics_of(run: Run) -> list[Metric]:
    evaluation = "knn" if run.training is None else str(run.config["command"])
    score = "top1" if run.training is None else run.training.main
    weights = "ema" if online_key(run).startswith(AVERAGE) else "trained"
    online = [Metric(evaluation, score, weights, _online_settings(run), online=True)] if online_rows(run) else []
    return online + [metric for record in run.evaluations for metric in _metrics(record)]


def _metrics(record: Record) -> list[Metric]:
    if record.weights == "untrained":
        return []
    return [Metric(record.evaluation, score, record.weights, _settings(record)) for score in record.scores]


def _online_settings(run: Run) -> str:
    values = {key: look_up(run.config, place) for key, place in _ONLINE_SETTINGS.items()}  # no kNN in fine-tuning
    if not values["val_percent"]:  # no split: as runs of before there was one
        values |= {"val_percent": None, "val_seed": None}
    return json.dumps({key: value for key, value in values.items() if value is not None}, sort_keys=True)


def online_rows(run: Run) -> list[dict[str, Any]]:
    """Rows of log.jsonl with a score."""
    key = online_key(run)
    return [row for row in run.rows if row.get(key) is not None and math.isfinite(row[key])]


def online_key(run: Run) -> str:
    """The column of log.jsonl that follows the training: the online kNN; of trainings from an encoder the main score of
    the validations, of the moving average where there is one."""
    if run.training is None:
        return "knn_top1"
    average = AVERAGE + run.training.main
    return average if run.last(average) is not None else f"val_{run.training.main}"
