"""timm's Swin as an encoder with mask tokens, as in SimMIM: a token is what one position of the last stage sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from dmjd.ops.views import Views

EMBED_SIDE = 4
"""Pixels per side of a patch of the first stage."""

PATCH_SIZE = 32
"""Pixels per side of a token: of a patch of the last stage, which is also SimMIM's unit of masking."""

_FINE = PATCH_SIZE // EMBED_SIDE


class SwinEncoder(SwinTransformer):
    """Swin over images of one size; a hidden token's 8 x 8 first patches are replaced by a mask token.

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
        if image_size[0] % PATCH_SIZE or image_size[1] % PATCH_SIZE:
            raise ValueError(
                f"image size {image_size[0]}x{image_size[1]} is not divisible by Swin's patch size of {PATCH_SIZE}"
            )
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
        self.embed_dim = embed_dim  # timm means the first stage's, an encoder of ours what comes out
        self.image_size = image_size
        self.grid = (image_size[0] // PATCH_SIZE, image_size[1] // PATCH_SIZE)
        self.mask_token = nn.Parameter(torch.empty(1, 1, first))

    @property
    def blocks(self) -> list[nn.Module]:
        """Every residual block in order: what is recomputed and compiled as one."""
        stages: Any = self.layers
        return [block for stage in stages for block in stage.blocks]

    def forward(self, images: Tensor, views: Views | None = None, branch_scales: Tensor | None = None) -> Tensor:
        """Normalised tokens of whole images, or of each view of them.

        Args:
            images: float ``[B, C, H, W]``.
            views: None for whole images; otherwise K views on the grid of 32 x 32 pixels.
            branch_scales: None; timm's blocks take no draws.

        Returns:
            ``[B, N, D]`` without views, ``[K*B, N, D]`` with them.

        Raises:
            ValueError: if the images are of another size, or ``views`` of another batch or grid.
        """
        assert branch_scales is None, "the configuration refuses stochastic depth for Swin"
        height, width = self.grid_of(images)
        x = self.patch_embed(images)  # [B, H/4, W/4, C]
        if views is not None:
            if views.restore.shape[1:] != (images.shape[0], height * width):
                raise ValueError(
                    f"views of {views.restore.shape[1]} images with {views.restore.shape[2]} tokens do not fit "
                    f"{images.shape[0]} images with {height}x{width} tokens"
                )
            hidden = views.mask.unflatten(-1, (height, width))
            hidden = hidden.repeat_interleave(_FINE, -2).repeat_interleave(_FINE, -1)
            x = torch.where(hidden.unsqueeze(-1), self.mask_token[0].to(x.dtype), x).flatten(0, 1)
        return self.norm(self.layers(x)).flatten(1, 2)

    def grid_of(self, images: Tensor) -> tuple[int, int]:
        """(h, w) tokens of ``images``. Raises ValueError if they are of another size than was built for."""
        if tuple(images.shape[-2:]) != self.image_size:
            raise ValueError(
                f"this Swin was built for images of {self.image_size[0]}x{self.image_size[1]}, got "
                f"{images.shape[-2]}x{images.shape[-1]}"
            )
        return self.grid
