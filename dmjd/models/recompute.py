"""Activation checkpointing of a module, switched on and off in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Policy = Callable[..., CheckpointPolicy]
"""``policy(context, op, *args, **kwargs)`` says whether the output of ``op`` is kept. It is asked in the forward pass
and again while recomputing, so it must be a function of its arguments: one that counts calls must count both apart."""


class _Recomputing:
    """Marks the classes that :func:`recompute` makes."""


def recompute(module: nn.Module, enable: bool = True, policy: Policy | None = None) -> None:
    """Have ``module`` keep its inputs and the outputs that ``policy`` names, and compute the rest again in the
    backward pass. Names do not change.

    The module gets a subclass of its class, one for all modules of a kind: to a compiler they remain the same code,
    where a forward wrapped for each instance would be compiled for each, until it refuses.
    """
    kind = type(module)
    if enable and not isinstance(module, _Recomputing):
        module.__class__ = _recomputing(kind, policy)  # type: ignore[arg-type]  # classes hash
    elif not enable and isinstance(module, _Recomputing):
        module.__class__ = kind.__bases__[1]


@cache
def _recomputing(kind: type[nn.Module], policy: Policy | None) -> type[nn.Module]:
    contexts: dict[str, Any] = {}
    if policy is not None:
        contexts["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    class Recomputing(_Recomputing, kind):  # type: ignore[misc, valid-type]
        def forward(self, *inputs: Any) -> Any:
            return checkpoint(super().forward, *inputs, use_reentrant=False, **contexts)

    return Recomputing
