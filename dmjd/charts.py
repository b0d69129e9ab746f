"""Style of all charts, on matplotlib's object interface: no pyplot, no global state."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, RULE = "#1f2328", "#59636e", "#d8dee4"


def tidy(axes: Axes) -> None:
    """Two spines, muted ticks, and a horizontal grid behind the curves."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(colors=MUTED, labelsize=8.5, which="both")
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)


def png(figure: Figure) -> bytes:
    """The figure as a small PNG that names no software, so equal pictures are equal files."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi="figure", metadata={"Software": None}, pil_kwargs={"optimize": True})
    return buffer.getvalue()
