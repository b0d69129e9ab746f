"""The plain ViT encoder over timm's blocks: visible tokens of each view only, or mask tokens in place of the others."""

from __future__ import annotations

import torch
from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from dmjd.models.norm import layer_norm
from dmjd.models.positions import sincos_positions
from dmjd.ops.tokens import gather_tokens
from dmjd.ops.views import Views

HIDDEN = ("drop", "mask_token")


class EncoderBlock(Block):
    """timm's block, whose two residual branches can be scaled row by row: stochastic depth drawn by the caller."""

    def forward(self, x: Tensor, branch_scale: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """
        Args:
            x: ``[R, T, D]``.
            branch_scale: ``[2, R]`` for the attention and the MLP branch, or None for 1.
        """
        if branch_scale is None:
            return super().forward(x)
        attention, mlp = branch_scale.to(x.dtype).unflatten(-1, (-1, 1, 1))
        x = x + attention * self.attn(self.norm1(x))
        return x + mlp * self.mlp(self.norm2(x))


class ViTEncoder(nn.Module):
    """ViT with fixed sine-cosine positions, for any image whose sides are multiples of the patch.

    Args:
        image_size: (height, width) pixels of pre-training; other sizes work at run time.
        patch_size: pixels per token side.
        in_chans: image channels, any number.
        class_token: prepend a learned token that no view hides (``num_prefix_tokens`` is then 1).
        hidden: "drop" leaves hidden tokens out (MAE); "mask_token" puts a learned token in their place before positions
            are added (BEiT, SimMIM, MaskFeat).

    Parameter names are timm's ``VisionTransformer`` names. Positions are a buffer outside the state dict, since they
    are a function of the grid (and a frozen parameter inside a checkpointed block breaks ZeRO-3).
    """

    def __init__(
        self,
        *,
        image_size: tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        class_token: bool = True,
        hidden: str = "drop",
    ) -> None:
        super().__init__()
        if hidden not in HIDDEN:
            raise ValueError(f"hidden must be one of {', '.join(HIDDEN)}, got {hidden!r}")
        if any(side % patch_size for side in image_size):
            raise ValueError(
                f"image size {image_size[0]}x{image_size[1]} is not divisible by the patch size {patch_size}"
            )
        self.embed_dim = embed_dim
        self.patch_size = patch_size
        self.grid = (image_size[0] // patch_size, image_size[1] // patch_size)
        self.num_prefix_tokens = int(class_token)
        self.patch_embed = PatchEmbed(
            img_size=image_size, patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, strict_img_size=False
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if class_token else None
        self.mask_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if hidden == "mask_token" else None
        self.positions: Tensor
        self.register_buffer("positions", sincos_positions(self.grid, embed_dim), persistent=False)
        self.blocks = nn.ModuleList(
            EncoderBlock(embed_dim, num_heads, mlp_ratio, qkv_bias=True, norm_layer=layer_norm) for _ in range(depth)
        )
        self.norm = layer_norm(embed_dim)

    def forward(self, images: Tensor, views: Views | None = None, branch_scales: Tensor | None = None) -> Tensor:
        """Normalised tokens of whole images, or of each view of them.

        Args:
            images: float ``[B, C, H, W]``.
            views: None encodes all N tokens; otherwise K views.
            branch_scales: ``[depth, 2, K*B]``, stochastic depth as :mod:`dmjd.train.drop_path` draws it; None for none.

        Returns:
            ``[B, prefix + N, D]`` without views; ``[K*B, prefix + V, D]`` for "drop"; ``[K*B, prefix + N, D]`` for
            "mask_token".

        Raises:
            ValueError: if a side is not a multiple of the patch, or ``views`` are of another batch or grid.
        """
        grid = self.grid_of(images)
        if views is not None and views.restore.shape[1:] != (images.shape[0], grid[0] * grid[1]):
            raise ValueError(
                f"views of {views.restore.shape[1]} images with {views.restore.shape[2]} tokens do not fit "
                f"{images.shape[0]} images with {grid[0]}x{grid[1]} tokens"
            )
        positions = self.positions if grid == self.grid else sincos_positions(grid, self.embed_dim).to(images.device)
        x = self.patch_embed(images)
        if views is None:
            x = x + positions
        elif self.mask_token is None:
            x = gather_tokens(x + positions, views.visible)
        else:
            x = torch.where(views.mask.unsqueeze(-1), self.mask_token.to(x.dtype), x).flatten(0, 1) + positions
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1)
        for index, block in enumerate(self.blocks):
            x = block(x, None if branch_scales is None else branch_scales[index])
        return self.norm(x)

    def grid_of(self, images: Tensor) -> tuple[int, int]:
        """(h, w) tokens of ``images``. Raises ValueError if a side is not a multiple of the patch."""
        height, width = images.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(f"image size {height}x{width} is not divisible by the patch size {self.patch_size}")
        return height // self.patch_size, width // self.patch_size
