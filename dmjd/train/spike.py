"""When a loss is too high to be chance: against the running median, in units of the spread around it."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

SIGMAS_PER_MAD = 1.4826
"""The standard deviation of a normal distribution in median absolute deviations."""


class SpikeRule:
    """A loss is high above ``median + height * 1.4826 * MAD`` of the ``window`` losses before it.

    Median and MAD (median absolute deviation) do not move with the spike that they judge, as a mean and a variance do.
    High losses enter the window too, so a level that stays is the new level. ``steps`` of them in a row are a spike.

    If losses were independent and normal around a constant level, a window of some hundred would take chance for a
    spike about once in ``(1 - Phi(height)) ** -steps`` steps: with height 6 and 3 steps, once in 1e27. A falling loss
    makes it rarer. Losses that swing slowly make it more frequent whatever ``steps`` is, so a window should hold a
    swing.

    Args:
        height: in standard deviations.
        steps: in a row.
        window: losses that are remembered; nothing is high before there are so many.
    """

    def __init__(self, height: float, steps: int, window: int) -> None:
        self._height = height
        self._steps = steps
        self._losses: deque[float] = deque(maxlen=window)
        self._run = 0  # high losses in a row

    def take_in(self, loss: float) -> bool:
        """Whether ``loss`` is high; :attr:`spike` may then hold."""
        high = len(self._losses) == self._losses.maxlen and loss > self._bound()
        self._run = self._run + 1 if high else 0
        self._losses.append(loss)
        return high

    @property
    def spike(self) -> bool:
        """Whether the last losses were a spike."""
        return self._run >= self._steps

    def _bound(self) -> float:
        middle = median(self._losses)
        return middle + self._height * SIGMAS_PER_MAD * median(abs(loss - middle) for loss in self._losses)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "run": self._run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self._losses.maxlen)
        self._run = state["run"]
