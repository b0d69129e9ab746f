"""Speed-up over a baseline at an equal score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dmjd.report.cost import Hardware, hardware
from dmjd.report.format import ABSENT, hours, plain, times
from dmjd.report.run import Run
from dmjd.report.scores import Metric, Point, points


@dataclass(frozen=True)
class Speedup:
    """cell: the factor, or why there is none. reason: the numbers behind it, one sentence."""

    cell: str
    reason: str


def definition(baseline: str) -> str:
    """The footnote of the column."""
    return (
        f"device hours until {baseline} had its own best score, divided by device hours until this run first had a "
        "score at least as good. The score is the online one if both runs have it, else the first column that both "
        "have, of which only the latest evaluation counts. Scores are compared unrounded, and only on equal devices."
    )


def speedup(run: Run, baseline: Run, metrics: Sequence[Metric]) -> Speedup:
    """The speed-up of ``run`` to ``baseline``, as :func:`definition` says.

    Device hours are world size x wall hours, so runs on different numbers of equal devices are compared too.

    metrics: in the order of preference.
    """
    ours, theirs = hardware(run), hardware(baseline)
    if len({*ours.devices, *theirs.devices}) != 1 or not (ours.devices and theirs.devices):
        there = "" if run is baseline else f", {baseline.name} on {_devices(theirs)}"
        reason = f"{run.name} ran on {_devices(ours)}{there}: times on different devices are not comparable."
        return _none("devices differ", reason)
    for each, used in ((run, ours), (baseline, theirs)):
        if len(used.world_sizes) != 1:
            sizes = " and ".join(map(str, used.world_sizes))
            reason = f"{each.name} was launched with {sizes} processes, and the log does not record the time with each."
            return _none("processes differ", reason)
    for metric in metrics:
        reference, curve = _timed(baseline, metric), _timed(run, metric)
        if reference and curve:
            return _at_equal_score(run, baseline, metric, curve, reference)
    if run is baseline:
        return _none("no score", f"{run.name}, the baseline, has no score.")
    return _none("no score", f"{run.name} has no score in common with {baseline.name}.")


def _at_equal_score(
    run: Run, baseline: Run, metric: Metric, curve: Sequence[Point], reference: Sequence[Point]
) -> Speedup:
    target = metric.best(point.score for point in reference)
    assert target is not None
    theirs, ours = metric.first_reach(reference, target), metric.first_reach(curve, target)
    assert theirs is not None
    unit, goal = f"{hardware(run).kind} hours", _score(metric, target)
    if ours is None:
        best, side = metric.best(point.score for point in curve), "below" if metric.column.higher_is_better else "above"
        reason = f"{run.name}: {metric.title} {_score(metric, best)} at best, {side} the {goal} of {baseline.name}."
        return _none("not reached", reason)
    used, reference_used = _hours(run, ours), _hours(baseline, theirs)
    reason = f"{run.name}: {metric.title} {_score(metric, ours.score)} after {hours(used)} {unit}"
    if run is baseline:
        return Speedup(times(1), f"{reason}, the baseline.")
    reason += f"; {baseline.name} took {hours(reference_used)} to {goal}."
    return Speedup(times(reference_used / used), reason)


def _score(metric: Metric, value: float | None) -> str:
    return f"{plain(value)} {metric.column.unit}".rstrip()


def _timed(run: Run, metric: Metric) -> list[Point]:
    """The points after the first step: a score before it is not due to training."""
    return [point for point in points(run, metric) if point.seconds]


def _hours(run: Run, point: Point) -> float:
    assert point.seconds is not None
    value = hardware(run).hours(point.seconds)
    assert value is not None
    return value


def _devices(used: Hardware) -> str:
    return " and ".join(used.devices) or "an unknown device"


def _none(why: str, reason: str) -> Speedup:
    return Speedup(f"{ABSENT} ({why})", reason)
