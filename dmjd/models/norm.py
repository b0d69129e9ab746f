"""The layer normalisation of the published ViTs."""

from __future__ import annotations

from functools import partial

from torch import nn

# MAE, BEiT, SimMIM and MaskFeat all use this epsilon in their ViTs, where torch's default is 1e-5.
layer_norm: type[nn.Module] = partial(nn.LayerNorm, eps=1e-6)  # type: ignore[assignment]  # timm only calls it
