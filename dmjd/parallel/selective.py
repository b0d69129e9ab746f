"""Op-selective activation checkpointing: which outputs of a block are kept, and which are computed again.

Kept are matrix products, attention and the depthwise convolution: they are most of a block's time. Recomputed are
norms, activations, casts and additions, which cost little more than the memory traffic that reading them back would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

import dmjd.ops  # noqa: F401 -- defines torch.ops.dmjd

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
    """A policy of :func:`dmjd.models.recompute.recompute`; it looks at the op and at shapes, and counts nothing.

    A product that narrows is the end of an MLP. No backward pass reads its output, so it is not kept; nor is it
    computed again, since recomputation ends with the last activation that is needed.
    """
    if op in _PRODUCTS:
        inner, outer = args[_PRODUCTS[op]].shape
        kept = outer >= inner
    else:
        kept = op in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
