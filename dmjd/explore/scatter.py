"""Scatter plots of 2-D maps side by side, as one PNG; the marks of classes, which the page shares."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as Outline
from numpy.typing import NDArray

from dmjd.charts import INK, MUTED, RULE, legend, png
from dmjd.explore.sources import shortened

COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
"""Ten colours that remain distinct under colour-vision deficiencies (Petroff, arXiv:2107.02270)."""


def _polygon(*corners: tuple[float, float], turn: float = 0.0) -> list[tuple[float, float]]:
    """``corners`` turned by ``turn`` degrees and scaled to the area of a circle of radius 0.85."""
    x, y = np.array(corners).T
    area = abs(float((x * np.roll(y, -1) - y * np.roll(x, -1)).sum())) / 2
    turned = 0.85 * np.sqrt(np.pi / area) * np.exp(1j * np.deg2rad(turn)) * (x + 1j * y)
    return [(round(float(corner.real), 3), round(float(corner.imag), 3)) for corner in turned]


def _star(corners: int, inner: float = 1.0) -> list[tuple[float, float]]:
    """``corners`` at radius 1 from the top on, every second one at radius ``inner``."""
    angles = 2 * np.pi / corners * np.arange(corners)
    radii = np.where(np.arange(corners) % 2, inner, 1.0)
    return [(float(r * np.sin(a)), float(r * np.cos(a))) for r, a in zip(radii, angles, strict=True)]


_QUARTER = [(1.0, 3.0), (1.0, 1.0), (3.0, 1.0)]
_PLUS = [*_QUARTER, *[(y, -x) for x, y in _QUARTER], *[(-x, -y) for x, y in _QUARTER], *[(-y, x) for x, y in _QUARTER]]

SHAPES = (
    _polygon(*_star(16)),
    _polygon(*_star(3)),
    _polygon(*_star(4), turn=45),
    _polygon(*_star(4)),
    _polygon(*_PLUS),
    _polygon(*_star(3), turn=180),
    _polygon(*_PLUS, turn=45),
    _polygon(*_star(10, inner=0.45)),
)
"""Corners of each mark around 0, y upwards: circle, triangle, square, diamond, plus, triangle pointing down, cross,
star. Class number i has the colour i mod 10 and the shape i / 10."""
MAX_CLASSES = len(COLOURS) * len(SHAPES)
COLUMNS = 4
"""Panels in a row, as in the paper's figure."""
_PANEL = 3.1  # inches
_DPI = 130


@dataclass(frozen=True)
class Panel:
    """The map of one encoder. title, note: text above and below it. points: float ``[N, 2]``."""

    title: str
    note: str
    points: NDArray[np.float64]


def mark(index: int) -> tuple[int, int]:
    """Numbers of the colour and the shape of class ``index``."""
    return index % len(COLOURS), index // len(COLOURS) % len(SHAPES)


def in_square(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """``points`` moved and scaled into ``[0, 1]``; both axes have one scale."""
    low, high = points.min(axis=0), points.max(axis=0)
    span = float((high - low).max()) or 1.0
    return (points - (low + high) / 2) / span + 0.5


def radius(images: int) -> float:
    """Radius of a mark in pixels: 2.5 for thousands of images, up to 5 for few."""
    return float(np.clip(110 / np.sqrt(images), 2.5, 5.0))


def scatter_png(
    panels: Sequence[Panel],
    labels: NDArray[np.int64],
    classes: Sequence[str],
    order: NDArray[np.int64],
    caption: str,
) -> bytes:
    """The panels in rows of four, with a legend at their right and ``caption`` below and in the file.

    Args:
        labels: ``[N]``, class of each image; all 0 if ``classes`` is empty.
        classes: names; none: one colour without a legend.
        order: the images in the order in which they are drawn.
    """
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    legend_columns = -(-len(classes) // (21 * rows))
    width, height = columns * _PANEL + 1.7 * legend_columns, rows * (_PANEL + 0.5) + 0.5
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    diameter = 2 * 0.8 * radius(len(labels)) * 72 / _DPI
    colours, shapes = np.array([mark(int(label)) for label in labels]).T
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1, aspect="equal", xticks=[], yticks=[])
        axes.spines[:].set_color(RULE)
        axes.set_title(shortened(panel.title, 42), color=INK, fontsize=9, parse_math=False)
        axes.set_xlabel(panel.note, color=MUTED, fontsize=8.5, parse_math=False)
        axes.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04))
        points = in_square(panel.points)[order]
        for shape in map(int, np.unique(shapes)):
            own = shapes[order] == shape
            x, y = points[own].T
            axes.scatter(
                x,
                y,
                s=(diameter * np.abs(SHAPES[shape]).max()) ** 2,  # matplotlib scales every outline to one size
                c=np.array(COLOURS)[colours[order][own]],
                marker=_outline(shape),
                alpha=0.85,
                linewidths=0,
            )
    if classes:
        handles = [
            Line2D([], [], linestyle="", marker=_outline(mark(index)[1]), color=COLOURS[mark(index)[0]], markersize=6)
            for index in range(len(classes))
        ]
        names = [shortened(name, 22) for name in classes]
        place = "outside right upper"
        legend(figure, handles, names, loc=place, ncols=legend_columns, fontsize=8, handletextpad=0.2)
    lines = "\n".join(wrap(caption, int(width * 15)))
    figure.supxlabel(lines, color=MUTED, fontsize=8, x=0.01, ha="left", parse_math=False)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Glyph"
        )  # names in scripts that the font lacks are boxes here, not in the page
        return png(figure, caption)


def _outline(shape: int) -> Outline:
    corners = SHAPES[shape]
    return Outline([*corners, corners[0]], closed=True)
