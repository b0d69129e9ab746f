"""Charts of reports: the course of one run, and the convergence of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from dmjd.charts import (
    INK,
    MUTED,
    RULE,
    draw_losses,
    draw_smoothed,
    extremes,
    legend,
    log_scale,
    png,
    svg,
    swatch,
    tidy,
    values_of,
)
from dmjd.report.method import loss_meanings
from dmjd.report.run import Run
from dmjd.report.scores import AVERAGE, Metric, Point, metrics, online_references, online_rows, points
from dmjd.report.trainings import Training, is_by_size, score_name

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", INK, "#8A8A8A")
"""Okabe and Ito's palette with grey in place of yellow, which is too light on white."""
DASHES = ("-", "--", "-.", ":", (0, (7, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = "osD^vPX*"
LABEL_LENGTH = 60
"""Characters of a name in the legend."""
PANEL = (4.4, 2.7)
"""Inches of a chart on a page, where it takes about half the width of a screen, or all of a phone's."""

_FINE_TUNING_LOSS = "Training: with mixed and smoothed targets where these are on. Validation: with the labels."
_PARTS = "Total: the weighted sum of the others."
_LOSSES_DIFFER = "Losses of different methods, targets or patterns are not comparable."


class Chart(NamedTuple):
    """A chart on a page. legend: pieces of the lines as SVG, and their labels. caption: text below it."""

    title: str
    svg: str
    legend: list[tuple[str, str]]
    caption: str = ""


class Convergence(NamedTuple):
    """caption: the meaning of the scores. png: all panels in one file. charts: the same for a page."""

    caption: str
    png: bytes
    charts: list[Chart]


class _Curve(NamedTuple):
    run: Run
    label: str
    points: list[Point]
    style: dict[str, Any]


def run_charts(run: Run) -> list[Chart]:
    """Loss, online score, learning rate, gradient norm and throughput by step and epoch, as far as they were logged."""
    training = [row for row in run.rows if row.get("loss") is not None]
    charts = _validation_charts(run, run.training, training) if run.training else []
    if training and not run.training:
        figure, axes = _panel()
        draw_losses(axes, training)
        charts.append(_by_step(run, "Loss", figure, axes, caption=loss_meanings(run.config)))
    scored = [] if run.training else online_rows(run)
    if scored:
        figure, axes = _panel()
        style: dict[str, Any] = {"color": COLOURS[0], "linewidth": 1.8, "marker": "o", "markersize": 4}
        steps, scores = values_of(scored, "step"), values_of(scored, "knn_top1")
        axes.plot(steps, scores, label=f"online kNN  {scores[-1]:.2f} %", **style, markevery=max(1, len(scored) // 25))
        for (name, value), dash in zip(online_references(run).items(), ("--", "-.", ":"), strict=False):
            axes.axhline(value, label=f"{name}  {value:.2f} %", color=MUTED, linewidth=1, linestyle=dash, zorder=1)
        axes.set_ylabel("top-1, %", color=INK)
        charts.append(_by_step(run, "Online score", figure, axes, caption="k-nearest-neighbour top-1 while training."))
    for title, key, label, rows in (
        ("Learning rate", "lr", "learning rate", training),
        ("Gradient norm", "grad_norm", "gradient norm", training),
        ("Throughput", "images_per_second", "images/s", run.timing),
    ):
        known = [row for row in rows if row.get(key) is not None]
        if not known:
            continue
        figure, axes = _panel()
        if key == "lr":
            steps, rates = values_of(known, "step"), values_of(known, key)
            kept = extremes(rates)
            axes.plot(steps[kept], rates[kept], color=COLOURS[0], marker="o" * (len(known) == 1))
        else:
            draw_smoothed(axes, known, key, label, color=COLOURS[0])
        axes.set_ylabel(label, color=INK)
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        charts.append(_by_step(run, title, figure, axes))
    return charts


def _validation_charts(run: Run, kind: Training, training: Sequence[dict[str, Any]]) -> list[Chart]:
    """Losses of training and validation, and scores of validation."""
    charts = []
    losses, scores = ([key for key in _validated(run) if key.endswith("loss") is is_loss] for is_loss in (True, False))
    parts = {key: label for key, label in kind.parts.items() if any(row.get(key) is not None for row in training)}
    if training or losses:
        figure, axes = _panel()
        if training:
            draw_smoothed(axes, training, "loss", "total" if parts else "training", color=INK)
        for index, (key, label) in enumerate(parts.items()):
            draw_smoothed(axes, training, key, label, color=COLOURS[index], linestyle=DASHES[index + 1])
        _draw_validation(axes, run, losses, "{:.4g}")
        axes.set_ylabel(kind.loss, color=INK)
        caption = _PARTS if parts else _FINE_TUNING_LOSS
        charts.append(_by_step(run, "Loss", figure, axes, caption=caption))
    for title, of_sizes in (("Validation", False), ("Validation by size of objects", True)):
        shown = [key for key in scores if is_by_size(key) is of_sizes]
        if shown:
            figure, axes = _panel()
            _draw_validation(axes, run, shown, "{:.2f} %")
            axes.set_ylabel("accuracy, %" if "top1" in kind.columns else "score, %", color=INK)
            charts.append(_by_step(run, title, figure, axes, caption="All test images, once each."))
    return charts


def _validated(run: Run) -> list[str]:
    """Columns of validation in log.jsonl that have finite values, in the order in which they appear."""
    keys = dict.fromkeys(key for row in run.rows for key in row if key.startswith("val_"))
    return [key for key in keys if np.isfinite(values_of(run.rows, key)).any()]


def _draw_validation(axes: Axes, run: Run, keys: Sequence[str], shown: str) -> None:
    for index, key in enumerate(keys):
        rows = [row for row in run.rows if row.get(key) is not None]
        steps, values = values_of(rows, "step"), values_of(rows, key)
        average = key.startswith(AVERAGE)
        name = "average " * average + score_name(key.removeprefix(AVERAGE if average else "val_"))
        label = f"{'validation' if name == 'loss' else name}  {shown.format(values[-1])}"
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        axes.plot(steps, values, label=label, linewidth=1.8, markersize=4, **style, markevery=max(1, len(rows) // 25))


def _panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=PANEL, layout="constrained")
    return figure, figure.subplots()


def _by_step(run: Run, title: str, figure: Figure, axes: Axes, caption: str = "") -> Chart:
    """The chart with steps below and epochs above."""
    axes.set_xlabel("step", color=INK)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    tidy(axes)
    last = next((row for row in reversed(run.rows) if row.get("epoch") and row["step"]), None)
    if last is not None:
        ratio = last["epoch"] / last["step"]
        epochs = axes.secondary_xaxis("top", functions=(lambda step: step * ratio, lambda epoch: epoch / ratio))
        epochs.set_xlabel("epoch", color=INK)
        epochs.tick_params(colors=MUTED, labelsize=8.5)
        epochs.spines["top"].set_color(RULE)
        epochs.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    legend = [(swatch(line), str(line.get_label())) for line in axes.lines if not str(line.get_label()).startswith("_")]
    return Chart(title, svg(figure, f"{title} by step"), legend, caption)


def convergence(runs: Sequence[Run], baseline: Run | None, labels: Sequence[str] | None = None) -> Convergence:
    """Curves of several runs over wall time and over effective training epochs.

    Shows the online score that most runs have, or losses if no run has one. The caption names the runs without it. A
    line marks the best score of ``baseline``, a ring the first point of each run that reaches it.

    labels: of the runs in the legend; by default their names.
    """
    online = [metric for metric in metrics(runs) if metric.online]
    metric = max(online, key=lambda each: sum(bool(points(run, each)) for run in runs), default=None)
    names = [_short(name) for name in labels or [run.name for run in runs]]
    curves = [_curve(index, run, names[index], metric) for index, run in enumerate(runs)]
    reference = next((curve.points for curve in curves if curve.run is baseline), []) if metric else []
    target = metric.best(point.score for point in reference) if metric else None
    slowest = max((point.seconds or 0 for curve in curves for point in curve.points), default=0)
    unit, unit_name = (3600, "hours") if slowest >= 3600 else (60, "minutes")

    def by_time(axes: Axes) -> None:
        _draw(axes, curves, [_seconds(curve, unit) for curve in curves], metric, target)
        axes.set_xlabel(f"wall time, {unit_name}", color=INK)
        if baseline is not None and target is not None:
            # Curves begin far from the best score, so the left end of the line is free for its label.
            place: dict[str, Any] = {"xytext": (4, 3), "textcoords": "offset points", "fontsize": 8.5}
            axes.annotate(
                f"best of {_short(baseline.name)}", (0, target), xycoords=axes.get_yaxis_transform(), color=MUTED,
                parse_math=False, **place,
            )  # fmt: skip

    def by_epochs(axes: Axes) -> None:
        _draw(axes, curves, [_effective_epochs(curve) for curve in curves], metric, target)
        axes.set_xlabel(epochs, color=INK)

    tuned = all(run.training for run in runs)
    epochs, short = ("epochs",) * 2 if tuned else ("effective training epochs, K x epochs", "effective epochs")
    caption = _caption(metric, curves, baseline if target is not None else None)
    figure = Figure(figsize=(10, 4.6), dpi=100, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    by_time(left)
    by_epochs(right)
    right.set_ylabel("")
    shown = [curve for curve in curves if curve.points]
    _legend(figure, shown)
    legend = [(swatch(Line2D([], [], **curve.style)), curve.label) for curve in shown]
    charts = []
    what = metric.title if metric else "Loss"
    for title, draw in (
        (f"{what} over wall time", by_time),
        (f"{what} over {short}", by_epochs),
    ):
        panel, axes = _panel()
        draw(axes)
        charts.append(Chart(title, svg(panel, title), legend))
    if metric:
        losses = [_curve(index, run, names[index], None) for index, run in enumerate(runs)]
        panel, axes = _panel()
        _draw(axes, losses, [_effective_epochs(curve) for curve in losses], None, None)
        axes.set_xlabel(epochs, color=INK)
        known = [(swatch(Line2D([], [], **curve.style)), curve.label) for curve in losses if curve.points]
        title = f"Loss over {short}"
        charts.append(Chart(title, svg(panel, title), known, _LOSSES_DIFFER))
    return Convergence(caption, png(figure), charts)


def _draw(
    axes: Axes, curves: Sequence[_Curve], places: Sequence[list[float]], metric: Metric | None, target: float | None
) -> None:
    """Draw every curve at its ``places`` on the x axis, and where it reaches ``target``."""
    for curve, x in zip(curves, places, strict=True):
        axes.plot(x, [point.score for point in curve.points], zorder=2, **curve.style)
        reached = metric.first_reach(curve.points, target) if metric and target is not None else None
        if reached is not None:
            at, colour = x[curve.points.index(reached)], curve.style["color"]
            axes.plot([at], [reached.score], "o", markersize=13, fillstyle="none", color=colour, zorder=3)
    axes.set_xlim(left=0)
    tidy(axes)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    if target is not None:
        axes.axhline(target, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    losses = [] if metric else [point.score for curve in curves for point in curve.points]
    if losses and 0 < 8 * min(losses) < max(losses):
        log_scale(axes)
    axes.set_ylabel(f"{metric.column.meaning}, {metric.column.unit}" if metric else "loss", color=INK)


def _curve(index: int, run: Run, label: str, metric: Metric | None) -> _Curve:
    found = points(run, metric) if metric else _losses(run)
    style = {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[(index + index // len(COLOURS)) % len(DASHES)],
        "linewidth": 1.8,
    }
    # Scores are few: markers distinguish the runs without colour. A single loss would be invisible without a marker.
    if metric or len(found) == 1:
        style |= {"marker": MARKERS[index % len(MARKERS)], "markersize": 5, "markevery": max(1, len(found) // 25)}
    return _Curve(run, label, found, style)


def _losses(run: Run) -> list[Point]:
    losses = values_of(run.rows, "loss")
    rows = [row for row, loss in zip(run.rows, losses, strict=True) if math.isfinite(loss)]
    kept = (rows[index] for index in extremes(values_of(rows, "loss")))
    return [Point(row["loss"], run.seconds_at(row["step"]), row.get("epoch")) for row in kept]


def _seconds(curve: _Curve, unit: int) -> list[float]:
    return [math.nan if point.seconds is None else point.seconds / unit for point in curve.points]


def _effective_epochs(curve: _Curve) -> list[float]:
    run = curve.run
    epochs = [point.epoch if run.training else run.effective_epochs(point.epoch) for point in curve.points]
    return [math.nan if epoch is None else epoch for epoch in epochs]


def _legend(figure: Figure, curves: Sequence[_Curve]) -> None:
    """Names below the panels, in as many columns as fit the width of the figure."""
    for columns in range(min(len(curves), 4), 0, -1):
        handles = [Line2D([], [], **curve.style) for curve in curves]
        names = [curve.label for curve in curves]
        made = legend(figure, handles, names, loc="outside lower left", ncols=columns, fontsize=9, handlelength=4)
        if made.get_window_extent().width <= figure.bbox.width:
            return
        if columns > 1:
            made.remove()


def _short(name: str) -> str:
    line = " ".join(name.split())
    half = LABEL_LENGTH // 2
    return line if len(line) <= LABEL_LENGTH else f"{line[:half]}...{line[-half:]}"


def _caption(metric: Metric | None, curves: Sequence[_Curve], baseline: Run | None) -> str:
    missing = ", ".join(curve.run.name for curve in curves if not curve.points)
    if metric is None:
        text = f"Losses, as no run has online scores. {_LOSSES_DIFFER}"
        return f"{text} Nothing logged yet by {missing}." if missing else text
    text = f"{metric.title}: {metric.description}"
    if baseline is not None:
        text += f" The dashed line is the best score of {baseline.name}; rings mark where runs first reach it."
    return f"{text} Without such scores: {missing}." if missing else text
