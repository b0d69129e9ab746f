"""Activation checkpointing of a module, whole or op-selective, switched on and off in place."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dmjd.ops  # noqa: F401 -- defines torch.ops.dmjd

Policy = Callable[..., CheckpointPolicy]
"""``policy(context, op, *args, **kwargs)`` decides whether the output of ``op`` is kept. It is called in the forward
pass and again while recomputing, so it must be a function of its arguments."""


class _Recomputing:
    """Marks the classes that :func:`recompute` makes."""


def recompute(module: nn.Module, enable: bool = True, policy: Policy | None = None) -> None:
    """Have ``module`` keep its inputs and the outputs that ``policy`` names, and compute the rest again in the
    backward pass. Names do not change.

    The module gets a subclass of its class, one for all modules of a kind: to a compiler they remain the same code,
    where a forward wrapped for each instance would be compiled for each, up to the limit of recompilations.
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
        # torch.compile does not cache the graph without a hash of what the policy computes, here of its file.
        source = Path(inspect.getfile(policy)).read_bytes()
        contexts["context_fn"].cache_hash = f"{policy.__qualname__} {hashlib.sha256(source).hexdigest()}"

    class Recomputing(_Recomputing, kind):  # type: ignore[misc, valid-type]
        def forward(self, *inputs: Any) -> Any:
            return checkpoint(super().forward, *inputs, use_reentrant=False, **contexts)

        def __reduce__(self) -> tuple[Any, ...]:
            return _bare, (kind, policy), self.__dict__  # pickle does not find a class that is made here

    return Recomputing


def _bare(kind: type[nn.Module], policy: Policy | None) -> nn.Module:
    made = _recomputing(kind, policy)  # type: ignore[arg-type]  # classes hash
    return made.__new__(made)


_aten = torch.ops.aten

_PRODUCTS = {_aten.mm.default: 1, _aten.addmm.default: 2}
"""Matrix products, and which of their arguments is the matrix ``[in, out]`` of a linear layer."""

_EXPENSIVE = {
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.dmjd.masked_depthwise_conv2d.default,
    torch.ops.dmjd.short_attention.default,
    torch.ops.dmjd.short_attention_packed.default,
}


def keep_expensive(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy of :func:`recompute` that depends on the op and on shapes alone, and counts nothing.

    Kept are matrix products, attention and the depthwise convolution: most of a block's time. Recomputed are norms,
    activations, casts and additions, which cost little more than the memory traffic of reading them back would.

    A product that narrows is the end of an MLP. No backward pass reads its output, so it is not kept; nor is it
    computed again, since recomputation ends with the last activation that is needed.
    """
    if op in _PRODUCTS:
        inner, outer = args[_PRODUCTS[op]].shape
        kept = outer >= inner
    else:
        kept = op in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
