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

from dmjd.charts import INK, MUTED, RULE, png

COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
"""Ten colours that remain distinct under colour-vision deficiencies (Petroff, arXiv:2107.02270)."""


def _regular(corners: int, turn: float = 0.0, inner: float = 1.0) -> list[tuple[float, float]]:
    """Corners of a polygon around 0, y upwards; every second one at radius ``inner``. ``turn``: degrees."""
    angles = np.deg2rad(90 + turn + 360 / corners * np.arange(corners))
    radii = np.where(np.arange(corners) % 2, inner, 1.0)
    return [(round(float(r * np.cos(a)), 3), round(float(r * np.sin(a)), 3)) for r, a in zip(radii, angles, strict=True)]


def _cross(turn: float) -> list[tuple[float, float]]:
    """Corners of a plus sign, turned by ``turn`` degrees."""
    corners = [(0.33, 1.0), (0.33, 0.33), (1.0, 0.33)]
    found = []
    for quarter in range(4):
        angle = np.deg2rad(turn - 90 * quarter)
        cos, sin = np.cos(angle), np.sin(angle)
        found += [(round(float(x * cos - y * sin), 3), round(float(x * sin + y * cos), 3)) for x, y in corners]
    return found


SHAPES = (
    [(0.85 * x, 0.85 * y) for x, y in _regular(16)],
    _regular(3),
    _regular(4, 45),
    _regular(4),
    _cross(0),
    _regular(3, 180),
    _cross(45),
    _regular(10, inner=0.45),
)
"""Corners of each mark in a circle of radius 1, y upwards: circle, triangle, square, diamond, plus, triangle pointing
down, cross, star. Class number i has the colour i mod 10 and the shape i / 10."""
MAX_CLASSES = len(COLOURS) * len(SHAPES)
COLUMNS = 4
"""Panels in a row, as in the paper's figure."""
_PANEL = 3.1  # inches


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
    legend_columns = -(-len(classes) // 26)
    width, height = columns * _PANEL + 1.7 * legend_columns, rows * (_PANEL + 0.5) + 0.5
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    size = (2 * 0.8 * radius(len(labels)) * 72 / 130) ** 2
    colours, shapes = np.array([mark(int(label)) for label in labels]).T
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1, aspect="equal", xticks=[], yticks=[])
        axes.spines[:].set_color(RULE)
        axes.set_title(shortened(panel.title, 42), color=INK, fontsize=9, parse_math=False)
        axes.set_xlabel(panel.note, color=MUTED, fontsize=8.5, parse_math=False)
        axes.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04))
        points = in_square(panel.points)[order]
        for shape in np.unique(shapes):
            own = shapes[order] == shape
            axes.scatter(
                *points[own].T,
                s=size,
                c=np.array(COLOURS)[colours[order][own]],
                marker=_outline(int(shape)),
                alpha=0.85,
                linewidths=0,
            )
    if classes:
        handles = [
            Line2D([], [], linestyle="", marker=_outline(mark(index)[1]), color=COLOURS[mark(index)[0]], markersize=6)
            for index in range(len(classes))
        ]
        legend = figure.legend(
            handles, ["class"] * len(classes), loc="outside right upper", ncols=legend_columns, frameon=False,
            fontsize=8, labelcolor=INK, handletextpad=0.2,
        )
        for text, name in zip(legend.get_texts(), classes, strict=True):
            text.set_text(shortened(name, 22))
            text.set_parse_math(False)
    lines = "\n".join(wrap(caption, int(width * 15)))
    figure.supxlabel(lines, color=MUTED, fontsize=8, x=0.01, ha="left", parse_math=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names in scripts that the font lacks are boxes here, not in the page
        return png(figure, caption)


def shortened(name: str, length: int) -> str:
    """``name`` in one line of at most ``length`` characters, without its middle if it is longer."""
    line = " ".join(name.split())
    half = (length - 3) // 2
    return line if len(line) <= length else f"{line[:half]}...{line[-half:]}"


def _outline(shape: int) -> Outline:
    corners = SHAPES[shape]
    return Outline([*corners, corners[0]], closed=True)
