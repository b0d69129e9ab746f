"""Reusable ops of masked image modelling. Needs torch and nothing else.

Every op has a PyTorch reference that works on any device without a compiler, and gains native kernels where they are
built: :func:`status` tells which kernel serves which op.
"""

import torch.serialization
import torch.utils._pytree

from dmjd.ops._lib import reference, status
from dmjd.ops._native import build_info
from dmjd.ops.flops import register as _register_flops
from dmjd.ops.gelu_mlp import gelu_mlp
from dmjd.ops.hog import hog
from dmjd.ops.images import horizontal_flip, normalise, patchify, unpatchify
from dmjd.ops.mask_plan import MaskPlan, mask_plan
from dmjd.ops.masked_depthwise_conv2d import masked_depthwise_conv2d
from dmjd.ops.masks import disjoint_masks, draw_masks
from dmjd.ops.philox import Domain, keyed_bits, keyed_uniform, make_key, philox4x32
from dmjd.ops.short_attention import short_attention, short_attention_packed
from dmjd.ops.tokens import gather_tokens, scatter_tokens
from dmjd.ops.views import Views

# torch.load reads them with weights_only=True: they hold tensors and numbers.
torch.serialization.add_safe_globals([MaskPlan, Views])
# torch.export.save writes programs that return them.
torch.utils._pytree._register_namedtuple(Views, serialized_type_name="dmjd.ops.views.Views")
_register_flops()

__all__ = [
    "Domain",
    "MaskPlan",
    "Views",
    "build_info",
    "disjoint_masks",
    "draw_masks",
    "gather_tokens",
    "gelu_mlp",
    "hog",
    "horizontal_flip",
    "keyed_bits",
    "keyed_uniform",
    "make_key",
    "mask_plan",
    "masked_depthwise_conv2d",
    "normalise",
    "patchify",
    "philox4x32",
    "reference",
    "scatter_tokens",
    "short_attention",
    "short_attention_packed",
    "status",
    "unpatchify",
]
