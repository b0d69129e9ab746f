"""Activation checkpointing of a module, switched on and off in place."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class _Recomputing:
    """Marks the classes that :func:`recompute` makes."""


def recompute(module: nn.Module, enable: bool = True) -> None:
    """Have ``module`` keep its inputs alone, and compute the rest again in the backward pass. Names do not change.

    The module gets a subclass of its class, one for all modules of a kind: to a compiler they remain the same code,
    where a forward wrapped for each instance would be compiled for each, until it refuses.
    """
    kind = type(module)
    if enable and not isinstance(module, _Recomputing):
        module.__class__ = _recomputing(kind)  # type: ignore[arg-type]  # classes hash
    elif not enable and isinstance(module, _Recomputing):
        module.__class__ = kind.__bases__[1]


@cache
def _recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    class Recomputing(_Recomputing, kind):  # type: ignore[misc, valid-type]
        def forward(self, *inputs: Any) -> Any:
            return checkpoint(super().forward, *inputs, use_reentrant=False)

    return Recomputing
