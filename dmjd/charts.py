"""Style of all charts, on matplotlib's object interface: no pyplot, no backend."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from numpy.typing import NDArray

INK, MUTED, RULE = "#1f2328", "#59636e", "#d8dee4"
LOSSES = {
    "loss": ("total", {"color": INK}),
    "mim": ("L_mim (masked tokens)", {"color": "#0969da", "linestyle": "--"}),
    "vis": ("L_vis (visible tokens)", {"color": "#bc4c00", "linestyle": "-."}),
}
"""Loss in log.jsonl -> its label and line."""
MAX_POINTS = 800
"""Points of one line; longer curves keep the extremes of equal stretches."""


def tidy(axes: Axes) -> None:
    """Two spines, muted ticks, and a horizontal grid behind the curves."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(colors=MUTED, labelsize=8.5, which="both")
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def log_scale(axes: Axes, minor: Sequence[int] | None = None) -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5 times powers of ten, and ``minor`` ticks between them."""
    axes.set_yscale("log", subs=minor)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_losses(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the loss of each branch against the step, raw and smoothed.

    rows: log rows with ``step``, ``loss`` (the total), ``mim`` and ``vis``. A branch without values (None, missing or
    all zero) is not drawn, nor is the total of a single branch. Values that are not finite leave a gap.
    """
    branches = [key for key in ("mim", "vis") if np.nan_to_num(values_of(rows, key)).any()]
    shown = branches if len(branches) == 1 else ["loss", *branches]
    for key in shown:
        label, style = LOSSES[key]
        draw_smoothed(axes, rows, key, label, **style)
    axes.set_ylabel("loss", color=INK)


def draw_smoothed(axes: Axes, rows: Sequence[dict[str, Any]], key: str, label: str, **style: Any) -> None:
    """Draw the column ``key`` of ``rows`` against the step: raw values thin, their moving average thick.

    The legend's label is ``label`` and the last average. A column that spans more than a factor of 8 gets a logarithmic
    axis.
    """
    steps, values = values_of(rows, "step"), values_of(rows, key)
    smooth = _moving_average(values)
    last = f"{label}  {smooth[-1]:.4g}" if len(smooth) else label
    marker = "o" if len(rows) == 1 else None  # a line with one point is invisible
    raw, few = extremes(values), extremes(smooth)
    axes.plot(steps[raw], values[raw], color=style["color"], alpha=0.25, linewidth=0.8)
    axes.plot(steps[few], smooth[few], linewidth=1.8, label=last, marker=marker, markersize=4, **style)
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.lines])
    drawn = drawn[np.isfinite(drawn)]
    if drawn.size and drawn.min() > 0 and drawn.max() > 8 * drawn.min():
        # On a linear axis branches an order of magnitude apart would look flat.
        log_scale(axes, minor=[1, 2, 5])


def values_of(rows: Sequence[dict[str, Any]], key: str) -> NDArray[np.float64]:
    """Values of ``key``, one per row; NaN where a row has none or it is beyond float32, which axes cannot show."""
    values = (row.get(key) for row in rows)
    found = np.array([math.nan if value is None else value for value in values], np.float64)
    limits = np.finfo(np.float32)
    found[np.abs(found) < limits.tiny] = 0
    return np.where(np.abs(found) <= limits.max, found, np.nan)


def _moving_average(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exponential moving average over about 1 % of the curve, with bias correction; NaN values are skipped."""
    decay = 1 - 1 / max(4, len(values) / 100)
    mean = weight = 0.0
    out = np.full_like(values, np.nan)
    for i, value in enumerate(values):
        if not math.isnan(value):
            mean, weight = decay * mean + (1 - decay) * value, decay * weight + (1 - decay)
        if weight:
            out[i] = mean / weight
    return out


def extremes(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of all values, or of the least and the greatest in each of MAX_POINTS / 2 equal stretches."""
    if len(values) <= MAX_POINTS:
        return np.arange(len(values))
    kept: list[int] = []
    for stretch in np.array_split(np.arange(len(values)), MAX_POINTS // 2):
        finite = stretch[np.isfinite(values[stretch])]
        kept += [finite[values[finite].argmin()], finite[values[finite].argmax()]] if finite.size else [stretch[0]]
    return np.unique(kept)


def legend(figure: Figure, handles: Sequence[Line2D], names: Iterable[str], **style: Any) -> Legend:
    """The figure's legend, with names as they are: matplotlib would leave out those that begin with an underscore, and
    read text between dollar signs as a formula."""
    made = figure.legend(handles, ["name"] * len(handles), frameon=False, labelcolor=INK, **style)
    for text, name in zip(made.get_texts(), names, strict=True):
        text.set_text(name)
        text.set_parse_math(False)
    return made


def png(figure: Figure, description: str = "") -> bytes:
    """The figure as a PNG that names no software, so equal pictures are equal files.

    description: stored in the file; reports show it as the caption.
    """
    buffer = io.BytesIO()
    metadata = {"Software": None, **({"Description": description} if description else {})}
    figure.savefig(buffer, format="png", dpi="figure", facecolor="auto", metadata=metadata)
    return buffer.getvalue()


def svg(figure: Figure, label: str = "") -> str:
    """The figure as an ``<svg>`` element for a page; equal figures with equal labels are equal texts.

    Ink, ticks and grid have the colours of the page's CSS variables --ink, --muted and --rule, so they follow its
    light or dark scheme. Text is text, in the page's font.

    label: alternative text, distinct for the figures of one page; without it the figure is decoration.
    """
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = buffer.getvalue()
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    body = re.sub(r"\A.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    body = re.sub(r'<(g|text) id="[^"]*"', r"<\1", body).replace("xlink:href", "href")
    body = re.sub(r" font-family: [^;\"]*;?", "", body)
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]).replace(" \n", " "), body)
    body = re.sub(r">\s+<", "><", body)
    for colour, name in ((INK, "ink"), (MUTED, "muted"), (RULE, "rule")):
        body = body.replace(colour, f"var(--{name})")
    role = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    return f"<svg {box[0]} {role}>{body.strip()}"


def swatch(line: Line2D) -> str:
    """A piece of ``line`` with its marker as ``<svg>``, for a legend on a page."""
    figure = Figure(figsize=(0.5, 0.14))
    sample = Line2D([0.02, 0.5, 0.98], [0.5] * 3)
    sample.update_from(line)
    sample.set(transform=figure.transFigure, markevery=[1], clip_on=False)
    figure.add_artist(sample)
    return svg(figure)
