"""Numbers and tensors as callers pass them: the value in Python's own type, or an error of one line."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def shown(value: Any) -> str:
    """``value`` in a message: its repr in one line, or its type where that is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"a value of type {type(value).__name__}"


def integer(name: str, value: Any) -> int:
    """An integer of any type that Python takes for an index, numpy's and torch's among them, but no bool."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]  # a size that torch.compile keeps open
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, got {shown(value)}")


def pair(name: str, value: Any) -> tuple[int, int]:
    """Two integers (down, across); one stands for both."""
    if isinstance(value, (str, bytes, dict, set)):
        raise TypeError(f"{name} must be an integer or two integers, got {shown(value)}")
    try:
        sides = tuple(value)
    except TypeError:
        side = integer(name, value)
        return side, side
    if len(sides) != 2:
        raise ValueError(f"{name} must be an integer or two integers, got {shown(value)}")
    return integer(name, sides[0]), integer(name, sides[1])


def number(name: str, value: Any) -> float:
    """A real number of Python or numpy."""
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    # As text numpy's float32 is the decimal that was typed; as a double .6 would be 0.6000000238418579.
    return float(str(value)) if hasattr(value, "dtype") else float(value)


def require_tensors(op: str, **arguments: Any) -> None:
    """Raise TypeError for the first argument that is not a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {shown(value)}")
