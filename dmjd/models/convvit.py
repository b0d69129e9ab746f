"""ConvViT of ConvMAE (the paper: ConViT): two stages of convolution blocks, then a ViT; whole images or views.

In the first two stages every layer but the depthwise convolution looks at one pixel of its map, that convolution is
given zeros where a token is masked, and the embeddings between stages stay inside a token. A masked token thus never
reaches a visible one, and leaving it out is exact. So a view's activations are ``[R, V, q, q, C]``, the q x q pixels
that each visible token has in the map of a stage (4 x 4, 2 x 2, 1 x 1), where a whole image's are its map
``[B, H, W, C]``: the same layers over the last axes, and only the depthwise convolution tells the two apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.models.masked_image_model import Encoder, token_grid
from dmjd.models.mlp import Pointwise, PointwiseMlp
from dmjd.models.norm import layer_norm
from dmjd.models.vit import EncoderBlock
from dmjd.ops.images import patchify
from dmjd.ops.masked_depthwise_conv2d import masked_depthwise_conv2d
from dmjd.ops.tokens import gather_tokens
from dmjd.ops.views import Views
from dmjd.positions import sincos_positions

STRIDES = (4, 2, 2)
"""Of the three patch embeddings; a token is their product, 16 pixels, wide."""

PATCH_SIZE = math.prod(STRIDES)


class VisibleTokens(NamedTuple):
    """Where the token blocks of some views lie: ``visible [K, B, V]`` and ``restore [K, B, N]`` of
    :class:`~dmjd.ops.views.Views` on a token grid (h, w)."""

    visible: Tensor
    restore: Tensor
    grid: tuple[int, int]


class PatchConv2d(nn.Conv2d):
    """A convolution whose stride is its kernel, over maps or token blocks with channels last."""

    def __init__(self, in_channels: int, out_channels: int, side: int) -> None:
        super().__init__(in_channels, out_channels, side, stride=side)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H, W, C] -> [..., H / side, W / side, D]``."""
        side = self.kernel_size[0]
        *lead, height, width, channels = x.shape
        patches = x.reshape(*lead, height // side, side, width // side, side, channels).transpose(-4, -3).flatten(-3)
        return F.linear(patches, self.weight.permute(0, 2, 3, 1).flatten(1), self.bias)


class MaskedDepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution of a map, or of the visible tokens' blocks with zeros in place of the others."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)

    def forward(self, x: Tensor, where: VisibleTokens | None = None) -> Tensor:
        """``[B, H, W, C]``, or ``[K*B, V, q, q, C]`` with ``where``; the same shape comes back."""
        if where is None:
            return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        weight = self.weight.squeeze(1)
        side = x.shape[3]
        blocks = masked_depthwise_conv2d(
            x.flatten(2, 3), where.visible, where.restore, weight, self.bias, grid=where.grid, q=side
        )
        return blocks.unflatten(2, (side, side))


class PatchEmbedding(nn.Module):
    """Patch convolution, LayerNorm, GELU: ``[..., H, W, C] -> [..., H / side, W / side, D]``."""

    def __init__(self, in_channels: int, out_channels: int, side: int) -> None:
        super().__init__()
        self.proj = PatchConv2d(in_channels, out_channels, side)
        self.norm = nn.LayerNorm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.proj(x)))


class ConvBlock(nn.Module):
    """A transformer block whose attention is a 5 x 5 depthwise convolution between pointwise layers.

    Names are ConvMAE's, so ``attn`` is the depthwise convolution. Its norms have torch's eps of 1e-5.
    """

    def __init__(self, dim: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.conv1 = Pointwise(dim, dim)
        self.attn = MaskedDepthwiseConv2d(dim, 5)
        self.conv2 = Pointwise(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = PointwiseMlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, where: VisibleTokens | None = None, branch_scale: Tensor | None = None) -> Tensor:
        """
        Args:
            x: ``[R, H, W, C]``, or ``[R, V, q, q, C]`` with ``where``.
            branch_scale: ``[2, R]`` for the convolution and the MLP branch, or None for 1.
        """
        convolved = self.conv2(self.attn(self.conv1(self.norm1(x)), where))
        if branch_scale is None:
            x = x + convolved
            return x + self.mlp(self.norm2(x))
        convolution, mlp = branch_scale.to(x.dtype).unflatten(-1, (-1, *(1,) * (x.ndim - 1)))
        x = x + convolution * convolved
        return x + mlp * self.mlp(self.norm2(x))


class ConvViTEncoder(Encoder):
    """ConvViT with fixed sine-cosine positions, for any image whose sides are multiples of 16.

    Args:
        image_size: (height, width) pixels of pre-training; other sizes work at run time.
        in_chans: image channels, any number.
        embed_dims, depths, mlp_ratios: of the three stages.
        num_heads: of the third.
        multi_scale: with views, add the outputs of stages 1 and 2 to that of stage 3 before the last norm. Whole images
            go without, as in ConvMAE's fine-tuning and probing.

    Parameters have the names and shapes of ConvMAE's and DMJD's files. Positions are a buffer outside the state dict,
    as in :class:`~dmjd.models.vit.ViTEncoder`.
    """

    num_prefix_tokens = 0
    mask_token = None
    patch_size = PATCH_SIZE

    def __init__(
        self,
        *,
        image_size: tuple[int, int],
        in_chans: int,
        embed_dims: Sequence[int],
        depths: Sequence[int],
        mlp_ratios: Sequence[float],
        num_heads: int,
        multi_scale: bool = True,
    ) -> None:
        super().__init__()
        for name, values in (("embed_dims", embed_dims), ("depths", depths), ("mlp_ratios", mlp_ratios)):
            if len(values) != 3:
                raise ValueError(f"{name} must hold one value for each of the 3 stages, got {list(values)}")
        self.grid = token_grid(*image_size, PATCH_SIZE)
        self.embed_dims = tuple(embed_dims)
        self.embed_dim = embed_dims[2]
        self.patch_embed1 = PatchEmbedding(in_chans, embed_dims[0], STRIDES[0])
        self.patch_embed2 = PatchEmbedding(embed_dims[0], embed_dims[1], STRIDES[1])
        self.patch_embed3 = PatchEmbedding(embed_dims[1], embed_dims[2], STRIDES[2])
        self.patch_embed4 = nn.Linear(self.embed_dim, self.embed_dim)
        self.blocks1 = nn.ModuleList(ConvBlock(embed_dims[0], mlp_ratios[0]) for _ in range(depths[0]))
        self.blocks2 = nn.ModuleList(ConvBlock(embed_dims[1], mlp_ratios[1]) for _ in range(depths[1]))
        self.blocks3 = nn.ModuleList(
            EncoderBlock(self.embed_dim, num_heads, mlp_ratios[2], qkv_bias=True, norm_layer=layer_norm)
            for _ in range(depths[2])
        )
        self.stage1_output_decode = PatchConv2d(embed_dims[0], self.embed_dim, 4) if multi_scale else None
        self.stage2_output_decode = PatchConv2d(embed_dims[1], self.embed_dim, 2) if multi_scale else None
        self.norm = layer_norm(self.embed_dim)
        self.map_widths = self.embed_dims
        self.positions: Tensor
        self.register_buffer("positions", sincos_positions(self.grid, self.embed_dim), persistent=False)
        # As in ConvMAE, where every other convolution keeps torch's initialisation.
        nn.init.xavier_uniform_(self.patch_embed3.proj.weight.view(self.embed_dim, -1))

    @property
    def blocks(self) -> list[nn.Module]:
        """Every residual block in order: what is recomputed, compiled and dropped as one."""
        return [*self.blocks1, *self.blocks2, *self.blocks3]

    @property
    def layers_of_blocks(self) -> int:
        """The blocks of stage 3: the convolution stages belong to the embeddings, as in ConvMAE's fine-tuning."""
        return len(self.blocks3)

    def layer_of(self, name: str) -> int | None:
        """See :class:`~dmjd.models.masked_image_model.Encoder`."""
        if re.match(r"(patch_embed[1-4]|blocks[12]|stage[12]_output_decode)\.", name):
            return 0
        return super().layer_of(name.replace("blocks3.", "blocks.", 1))

    def forward(
        self,
        images: Tensor,
        views: Views | None = None,
        branch_scales: Tensor | None = None,
        maps: tuple[int, ...] | None = None,
    ) -> Tensor | list[Tensor]:
        """See :class:`~dmjd.models.masked_image_model.Encoder`; with any ``maps`` its ``feature_maps``."""
        stage1, stage2, x = self.forward_stages(images, views, branch_scales)
        if maps is not None:
            last = x if self.on_grid else x.unflatten(1, self.grid_of(images))
            return [stage.permute(0, 3, 1, 2) for stage in (stage1, stage2, last)]
        if self.on_grid:
            x = x.flatten(1, 2)
        if views is not None and self.stage1_output_decode is not None and self.stage2_output_decode is not None:
            x = x + self.stage1_output_decode(stage1).flatten(1, -2) + self.stage2_output_decode(stage2).flatten(1, -2)
        return self.norm(x)

    def forward_stages(
        self, images: Tensor, views: Views | None = None, branch_scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of the three stages, for the arguments of :meth:`forward`: ``[B, H/4, W/4, C1]``,
        ``[B, H/8, W/8, C2]`` and ``[B, N, D]`` (``[B, h, w, D]`` if ``on_grid``), or with views
        ``[K*B, V, 4, 4, C1]``, ``[K*B, V, 2, 2, C2]`` and ``[K*B, V, D]``."""
        grid = self.grid_of(images, views)
        if views is None:
            x, where = images.permute(0, 2, 3, 1), None
        else:
            # Pixels are gathered before they are embedded: they are 5 to 8 times fewer values than the embedding, need
            # no gradient, and K views seldom show more tokens together than the image has.
            pixels = gather_tokens(patchify(images, PATCH_SIZE), views.visible)
            x = pixels.unflatten(-1, (PATCH_SIZE, PATCH_SIZE, images.shape[1]))
            where = VisibleTokens(views.visible, views.restore, grid)
        scales = iter([None] * len(self.blocks) if branch_scales is None else branch_scales)
        outputs = []
        for embedding, blocks in ((self.patch_embed1, self.blocks1), (self.patch_embed2, self.blocks2)):
            x = embedding(x)
            for block in blocks:
                x = block(x, where, next(scales))
            outputs.append(x)
        x = self.patch_embed4(self.patch_embed3(x)).flatten(1, -2) + self._positions(grid, views, images.device)
        if self.on_grid:
            x = x.unflatten(1, grid)
        for block in self.blocks3:
            x = block(x, next(scales))
        return outputs[0], outputs[1], x

    def _positions(self, grid: tuple[int, int], views: Views | None, device: torch.device) -> Tensor:
        """``[N, D]``, or of visible tokens ``[K*B, V, D]``."""
        positions = self.positions if grid == self.grid else sincos_positions(grid, self.embed_dim).to(device)
        return positions if views is None else positions[views.visible.flatten(0, 1)]
