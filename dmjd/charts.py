"""Style of all charts, on matplotlib's object interface: no pyplot, no global state."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

INK, MUTED, RULE = "#1f2328", "#59636e", "#d8dee4"


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


def png(figure: Figure) -> bytes:
    """The figure as a small PNG that names no software, so equal pictures are equal files."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi="figure", metadata={"Software": None}, pil_kwargs={"optimize": True})
    return buffer.getvalue()
