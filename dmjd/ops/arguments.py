"""Check arguments of ops and convert them to Python types; errors have one line."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def shown(value: Any) -> str:
    """``value`` for a message: its repr in one line, or its type if that is longer than 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"a value of type {type(value).__name__}"


def integer(name: str, value: Any) -> int:
    """Convert an integer of any index type, of numpy and torch too; rejects bool."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value  # type: ignore[return-value]  # a symbolic size of torch.compile
    try:
        if not isinstance(value, bool) and getattr(value, "dtype", None) is not torch.bool:
            return operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError for a tensor without a value, as on "meta"
        pass
    raise TypeError(f"{name} must be an integer, got {shown(value)}")


def pair(name: str, value: Any) -> tuple[int, int]:
    """Convert to two integers (down, across); one number is used for both."""
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
    """Convert a real number of Python or numpy."""
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    # str() of a numpy float32 gives the decimal that was typed; float() would give 0.6000000238418579 for .6.
    try:
        return float(str(value)) if hasattr(value, "dtype") else float(value)
    except OverflowError:
        raise ValueError(f"{name} must be in the range of a float, got {shown(value)}") from None


def choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")


def require_tensors(op: str, **arguments: Any) -> None:
    """Raise TypeError for the first argument that is not a dense tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {shown(value)}")
        if value.layout != torch.strided or value.is_nested:
            kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
            raise TypeError(f"{op}: {name} must be a dense tensor, got {kind}")
