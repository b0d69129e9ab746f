"""Initial weights of each method, as in its official code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from timm.layers import PatchEmbed
from torch import Tensor, nn

TOKENS = ("cls_token", "mask_token", "pos_embed")
STD = 0.02


def mae(model: nn.Module) -> None:
    """Xavier-uniform for linear layers and the flattened patch convolution, normal .02 for tokens. Other convolutions
    keep the initialisation of their encoder."""

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            _fill(module.bias, 0)
        elif isinstance(module, PatchEmbed):
            nn.init.xavier_uniform_(module.proj.weight.view(module.proj.weight.shape[0], -1))
        _norm(module)
        _tokens(module, lambda parameter: nn.init.normal_(parameter, std=STD))

    model.apply(initialise)


def beit(model: nn.Module) -> None:
    """Normal .02 cut at one deviation for linear layers, convolutions and tokens; the layers that write into the
    residual stream of the i-th block, counted from 1, are divided by sqrt(2 i). Biases start at 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            _cut_at_one_deviation(module.weight)
            _fill(module.bias, 0)
        _norm(module)
        _tokens(module, _cut_at_one_deviation)
    encoder: Any = model.encoder
    for depth, block in enumerate(encoder.blocks, 1):
        for layer in (block.attn.proj, block.mlp.fc2):
            layer.weight.data.div_(math.sqrt(2 * depth))


def simmim(model: nn.Module) -> None:
    """BEiT's for a ViT encoder; for Swin timm's, which is the same as SimMIM's, with a mask token of normal .02.
    The head keeps torch's initialisation of a convolution, which is that of a linear layer."""
    head: Any = model.head
    kept = head.weight.detach().clone(), head.bias.detach().clone()
    encoder: Any = model.encoder
    if hasattr(encoder, "layers"):
        _tokens(encoder, lambda parameter: nn.init.trunc_normal_(parameter, std=STD))
    else:
        beit(model)
    for parameter, value in zip((head.weight, head.bias), kept, strict=True):
        parameter.data.copy_(value)


def maskfeat(model: nn.Module) -> None:
    """Normal .02 for linear layers and tokens; biases of linear layers and norms start at .02 too, as in SlowFast,
    except the head's. Convolutions keep torch's initialisation."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=STD)
            _fill(module.bias, STD)
        _norm(module, bias=STD)
        _tokens(module, lambda parameter: nn.init.trunc_normal_(parameter, std=STD))
    head: Any = model.head
    _fill(head.bias, 0)


INITIALISATIONS: dict[str, Callable[[nn.Module], None]] = {
    "mae": mae,
    "beit": beit,
    "simmim": simmim,
    "maskfeat": maskfeat,
}
"""By name; each takes a :class:`~dmjd.models.masked_image_model.MaskedImageModel`."""


def adopt_for_maps(model: nn.Module) -> None:
    """Initialise ``model.encoder`` as its kind is in pre-training, before ``model`` has further parts, and drop the
    parameters that feature maps go without: mask token, final norm, ConvMAE's multi-scale convolutions."""
    encoder: Any = model.encoder
    if any(hasattr(getattr(block, "attn", None), "q_bias") for block in encoder.blocks):
        beit(model)
    elif not hasattr(encoder, "layers"):  # timm has initialised its Swin
        mae(model)
    for name in ("mask_token", "stage1_output_decode", "stage2_output_decode"):
        if getattr(encoder, name, None) is not None:
            setattr(encoder, name, None)
    encoder.norm = nn.Identity()


def _norm(module: nn.Module, bias: float = 0.0) -> None:
    if isinstance(module, nn.LayerNorm) and module.elementwise_affine:
        nn.init.ones_(module.weight)
        _fill(module.bias, bias)


def _fill(bias: Tensor | None, value: float) -> None:
    if bias is not None:
        nn.init.constant_(bias, value)


def _tokens(module: nn.Module, initialise: Callable[[nn.Parameter], object]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name in TOKENS:
            initialise(parameter)


def _cut_at_one_deviation(parameter: Tensor) -> None:
    nn.init.trunc_normal_(parameter, std=STD, a=-STD, b=STD)
