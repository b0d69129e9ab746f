"""timm's Swin as an encoder with mask tokens, as in SimMIM: a token is what one position of the last stage sees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock
from torch import Tensor, nn

from dmjd.models.attention import ShortWindowAttention
from dmjd.models.masked_image_model import Encoder, token_grid
from dmjd.models.mlp import Gelu
from dmjd.ops.views import Views

EMBED_SIDE = 4
"""Pixels per side of a patch of the first stage."""

PATCH_SIZE = 32
"""Pixels per side of a token: of a patch of the last stage, which is also SimMIM's unit of masking."""

_FINE = PATCH_SIZE // EMBED_SIDE


class SwinBlock(SwinTransformerBlock):
    """timm's block, whose two residual branches can be scaled row by row: stochastic depth drawn by the caller."""

    def forward(self, x: Tensor, branch_scale: Tensor | None = None) -> Tensor:
        """
        Args:
            x: ``[R, H, W, D]``.
            branch_scale: ``[2, R]`` for the attention and the MLP branch, or None for 1.
        """
        if branch_scale is None:
            return super().forward(x)
        attention, mlp = branch_scale.to(x.dtype).unflatten(-1, (-1, 1, 1, 1))
        x = x + attention * self._attn(self.norm1(x))
        return x + mlp * self.mlp(self.norm2(x))


class SwinEncoder(SwinTransformer, Encoder):
    """Swin over images of one size; a masked token's 8 x 8 first patches are replaced by a mask token.

    The blocks of :mod:`dmjd.models.dense.grid_attention` encode images of any size.

    Args:
        image_size: (height, width) pixels, multiples of 32.
        in_chans: image channels, any number.
        embed_dim: of the last stage; each stage before it has half the width of the next.
        depths, num_heads: of the four stages.
        window: side of a window, in tokens of its stage; a stage with fewer tokens is one window.
        mlp_ratio: of all stages.

    Parameters have timm's names, and the encoder's own ``mask_token``.
    """

    num_prefix_tokens = 0
    patch_size = PATCH_SIZE
    positions = None
    mask_token: nn.Parameter | None

    def __init__(
        self,
        *,
        image_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        depths: Sequence[int],
        num_heads: Sequence[int],
        window: int,
        mlp_ratio: float = 4.0,
    ) -> None:
        grid = token_grid(*image_size, PATCH_SIZE)
        first, rest = divmod(embed_dim, 8)
        if rest or any(first * 2**stage % heads for stage, heads in enumerate(num_heads)):
            raise ValueError(
                f"Swin's embed_dim must be 8 times a width whose doubles are divisible by num_heads {list(num_heads)}, "
                f"got {embed_dim}"
            )
        super().__init__(
            img_size=image_size,
            patch_size=EMBED_SIDE,
            in_chans=in_chans,
            num_classes=0,
            embed_dim=first,
            depths=tuple(depths),
            num_heads=tuple(num_heads),
            window_size=window,
            mlp_ratio=mlp_ratio,
            drop_path_rate=0.0,
        )
        for block in self.blocks:
            block.__class__ = SwinBlock  # timm's stage takes no classes; the parameters are drawn already
            attention: Any = block.attn
            attention.__class__ = ShortWindowAttention
            mlp: Any = block.mlp
            mlp.act = Gelu()
        self.embed_dim = embed_dim  # timm means the first stage's, an encoder of ours what comes out
        self.image_size = image_size
        self.grid = grid
        self.mask_token = nn.Parameter(torch.empty(1, 1, first))
        self.map_widths = tuple(first * 2**stage for stage in range(4))

    @property
    def blocks(self) -> list[nn.Module]:
        """Every residual block in order: what is recomputed and compiled as one."""
        stages: Any = self.layers
        return [block for stage in stages for block in stage.blocks]

    def layer_of(self, name: str) -> int | None:
        """As in SimMIM's fine-tuning: blocks are counted through the stages, and the patch merging in front of a stage
        belongs to the last block of the stage before it."""
        stages: Any = self.layers
        if found := re.match(r"layers\.(\d+)\.(?:downsample|blocks\.(\d+))\.", name):
            before = sum(len(stage.blocks) for stage in stages[: int(found[1])])
            return before if found[2] is None else before + int(found[2]) + 1
        return super().layer_of(name)

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        views: Views | None = None,
        branch_scales: Tensor | None = None,
        maps: tuple[int, ...] | None = None,
    ) -> Tensor | list[Tensor]:
        """See :class:`~dmjd.models.masked_image_model.Encoder`; with any ``maps`` its ``feature_maps``."""
        height, width = self.grid_of(images, views)
        x = self.patch_embed(images)  # [B, H/4, W/4, C]
        if views is not None:
            assert self.mask_token is not None
            masked = views.mask.unflatten(-1, (height, width))
            masked = masked.repeat_interleave(_FINE, -2).repeat_interleave(_FINE, -1)
            x = torch.where(masked.unsqueeze(-1), self.mask_token[0].to(x.dtype), x).flatten(0, 1)
        stages: Any = self.layers
        scales = iter([None] * len(self.blocks) if branch_scales is None else branch_scales)
        outputs = []
        for stage in stages:
            x = stage.downsample(x)
            for block in stage.blocks:
                x = block(x, next(scales))
            outputs.append(x.permute(0, 3, 1, 2))
        return self.norm(x).flatten(1, 2) if maps is None else outputs

    def grid_of(self, images: Tensor, views: Views | None = None) -> tuple[int, int]:
        """Raises ValueError for images of another size than it was built for, too."""
        if not self.on_grid and tuple(images.shape[-2:]) != self.image_size:
            raise ValueError(
                f"this Swin was built for images of {self.image_size[0]}x{self.image_size[1]}, got "
                f"{images.shape[-2]}x{images.shape[-1]}"
            )
        return super().grid_of(images, views)
