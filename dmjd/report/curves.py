"""Convergence of runs: scores, or losses if there are none, over wall time and over effective epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dmjd.charts import INK, MUTED, log_scale, png, tidy
from dmjd.report.run import Run
from dmjd.report.scores import Metric, Point, metrics, points

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette without yellow, which is too light on white."""
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX"
LABEL_LENGTH, LINE_LENGTH = 48, 130
"""Characters of a name in the legend, and of a row of names."""


class _Curve(NamedTuple):
    run: Run
    points: list[Point]
    style: dict[str, Any]


def convergence(runs: Sequence[Run], baseline: Run | None) -> tuple[str, bytes]:
    """A caption, and a PNG of two panels: wall time to the left, effective training epochs to the right.

    Shows the online score that most runs have, or losses if no run has one. The caption names the runs without it. A
    line marks the best score of ``baseline``, a ring the first point of each run that reaches it.
    """
    online = [metric for metric in metrics(runs) if metric.online]
    metric = max(online, key=lambda each: sum(bool(points(run, each)) for run in runs), default=None)
    curves = [_curve(index, run, metric) for index, run in enumerate(runs)]
    reference = next((curve.points for curve in curves if curve.run is baseline), []) if metric else []
    target = metric.best(point.score for point in reference) if metric else None
    slowest = max((point.seconds or 0 for curve in curves for point in curve.points), default=0)
    unit, unit_name = (3600, "hours") if slowest >= 3600 else (60, "minutes")

    figure = Figure(figsize=(10, 4.6), dpi=100, facecolor="white", layout="constrained")
    by_time, by_epochs = figure.subplots(1, 2, sharey=True)
    for curve in curves:
        for axes, x in ((by_time, _seconds(curve, unit)), (by_epochs, _effective_epochs(curve))):
            axes.plot(x, [point.score for point in curve.points], zorder=2, **curve.style)
            reached = metric.first_reach(curve.points, target) if metric and target is not None else None
            if reached is not None:
                at, colour = x[curve.points.index(reached)], curve.style["color"]
                axes.plot([at], [reached.score], "o", markersize=13, fillstyle="none", color=colour, zorder=3)
    for axes, label in ((by_time, f"wall time, {unit_name}"), (by_epochs, "effective training epochs, K x epochs")):
        axes.set_xlabel(label, color=INK)
        axes.set_xlim(left=0)
        tidy(axes)
        axes.xaxis.set_major_locator(MaxNLocator(7))
        if target is not None:
            axes.axhline(target, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    if baseline is not None and target is not None:
        # Curves begin far from the best score, so the left end of the line is free for its label.
        label, place = f"best of {_short(baseline.name)}", {"xytext": (4, 3), "textcoords": "offset points"}
        transform = by_time.get_yaxis_transform()
        by_time.annotate(label, (0, target), xycoords=transform, color=MUTED, fontsize=8.5, parse_math=False, **place)
    if metric is None:
        losses = [point.score for curve in curves for point in curve.points]
        if losses and 0 < 8 * min(losses) < max(losses):
            log_scale(by_time)
    by_time.set_ylabel(f"{metric.column.meaning}, {metric.column.unit}" if metric else "loss", color=INK)
    _legend(figure, [curve for curve in curves if curve.points])
    return _caption(metric, curves, baseline if target is not None else None), png(figure)


def _curve(index: int, run: Run, metric: Metric | None) -> _Curve:
    found = points(run, metric) if metric else _losses(run)
    style = {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        "linewidth": 1.8,
    }
    # Scores are few: markers distinguish the runs without colour. A single loss would be invisible without a marker.
    if metric or len(found) == 1:
        style |= {"marker": MARKERS[index % len(MARKERS)], "markersize": 5, "markevery": max(1, len(found) // 25)}
    return _Curve(run, found, style)


def _losses(run: Run) -> list[Point]:
    rows = [row for row in run.rows if row.get("loss") is not None and math.isfinite(row["loss"])]
    return [Point(row["loss"], run.seconds_at(row["step"]), row.get("epoch")) for row in rows]


def _seconds(curve: _Curve, unit: int) -> list[float]:
    return [math.nan if point.seconds is None else point.seconds / unit for point in curve.points]


def _effective_epochs(curve: _Curve) -> list[float]:
    epochs = [curve.run.effective_epochs(point.epoch) for point in curve.points]
    return [math.nan if epoch is None else epoch for epoch in epochs]


def _legend(figure: Figure, curves: Sequence[_Curve]) -> None:
    """Names above the panels, clear of the curves."""
    if not curves:
        return
    names = [_short(curve.run.name) for curve in curves]
    columns = max(1, min(len(names), LINE_LENGTH // (max(map(len, names)) + 8)))
    legend = figure.legend(
        handles=[Line2D([], [], **curve.style) for curve in curves],
        labels=["run"] * len(names),  # matplotlib leaves out labels that begin with an underscore
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=3,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)
        text.set_parse_math(False)


def _short(name: str) -> str:
    line = " ".join(name.split())
    half = LABEL_LENGTH // 2
    return line if len(line) <= LABEL_LENGTH else f"{line[:half]}...{line[-half:]}"


def _caption(metric: Metric | None, curves: Sequence[_Curve], baseline: Run | None) -> str:
    missing = ", ".join(curve.run.name for curve in curves if not curve.points)
    if metric is None:
        text = "Losses, as no run has online scores. Losses of different methods, targets or patterns do not compare."
        return f"{text} Nothing logged yet by {missing}." if missing else text
    text = f"{metric.title}: {metric.description}"
    if baseline is not None:
        text += f" The dashed line is the best score of {baseline.name}; rings mark where runs first reach it."
    return f"{text} Without such scores: {missing}." if missing else text
