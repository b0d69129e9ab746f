"""Layer normalisation whose parameters may be kept in a narrower type than its input."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm``, with scale and shift in float32 at least, as autocast has it on CUDA and not on the CPU.

    They are narrower where parameters were made so for the way between devices; the input is the residual stream, which
    stays float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, _wide(self.weight), _wide(self.bias), self.eps)


def _wide(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.to(torch.promote_types(parameter.dtype, torch.float32))


# MAE, BEiT, SimMIM and MaskFeat all use this epsilon in their ViTs, where torch's default is 1e-5.
layer_norm: type[nn.Module] = partial(LayerNorm, eps=1e-6)  # type: ignore[assignment]  # timm only calls it
