from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from dmjd.report import curves
from dmjd.report.curves import convergence
from dmjd.report.run import read_run

MakeRun = Callable[..., Path]
Drawn = Callable[..., tuple[str, list[Axes]]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """``drawn(*folders, baseline=None)``: the caption, and the panels as they went into the picture."""
    figures: list[Figure] = []

    def keep(figure: Figure) -> bytes:
        figures.append(figure)
        return b""

    monkeypatch.setattr(curves, "png", keep)
    monkeypatch.setattr(curves, "svg", lambda figure, label: "")
    monkeypatch.setattr(curves, "swatch", lambda line: "")

    def draw(*folders: Path, baseline: Path | None = None) -> tuple[str, list[Axes]]:
        runs = [read_run(folder) for folder in folders]
        caption = convergence(runs, None if baseline is None else runs[folders.index(baseline)]).caption
        return caption, figures[-1].axes

    return draw


def lines(axes: Axes) -> list[list[tuple[float, float]]]:
    return [[(x, y) for x, y in np.asarray(line.get_xydata()).tolist()] for line in axes.lines]


def test_scores_over_wall_time_and_over_effective_epochs(make_run: MakeRun, drawn: Drawn) -> None:
    a = make_run("a", hours=100, curve=[(40, 50.0), (80, 60.0)])
    b = make_run("b", hours=10, views=2, curve=[(50, 55.0), (100, 65.0)])
    caption, (by_time, by_epochs) = drawn(a, b)
    assert lines(by_time) == [[(40, 50), (80, 60)], [(5, 55), (10, 65)]]
    assert lines(by_epochs) == [[(40, 50), (80, 60)], [(100, 55), (200, 65)]]
    assert by_time.get_xlabel() == "wall time, hours"
    assert by_time.get_ylabel() == "k-nearest-neighbour top-1, %"
    assert caption.startswith("kNN online")


def test_rings_are_where_runs_reach_the_baselines_best(make_run: MakeRun, drawn: Drawn) -> None:
    baseline = make_run("a", curve=[(40, 60.0), (80, 50.0)])
    faster = make_run("b", curve=[(10, 50.0), (20, 61.0), (30, 70.0)])
    never = make_run("c", curve=[(50, 59.0)])
    caption, (by_time, by_epochs) = drawn(faster, baseline, never, baseline=baseline)
    for axes in (by_time, by_epochs):
        rings = [points for points, line in zip(lines(axes), axes.lines, strict=True) if line.get_markersize() > 9]
        assert rings == [[(20, 61)], [(40, 60)]]
        assert [[y for _, y in points] for points in lines(axes)].count([60, 60]) == 1  # the dashed line
    assert "best score of a" in caption


def test_losses_stand_in_where_no_run_has_scores(make_run: MakeRun, drawn: Drawn) -> None:
    a = make_run("a", epochs=10, hours=0.5)
    judged = make_run("b", epochs=10, hours=0.25, evaluations=[("knn", "trained", 10, 60.0, {})])
    caption, (by_time, _) = drawn(a, judged, baseline=a)
    assert by_time.get_ylabel() == "loss"
    assert by_time.get_xlabel() == "wall time, minutes"
    expected = [(3 * epoch, 1 / (1 + epoch)) for epoch in range(1, 11)]
    np.testing.assert_allclose(lines(by_time)[0], expected, rtol=1e-12)
    assert len(lines(by_time)) == 2
    assert "no run has online scores" in caption


def test_runs_without_the_scores_shown_are_named(make_run: MakeRun, drawn: Drawn) -> None:
    other = {"online_knn": {"neighbours": 5}}
    folders = make_run("a", curve=[(9, 1.0)]), make_run("b"), make_run("c", curve=[(9, 1.0)], config=other)
    caption, (by_time, _) = drawn(*folders, make_run("d", curve=[(9, 1.0)]))
    assert caption.endswith("Without such scores: b, c.")
    assert [points for points in lines(by_time) if points] == [[(9, 1)], [(9, 1)]]


def test_scores_that_are_not_finite_are_left_out(make_run: MakeRun, drawn: Drawn) -> None:
    _, (by_time, _) = drawn(make_run("a", curve=[(10, 5.0), (20, float("nan")), (30, 7.0)]))
    assert lines(by_time) == [[(10, 5), (30, 7)]]


def test_no_two_runs_look_alike(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "png", lambda figure: b"")
    monkeypatch.setattr(curves, "svg", lambda figure, label: "")
    runs = [read_run(make_run(f"run-{index}", curve=[(5, index)])) for index in range(20)]
    samples = [sample for sample, _ in convergence(runs, None).charts[0].legend]
    assert len({*samples}) == 20
    colourless = [re.sub(r"#[0-9a-f]{6}|var\(--ink\)", "", sample) for sample in samples[:8]]
    assert len({*colourless}) == 8  # by dashes and markers alone


def test_a_legend_of_eight_long_names_is_inside_the_picture(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [read_run(make_run("W" * 90 + str(index), curve=[(5, index)])) for index in range(8)]
    inside: list[bool] = []

    def measure(figure: Figure) -> bytes:
        figure.canvas.draw()
        (box,) = (legend.get_window_extent() for legend in figure.legends)
        inside.append(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1)
        return b""

    monkeypatch.setattr(curves, "png", measure)
    monkeypatch.setattr(curves, "svg", lambda figure, label: "")
    convergence(runs, None)
    assert inside == [True]


def test_picture_holds_the_names_as_written(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "svg", lambda figure, label: "")

    def picture(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        drawn = convergence([read_run(make_run(name, curve=[(5, 3.0)]))], None)
        assert [label for _, label in drawn.charts[0].legend] == [name]
        return np.asarray(Image.open(io.BytesIO(drawn.png)).convert("L"))

    # Below the panels there is nothing but names: an underscore must not hide one, nor a dollar change it.
    ink = {name: (picture(name)[-24:] < 128).sum() for name in ("run", "_run", "$run$")}
    assert ink["run"] < ink["_run"] < ink["$run$"]
