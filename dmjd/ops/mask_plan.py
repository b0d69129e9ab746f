"""Convert mask ratios to exact numbers of masked units per view, without tensors.

A *unit* is masked or kept as a whole: one token ("uniform", "beit") or a block of tokens ("block"). The counts follow
the paper's Sec. III-B: every view masks the same number of units, and under the disjoint regulation (Eq. 3) each view
after the first masks at least one unit that no earlier view masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dmjd.ops.arguments import choice, integer, number, pair

Pattern = Literal["uniform", "block", "beit"]
Regulation = Literal["disjoint", "none", "complementary"]
Rounding = Literal["exact", "official"]

PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
REGULATIONS: tuple[Regulation, ...] = get_args(Regulation)
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

MAX_VIEWS = 128
"""Most views of an image; the counts are arguments of the kernel launch."""

_BILLION = 10**9
_MOST_TOKENS = 2**31 - 1  # as in csrc/core/mask_plan.h

_SMALLEST_RECTANGLE = 16
_ASPECT_LEVELS = 64
_MOST_RECTANGLE_UNITS = 1 << 22
"""With more units the integer arithmetic of a rectangle would overflow 64 bits."""


def _aspect_ratios(levels: int = _ASPECT_LEVELS, least: float = 0.3) -> tuple[int, ...]:
    """Midpoints of ``levels`` equal parts of [log least, log 1/least], as ratios with 16 fractional bits.

    Entry ``levels - 1 - i`` is the inverse of entry ``i``. A table, since logarithms differ in their
    last bits between devices.
    """
    span = -2 * math.log(least)
    return tuple(round((1 << 16) * least * math.exp(span * (level + 0.5) / levels)) for level in range(levels))


ASPECT_RATIOS = _aspect_ratios()


@dataclass(frozen=True)
class MaskPlan:
    """Exact counts for one combination of grid, pattern, rates and regulation.

    grid: (h, w) tokens.
    block: (rows, columns) tokens of one unit.
    hidden: number of masked units per view.
    fresh: for each view, how many of them no earlier view masked. Under "none" views are independent and only the first
        entry is used.
    regulation: "disjoint", "none" or "complementary".
    smallest: units of the smallest rectangle of BEiT's pattern.
    aspects: height / width of its rectangles, with 16 fractional bits; entry ``-1 - i`` is the inverse of entry ``i``.
        Empty where units are drawn one by one.
    """

    grid: tuple[int, int]
    block: tuple[int, int]
    hidden: int
    fresh: tuple[int, ...]
    regulation: str
    smallest: int = 1
    aspects: tuple[int, ...] = ()

    @property
    def op_arguments(self) -> tuple[tuple[int, int], tuple[int, int], int, tuple[int, ...], str, int, tuple[int, ...]]:
        """Arguments of ``torch.ops.dmjd.disjoint_masks`` and ``dmjd._core.disjoint_masks`` after ids and key."""
        return self.grid, self.block, self.hidden, self.fresh, self.regulation, self.smallest, self.aspects

    @property
    def views(self) -> int:
        return len(self.fresh)

    @property
    def unit_grid(self) -> tuple[int, int]:
        return self.grid[0] // self.block[0], self.grid[1] // self.block[1]

    @property
    def units(self) -> int:
        return self.unit_grid[0] * self.unit_grid[1]

    @property
    def tokens_per_unit(self) -> int:
        return self.block[0] * self.block[1]

    @property
    def m_corr(self) -> float:
        """The actual corruption rate: masked tokens of a view over all tokens."""
        return self.hidden / self.units

    @property
    def m_pred(self) -> float:
        """The fraction of tokens masked by at least one view: exact, or for "none" the expectation."""
        if self.regulation == "none":
            return 1.0 - (1.0 - self.m_corr) ** self.views
        return sum(self.fresh) / self.units


def _smallest_rectangle(hidden: int) -> int:
    """BEiT's 16 units, or a quarter of the masked units if that is less: 16 never fit the 14 of a 6 x 6 grid."""
    return max(1, min(_SMALLEST_RECTANGLE, hidden // 4))


def _billionths(ratio: float) -> int:
    """``ratio`` in units of 1e-9, as typed: .6 gives exactly 600,000,000, while the double .6 differs from 3/5.

    Integers, since torch.compile cannot trace ``decimal``.
    """
    return round(ratio * _BILLION)


def nearest_count(ratio: float, units: int) -> int:
    """``ratio * units`` rounded half up, with ``ratio`` as the decimal that was typed."""
    return (2 * _billionths(ratio) * units + _BILLION) // (2 * _BILLION)


def _hidden_units(units: int, mask_ratio: float, count: int | None, rounding: str) -> int:
    if count is not None:
        return count
    if rounding == "official":
        # int() of the double product, as in the official code: 60 units at .8 keep 11, not 12.
        return units - int(units * (1 - mask_ratio))
    return -(-_billionths(mask_ratio) * units // _BILLION)


def _fresh_units(units: int, hidden: int, views: int, pred_ratio: float | None, regulation: str) -> tuple[int, ...]:
    most = min(units, views * hidden)
    if regulation == "none":
        return (hidden,) * views
    if regulation == "complementary":
        kept = units - hidden
        if views < 2 or views * kept > units:
            most_views = units // kept
            cure = (
                f"2 <= views <= {most_views}"
                if most_views > 1
                else f"a mask_ratio of at least {-(-units // 2) / units:.6g}"
            )
            raise ValueError(
                f"complementary views need {cure}: each of views={views} keeps {kept} of {units} units, and no unit is "
                "kept twice"
            )
        return (hidden, kept) + (0,) * (views - 2)
    predicted = most if pred_ratio is None else nearest_count(pred_ratio, units)
    least = hidden + views - 1
    if least > units:
        raise ValueError(
            f"views={views} cannot each hide a unit that no earlier view hid, as regulation='disjoint' demands: a view "
            f"hides {hidden} of {units} units, so take views up to {units - hidden + 1}, or regulation='none'"
        )
    if not least <= predicted <= most:
        allowed = f"{most / units:.6g}" if least == most else f"between {least / units:.6g} and {most / units:.6g}"
        raise ValueError(
            f"pred_ratio={pred_ratio} asks for {predicted} of {units} units, but {views} view(s) that hide {hidden} "
            f"units each reach a pred_ratio of {allowed}"
        )
    if views == 1:
        return (hidden,)
    # Not divmod, which torch.compile does not trace for symbolic numbers.
    share, remainder = (predicted - hidden) // (views - 1), (predicted - hidden) % (views - 1)
    return (hidden, *(share + (later < remainder) for later in range(views - 1)))


def mask_plan(
    grid: tuple[int, int] | int,
    *,
    views: int,
    mask_ratio: float,
    pred_ratio: float | None = None,
    pattern: Pattern = "uniform",
    block: tuple[int, int] | int = (2, 2),
    regulation: Regulation = "disjoint",
    count: int | None = None,
    rounding: Rounding = "exact",
) -> MaskPlan:
    """Convert rates to exact counts. Errors name rates that work.

    Args:
        grid: (h, w) tokens, or one number for both.
        views: K, from 1 to 128.
        mask_ratio: m_corr, in (0, 1). A view masks ``ceil(m_corr * units)`` units, computed on exact decimals.
        pred_ratio: m_pred, the fraction of units masked by at least one view; None for the most that K views can mask.
        pattern: "uniform" (unit = one token), "block" (unit = ``block`` tokens) or "beit" (unit = one token; BEiT's
            random rectangles first, then single tokens until the count is exact).
        block: (rows, columns) tokens of a unit, or one number for both; used by "block" only.
        regulation: "disjoint" (the paper's Eq. 3), "none" (independent views) or "complementary" (disjoint keep-sets).
        count: masked units per view; overrides ``mask_ratio``.
        rounding: "exact", or "official" for the float truncation of the official code.

    Raises:
        TypeError: if an argument is not a number or an integer.
        ValueError: naming the argument and values that work.
    """
    for name, value, allowed in (
        ("pattern", pattern, PATTERNS),
        ("regulation", regulation, REGULATIONS),
        ("rounding", rounding, ROUNDINGS),
    ):
        choice(name, value, allowed)
    grid, block, views = pair("grid", grid), pair("block", block), integer("views", views)
    mask_ratio = number("mask_ratio", mask_ratio)
    pred_ratio = None if pred_ratio is None else number("pred_ratio", pred_ratio)
    count = None if count is None else integer("count", count)
    if not 1 <= views <= MAX_VIEWS:
        raise ValueError(f"views must be between 1 and {MAX_VIEWS}, got {views}")
    if not 0 < mask_ratio < 1:
        raise ValueError(f"mask_ratio must be between 0 and 1, exclusive, got {mask_ratio}")
    if pred_ratio is not None and not 0 < pred_ratio <= 1:
        raise ValueError(f"pred_ratio must be above 0 and at most 1, got {pred_ratio}")
    if pred_ratio is not None and regulation != "disjoint":
        raise ValueError(f"pred_ratio is set by regulation='disjoint' alone; with {regulation!r} leave it out")
    if pattern == "beit" and regulation == "complementary":
        raise ValueError("pattern='beit' needs regulation='disjoint' or 'none': sets of kept tokens are not rectangles")
    if min(grid) < 1:
        raise ValueError(f"grid must hold at least one token each way, got {grid}")
    if grid[0] * grid[1] > _MOST_TOKENS:
        raise ValueError(f"grid must hold at most {_MOST_TOKENS} tokens, got {grid}")
    unit = block if pattern == "block" else (1, 1)
    if min(unit) < 1 or grid[0] % unit[0] or grid[1] % unit[1]:
        raise ValueError(f"block {unit[0]}x{unit[1]} does not divide the token grid {grid[0]}x{grid[1]}")
    units = (grid[0] // unit[0]) * (grid[1] // unit[1])
    if pattern == "beit" and units > _MOST_RECTANGLE_UNITS:
        raise ValueError(f"pattern='beit' takes a grid of at most {_MOST_RECTANGLE_UNITS} tokens, got {grid}")
    if units < 2:
        raise ValueError(f"grid must have at least 2 units, one to hide and one to keep, got {grid} in units of {unit}")
    hidden = _hidden_units(units, mask_ratio, count, rounding)
    if not 1 <= hidden < units:
        asked = f"count={count}" if count is not None else f"mask_ratio={mask_ratio}"
        cure = (
            f"count between 1 and {units - 1}"
            if count is not None
            else f"mask_ratio between {-(-10_000 // units) / 10_000} and {(units - 1) * 10_000 // units / 10_000}"
        )
        raise ValueError(
            f"{asked} hides {hidden} of {units} units; a view must hide and keep at least 1, so {cure} works"
        )
    fresh = _fresh_units(units, hidden, views, pred_ratio, regulation)
    if pattern == "beit":
        return MaskPlan(grid, unit, hidden, fresh, regulation, _smallest_rectangle(hidden), ASPECT_RATIOS)
    return MaskPlan(grid, unit, hidden, fresh, regulation)
