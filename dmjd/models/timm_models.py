"""ConvViT as a timm model: classification, feature maps, layer decay.

``import dmjd.models.timm_models`` registers it:

    timm.create_model("convvit_base_patch16", num_classes=100, drop_path_rate=0.1)
    timm.create_model("convvit_base_patch16", features_only=True)       # maps at strides 4, 8 and 16

(timm's own ``convit_*`` is another model, Facebook's gated positional self-attention.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    register_notrace_function,
    register_notrace_module,
)
from torch import Tensor, nn

from dmjd.models.attention import ShortAttention
from dmjd.models.convvit import PATCH_SIZE, STRIDES, ConvViTEncoder, MaskedDepthwiseConv2d, PatchEmbedding
from dmjd.models.masked_image_model import token_grid
from dmjd.models.mlp import Pointwise
from dmjd.models.norm import layer_norm
from dmjd.models.recompute import recompute
from dmjd.positions import sincos_positions

POOLS = ("avg", "")


class ConvViT(ConvViTEncoder):
    """The encoder of whole images with a classifier: mean of the tokens, LayerNorm (``fc_norm``), linear.

    Args:
        img_size: pixels, an integer or (height, width); other multiples of 16 work at run time.
        num_classes: 0 gives features.
        global_pool: "avg", or "" for the map ``[B, h, w, D]`` that the last norm of pre-training normalises.
        drop_path_rate: of the last block; grows linearly from 0 at the first.
        fc_norm: normalise after pooling instead of before; by default where tokens are averaged.
        The others: see :class:`~dmjd.models.convvit.ConvViTEncoder`.
    """

    output_fmt = "NHWC"

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (256, 384, 768),
        depths: Sequence[int] = (2, 2, 11),
        mlp_ratios: Sequence[float] = (8, 8, 4),
        num_heads: int = 12,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        fc_norm: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        with nullcontext() if device is None else torch.device(device):
            super().__init__(
                image_size=(img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1]),
                in_chans=in_chans,
                embed_dims=embed_dims,
                depths=depths,
                mlp_ratios=mlp_ratios,
                num_heads=num_heads,
                multi_scale=False,
            )
            head_norm = layer_norm(self.embed_dim)
        self.in_chans, self.stages = in_chans, len(embed_dims)
        self.num_features = self.head_hidden_size = self.embed_dim
        self.feature_info = [
            {"num_chs": width, "reduction": reduction, "module": f"blocks{stage}"}
            for stage, (width, reduction) in enumerate(zip(embed_dims, _reductions(), strict=True), 1)
        ]
        self.drop_path_rate = drop_path_rate
        if global_pool == "avg" if fc_norm is None else fc_norm:
            self.norm, self.fc_norm = nn.Identity(), head_norm
        else:
            self.fc_norm = nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.to(dtype=dtype)
        self.reset_classifier(num_classes, global_pool)

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        """``[B, C, H, W]`` -> logits ``[B, num_classes]``, or features ``[B, D]`` without classes."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """``[B, C, H, W]`` -> the map of tokens ``[B, h, w, D]``."""
        return self.norm(self._maps(images, self.stages)[-1])

    def _maps(self, images: Tensor, stages: int) -> list[Tensor]:
        """Outputs ``[B, h, w, D]`` of the first ``stages`` stages, without the last norm."""
        scales = self._draw_branch_scales(images)
        drawn = iter([None] * len(self.blocks) if scales is None else scales)
        x, maps = images.permute(0, 2, 3, 1), []
        for embedding, blocks in ((self.patch_embed1, self.blocks1), (self.patch_embed2, self.blocks2))[:stages]:
            x = embedding(x)
            for block in blocks:
                x = block(x, None, next(drawn))
            maps.append(x)
        grid = image_grid(images)
        if stages > 2:
            x = self.patch_embed4(self.patch_embed3(x)).flatten(1, 2) + positions_on(grid, self.grid, self.positions)
            for block in self.blocks3:
                x = block(x, next(drawn))
            maps.append(x.unflatten(1, grid))
        return maps

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """``[B, h, w, D]`` -> ``[B, num_classes]``; pooled features with ``pre_logits``."""
        x = tokens.mean((1, 2)) if self.global_pool == "avg" else tokens
        x = self.head_drop(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps of the three stages at strides 4, 8 and 16, ``[B, C, h, w]``, of which ``indices`` names some.

        Returns:
            The maps, or (map of :meth:`forward_features`, maps). ``stop_early`` leaves out stages after the last map.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be NCHW, got {output_fmt!r}")
        taken = _stages(indices)
        maps = self._maps(x, max(taken) + 1 if stop_early else self.stages)
        normed = self.norm(maps[-1])
        if norm and len(maps) == 3:
            maps[2] = normed
        chosen = [maps[index].permute(0, 3, 1, 2).contiguous() for index in taken]
        return chosen if intermediates_only else (normed, chosen)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for ``num_classes``, none for 0."""
        if global_pool is not None:
            if global_pool not in POOLS:
                raise ValueError(f"global_pool must be one of {', '.join(map(repr, POOLS))}, got {global_pool!r}")
            self.global_pool = global_pool
        self.num_classes = num_classes
        like = next(self.parameters())
        head = nn.Linear(self.embed_dim, num_classes, device=like.device, dtype=like.dtype) if num_classes else None
        self.head: nn.Module = (head or nn.Identity()).train(self.training)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Keep the stages that the maps ``indices`` need, and of the last norm and the head what they leave."""
        taken = _stages(indices)
        self.stages = max(taken) + 1
        for stage in range(self.stages + 1, 4):
            setattr(self, f"blocks{stage}", nn.ModuleList())
        if self.stages < 3:
            for stage in range(self.stages + 1, 5):
                setattr(self, f"patch_embed{stage}", nn.Identity())
            self.embed_dim = self.num_features = self.head_hidden_size = self.embed_dims[max(taken)]
        if prune_norm or self.stages < 3:
            self.norm = nn.Identity()
        if prune_head or self.stages < 3:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return taken

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass."""
        for block in self.blocks:
            recompute(block, enable)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for layer-wise decay: the convolution stages belong to the stem, as in ConvMAE's fine-tuning."""
        # Parameters without a group (norms, head) come after the last block.
        return {"stem": r"^patch_embed|^blocks[12]\.", "blocks": r"^blocks3\.(\d+)"}

    def no_weight_decay(self) -> set[str]:
        return set()

    def _draw_branch_scales(self, images: Tensor) -> Tensor | None:
        if not self.training or not self.drop_path_rate:
            return None
        depth, batch, device = len(self.blocks), images.shape[0], images.device
        rates = torch.linspace(0, self.drop_path_rate, depth, device=device).view(-1, 1, 1)
        return (torch.rand(depth, 2, batch, device=device) >= rates) / (1 - rates)


# torch.fx records these as calls, since what they do depends on the size of the images or on a type.


def image_grid(images: Tensor) -> tuple[int, int]:
    """(h, w) tokens of ``images [B, C, H, W]``."""
    return token_grid(images.shape[-2], images.shape[-1], PATCH_SIZE)


def positions_on(grid: tuple[int, int], own: tuple[int, int], positions: Tensor) -> Tensor:
    """``positions`` of the grid ``own``, or those of another grid, ``[h * w, D]``."""
    return positions if tuple(grid) == own else sincos_positions(grid, positions.shape[1]).to(positions)


register_notrace_function(image_grid)
register_notrace_function(positions_on)
for _layer in (PatchEmbedding, MaskedDepthwiseConv2d, Pointwise, ShortAttention):
    register_notrace_module(_layer)


def _stages(indices: int | Sequence[int] | None) -> list[int]:
    """timm's convention: the last n stages, all of them, or the named ones (-1 is the last)."""
    every = [0, 1, 2]
    if indices is None:
        return every
    return every[-indices:] if isinstance(indices, int) else [every[index] for index in indices]


def _reductions() -> list[int]:
    """Pixels per map pixel after each stage."""
    return list(accumulate(STRIDES, mul))


def _create(variant: str, pretrained: bool, defaults: dict[str, Any], options: dict[str, Any]) -> nn.Module:
    feature_cfg = {"out_indices": options.pop("out_indices", (0, 1, 2)), "feature_cls": "getter"}
    model: nn.Module = build_model_with_cfg(
        ConvViT, variant, pretrained, feature_cfg=feature_cfg, **(defaults | options)
    )
    return model


default_cfgs = generate_default_cfgs(
    {
        f"convvit_{size}_patch{PATCH_SIZE}": {
            "url": "",
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "fixed_input_size": False,
            "pool_size": (224 // PATCH_SIZE, 224 // PATCH_SIZE),
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
            "first_conv": "patch_embed1.proj",
            "classifier": "head",
        }
        for size in ("base", "large")
    }
)


@register_model
def convvit_base_patch16(pretrained: bool = False, **options: Any) -> nn.Module:
    """ConvViT-B with DMJD's MLP ratios; ``mlp_ratios=(4, 4, 4)`` is ConvMAE-B."""
    return _create("convvit_base_patch16", pretrained, {}, options)


@register_model
def convvit_large_patch16(pretrained: bool = False, **options: Any) -> nn.Module:
    """ConvViT-L of DMJD."""
    sizes = {"embed_dims": (384, 768, 1024), "depths": (2, 2, 23), "num_heads": 16}
    return _create("convvit_large_patch16", pretrained, sizes, options)
