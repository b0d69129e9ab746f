"""Which scores the runs have, and when a run had them. Scores compare only under equal verb, weights and settings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dmjd.report.run import Evaluation, Run
from dmjd.report.words import look_up, plain

_TITLES = {"knn": "kNN", "linprobe": "Lin.", "finetune": "Ft."}
"""Verb -> column title, in the order of the columns; ``Ft.`` is the paper's."""
_FULL = {"knn": "k-nearest-neighbour", "linprobe": "linear-probing", "finetune": "fine-tuning"}
_ONLINE_SETTINGS = {
    **{key: ("online_knn", key) for key in ("pooling", "neighbours", "temperature", "train_images")},
    "data": ("data", "name"),
    **{key: ("data", key) for key in ("root", "image_size", "crop_pct", "mean", "std")},
}
"""Where the configuration says what an online score depends on; it is taken on the run's own data."""


class Point(NamedTuple):
    """A score in per cent, and the wall seconds and epochs that it took; None where the log does not say."""

    score: float
    seconds: float | None
    epoch: float | None = None


@dataclass(frozen=True)
class Metric:
    """One way to judge a run. ``online`` scores are taken while it trains, the others of a finished checkpoint.

    settings: as JSON with sorted keys, so that metrics can be compared and counted.
    """

    verb: str
    weights: str
    settings: str
    online: bool = False

    @property
    def title(self) -> str:
        """Column title; it does not tell metrics apart that differ in their settings only."""
        name = _TITLES.get(self.verb, self.verb)
        return name + (" online" if self.online else "") + (" EMA" if self.weights == "ema" else "")

    @property
    def description(self) -> str:
        """All that it depends on, as a sentence."""
        settings = ", ".join(f"{key} {plain(value)}" for key, value in json.loads(self.settings).items())
        which = "best while training" if self.online else "of the latest checkpoint that was evaluated"
        average = ", moving average of the weights" if self.weights == "ema" else ""
        return f"{_FULL.get(self.verb, self.verb)} top-1 in %, {which}{average}{f' ({settings})' if settings else ''}."

    def differing(self, others: Sequence[Metric]) -> str:
        """The settings in which ``others`` are not all equal, as words."""
        every = [json.loads(metric.settings) for metric in others]
        mine = json.loads(self.settings)
        keys = [key for key in mine if any(other.get(key) != mine[key] for other in every)]
        return ", ".join(f"{key} {plain(mine[key])}" for key in keys)


def metrics(runs: Sequence[Run]) -> list[Metric]:
    """Every metric that some run has: online curves first, then the verbs in the paper's order."""
    found = dict.fromkeys(metric for run in runs for metric in _metrics_of(run))
    known = list(_TITLES)

    def order(metric: Metric) -> tuple[Any, ...]:
        rank = known.index(metric.verb) if metric.verb in known else len(known)
        return not metric.online, rank, metric.verb, metric.weights != "trained", metric.settings

    return sorted(found, key=order)


def points(run: Run, metric: Metric) -> list[Point]:
    """The scores of ``run`` in the order of its steps: a whole curve online, else only the latest evaluation."""
    if metric not in _metrics_of(run):
        return []
    if metric.online:
        rows = _online_rows(run)
        return [Point(row["knn_top1"], run.seconds_at(row["step"]), row.get("epoch")) for row in rows]
    judged = [each for each in run.evaluations if _metric(each) == metric]
    final = max(judged, key=lambda each: each.step)
    return [Point(final.top1, run.seconds_at(final.step))]


def _metrics_of(run: Run) -> list[Metric]:
    online = [Metric("knn", "trained", _online_settings(run), online=True)] if _online_rows(run) else []
    return online + [_metric(each) for each in run.evaluations if each.weights != "untrained"]


def _metric(evaluation: Evaluation) -> Metric:
    return Metric(evaluation.verb, evaluation.weights, json.dumps(evaluation.settings, sort_keys=True))


def _online_settings(run: Run) -> str:
    values = {key: look_up(run.config, place) for key, place in _ONLINE_SETTINGS.items()}
    return json.dumps({key: value for key, value in values.items() if value is not None}, sort_keys=True)


def _online_rows(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.rows if row.get("knn_top1") is not None and math.isfinite(row["knn_top1"])]
