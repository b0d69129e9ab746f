"""Reusable ops of masked image modelling. Imports torch and nothing else.

Every op has a PyTorch reference, which runs on any device without a compiler, and uses native kernels where they are
built; :func:`status` lists the kernel of each op.
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

# For torch.load with weights_only=True.
torch.serialization.add_safe_globals([MaskPlan, Views])
# For torch.export.save of programs that return Views.
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
