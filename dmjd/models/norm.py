"""Layer normalisation whose parameters may have a narrower dtype than its input."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with scale and shift in at least float32, as under autocast on CUDA, but not on the CPU.

    FSDP gathers them in bfloat16; the input is the residual stream, which stays float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, _wide(self.weight), _wide(self.bias), self.eps)


def _wide(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.to(torch.promote_types(parameter.dtype, torch.float32))


# MAE, BEiT, SimMIM and MaskFeat all use this epsilon in their ViTs, where torch's default is 1e-5.
layer_norm: type[nn.Module] = partial(LayerNorm, eps=1e-6)  # type: ignore[assignment]  # timm only calls it
