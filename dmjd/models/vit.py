"""The plain ViT encoder over timm's blocks: visible tokens of each view only, or mask tokens in place of the others."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import PatchEmbed, resample_abs_pos_embed
from timm.models import beit
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.models.attention import ShortBeitAttention, ShortBlock
from dmjd.models.masked_image_model import Encoder, token_grid
from dmjd.models.mlp import Gelu
from dmjd.models.norm import layer_norm
from dmjd.ops.tokens import gather_tokens
from dmjd.ops.views import Views
from dmjd.positions import sincos_positions


class EncoderBlock(ShortBlock):
    """timm's block, whose two residual branches can be scaled row by row: stochastic depth drawn by the caller."""

    def forward(  # type: ignore[override]
        self, x: Tensor, branch_scale: Tensor | None = None, attention_bias: Tensor | None = None
    ) -> Tensor:
        """
        Args:
            x: ``[R, T, D]``, or ``[R, h, w, D]`` with attention on a grid.
            branch_scale: ``[2, R]`` for the attention and the MLP branch, or None for 1.
            attention_bias: None; :class:`BeitBlock` takes one.
        """
        assert attention_bias is None, "a bias of attention needs BEiT's blocks"
        if branch_scale is None:
            return super().forward(x)
        attention, mlp = branch_scale.to(x.dtype).unflatten(-1, (-1, *(1,) * (x.ndim - 1)))
        x = x + attention * self.attn(self.norm1(x))
        return x + mlp * self.mlp(self.norm2(x))


class BeitBlock(beit.Block):
    """timm's block of BEiT (queries and values have a bias, keys have none; layer scale), scaled likewise."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"act_layer": Gelu, **options})
        self.attn.__class__ = ShortBeitAttention  # timm's block takes no class; the parameters are drawn already

    def forward(self, x: Tensor, branch_scale: Tensor | None = None, attention_bias: Tensor | None = None) -> Tensor:
        """
        Args:
            x, branch_scale: as for :class:`EncoderBlock`.
            attention_bias: ``[heads, T, T]``, added to every row's scores, or None for 0.
        """
        if branch_scale is None:
            return super().forward(x, attention_bias)
        attention, mlp = branch_scale.to(x.dtype).unflatten(-1, (-1, *(1,) * (x.ndim - 1)))
        if self.gamma_1 is not None and self.gamma_2 is not None:
            attention, mlp = attention * self.gamma_1, mlp * self.gamma_2
        x = x + attention * self.attn(self.norm1(x), shared_rel_pos_bias=attention_bias)
        return x + mlp * self.mlp(self.norm2(x))


class LinearPatchEmbed(PatchEmbed):
    """timm's patch embedding, on CUDA as a matrix product.

    cuDNN's convolution transposes images and gradients and takes several times as long. The CPU keeps the convolution,
    and with it the bits of earlier runs.
    """

    def forward(self, images: Tensor) -> Tensor:
        """``[B, C, H, W] -> [B, N, D]``."""
        if images.is_cuda:
            return self.product(images)
        tokens: Tensor = super().forward(images)
        return tokens

    def product(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        """:meth:`forward`, or with ``visible [K, B, V]`` of the N patches these alone, ``[K*B, V, D]``."""
        patches = images
        for axis, side in ((3, self.patch_size[1]), (2, self.patch_size[0])):
            patches = patches.unflatten(axis, (-1, side))  # at last [B, C, h, p, w, p]
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        if visible is not None:
            # Not gather_tokens: torch.compile reads the visible patches straight from the images. These have no
            # gradient, whose sums would need a fixed order.
            ids = visible.unsqueeze(-1).expand(-1, -1, -1, patches.shape[2])
            patches = patches.expand(visible.shape[0], -1, -1, -1).gather(2, ids).flatten(0, 1)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class ViTEncoder(Encoder):
    """ViT for any image whose sides are multiples of the patch (of one size only with relative positions).

    Args:
        image_size: (height, width) pixels of pre-training; other sizes work at run time.
        patch_size: pixels per token side.
        in_chans: image channels, any number.
        class_token: prepend a learned token that no view masks (``num_prefix_tokens`` is then 1).
        masked_tokens: "drop" leaves masked tokens out (MAE); "mask_token" puts a learned token in their place before
            positions are added (BEiT, SimMIM, MaskFeat).
        positions: "sincos" is fixed, "learned" a table with a row for the class token, resampled for other grids, and
            "relative" BEiT's bias of attention, which needs mask tokens: dropped ones leave each row with pairs of its
            own. "learned_relative" has both, as CAE's fine-tuned models.
        block: "plain" is timm's, "beit" that of BEiT and SimMIM.
        bias_tables: of relative positions: "shared" by all blocks, as in pre-training, or one "per_block", as in BEiT's
            and SimMIM's fine-tuning.
        layer_scale: where the scales of a BEiT block's branches start; None leaves them out.

    Parameter names are those of timm's ``VisionTransformer`` and ``Beit``, and of BEiT's files. Fixed positions are a
    buffer outside the state dict, since they are a function of the grid (and a frozen parameter inside a checkpointed
    block breaks ZeRO-3).
    """

    blocks: nn.ModuleList
    mask_token: nn.Parameter | None

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
        masked_tokens: str = "drop",
        positions: str = "sincos",
        bias_tables: str = "shared",
        block: str = "plain",
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        learned, relative = positions in ("learned", "learned_relative"), positions in ("relative", "learned_relative")
        if relative and (block, masked_tokens) != ("beit", "mask_token"):
            raise ValueError(f"positions='{positions}' needs block='beit' and masked_tokens='mask_token'")
        if layer_scale is not None and block != "beit":
            raise ValueError(f"layer_scale={layer_scale} needs block='beit'")
        self.embed_dim = embed_dim
        self.patch_size = patch_size
        self.grid = token_grid(*image_size, patch_size)
        self.num_prefix_tokens = int(class_token)
        self.patch_embed = LinearPatchEmbed(
            img_size=image_size, patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, strict_img_size=False
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if class_token else None
        self.mask_token = nn.Parameter(torch.empty(1, 1, embed_dim)) if masked_tokens == "mask_token" else None
        self.positions: Tensor | None
        self.register_buffer(
            "positions", sincos_positions(self.grid, embed_dim) if positions == "sincos" else None, persistent=False
        )
        rows = self.num_prefix_tokens + self.grid[0] * self.grid[1]
        self.pos_embed = nn.Parameter(torch.empty(1, rows, embed_dim)) if learned else None
        shared = relative and bias_tables == "shared"
        self.rel_pos_bias = beit.RelativePositionBias(self.grid, num_heads) if shared else None
        self._one_grid = relative
        window = self.grid if relative and not shared else None
        self.blocks = nn.ModuleList(
            EncoderBlock(embed_dim, num_heads, mlp_ratio, qkv_bias=True, norm_layer=layer_norm)
            if block == "plain"
            else BeitBlock(
                embed_dim,
                num_heads,
                True,
                mlp_ratio,
                init_values=layer_scale or None,
                norm_layer=layer_norm,
                window_size=window,
            )
            for _ in range(depth)
        )
        self.norm = layer_norm(embed_dim)
        self.map_widths = (embed_dim,)

    def forward(
        self,
        images: Tensor,
        views: Views | None = None,
        branch_scales: Tensor | None = None,
        maps: tuple[int, ...] | None = None,
    ) -> Tensor | list[Tensor]:
        """See :class:`~dmjd.models.masked_image_model.Encoder`; ``maps`` are blocks, for its ``feature_maps``."""
        grid = self.grid_of(images, views)
        cls_token, positions = self._positions(grid, images.device)
        if views is None:
            x = self.patch_embed(images)
            x = x if positions is None else x + positions
        elif self.mask_token is None:
            assert positions is not None, "relative positions come with mask tokens"
            if images.is_cuda and not positions.requires_grad:
                x = self.patch_embed.product(images, views.visible) + positions[views.visible.flatten(0, 1)]
            else:
                x = gather_tokens(self.patch_embed(images) + positions, views.visible)
        else:
            x = self.patch_embed(images)
            x = torch.where(views.mask.unsqueeze(-1), self.mask_token.to(x.dtype), x).flatten(0, 1)
            x = x if positions is None else x + positions
        if self.on_grid:
            x = x.unflatten(1, grid)
        elif cls_token is not None:
            x = torch.cat((cls_token.to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1)
        bias = None
        if self.rel_pos_bias is not None:
            bias = self.rel_pos_bias()[:, 1 - self.num_prefix_tokens :, 1 - self.num_prefix_tokens :]
        outputs = {}
        for index, block in enumerate(self.blocks):
            x = block(x, None if branch_scales is None else branch_scales[index], bias)
            if maps is not None and index in maps:
                tokens = x if self.on_grid else x[:, self.num_prefix_tokens :].unflatten(1, grid)
                outputs[index] = tokens.permute(0, 3, 1, 2)
        if maps is not None:
            return [outputs[index] for index in maps]
        return self.norm(x.flatten(1, 2) if self.on_grid else x)

    def _positions(self, grid: tuple[int, int], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """The class token with its position ``[1, 1, D]``, and the positions of patches ``[N, D]``; None for none."""
        if self.pos_embed is None:
            if self.positions is None or grid == self.grid:
                return self.cls_token, self.positions
            return self.cls_token, sincos_positions(grid, self.embed_dim).to(device)
        table = self.pos_embed
        if grid != self.grid:
            table = resample_abs_pos_embed(table, list(grid), list(self.grid), num_prefix_tokens=self.num_prefix_tokens)
        positions = table[0, self.num_prefix_tokens :]
        return None if self.cls_token is None else self.cls_token + table[:, :1], positions

    def grid_of(self, images: Tensor, views: Views | None = None) -> tuple[int, int]:
        """Also raises ValueError where relative positions are those of another grid."""
        grid = super().grid_of(images, views)
        if self._one_grid and grid != self.grid:
            raise ValueError(
                f"relative positions are those of {self.grid[0]}x{self.grid[1]} tokens, got an image of "
                f"{grid[0]}x{grid[1]}"
            )
        return grid
