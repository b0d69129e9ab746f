"""Formatting of values on a page and in a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from dmjd.evaluate import Column

ABSENT = "-"


def look_up(config: Any, keys: Iterable[str]) -> Any:
    """The value under nested ``keys``; None where another version's configuration has no such section or key."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def name_of(section: Any) -> str:
    """The name in a section of the configuration; early versions have the name in place of a section."""
    return plain(section.get("name") if isinstance(section, Mapping) else section)


def plain(value: Any) -> str:
    """Any value of a configuration or a record; a dash for None and for an empty text."""
    if value is None or value == "":
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return " ".join(map(plain, value))
    return str(value)


def rate(value: Any) -> str:
    """A fraction as per cent."""
    return ABSENT if value is None else f"{100 * value:.1f} %"


def duration(seconds: float) -> str:
    """Wall time; a dash if it is not finite."""
    if not math.isfinite(seconds):
        return ABSENT
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def hours(value: float) -> str:
    """Whole hours from 100 on, as in the paper; three digits below."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    """A speed-up as in the paper: ``1x``, ``1.8x``; two digits for a slow-down."""
    digits = f"{ratio:.1f}" if ratio >= 0.995 else f"{ratio:.2g}"
    return digits.removesuffix(".0") + "x"


def scores(values: list[float | None], column: Column) -> list[str]:
    """A column of scores; those in per cent with the decimals that the values need: one, as in the paper, or two."""
    one = column.unit == "%" and all(value is None or round(value, 1) == round(value, 2) for value in values)
    return [ABSENT if value is None else f"{value:.1f}" if one else column.format(value) for value in values]


def spread(values: Sequence[float], column: Column) -> str:
    """The mean of several scores, their sample standard deviation and their number: "60.10 ± 0.52 (3)"."""
    return f"{column.format(mean(values))} ± {column.format(stdev(values))} ({len(values)})"
