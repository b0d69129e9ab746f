"""Visual codes as the target: DALL-E's dVAE (BEiT) and VQ-KD (BEiT v2)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from timm.models.beit import Beit
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.config import PretrainConfig
from dmjd.errors import ConfigError
from dmjd.targets.features import frozen_on, paint
from dmjd.targets.tokenizer import TargetSpec, check_grid, input_size, register
from dmjd.targets.weights import load_frozen, read_state, weights_file

DVAE_PATCH = 8
"""Pixels of its input that a code of the dVAE stands for."""

DVAE_EXPECTED = (
    "the encoder of DALL-E's dVAE as a dictionary of tensors; OpenAI's encoder.pkl is a whole module, and "
    "loading it runs code; by hand, with OpenAI's package dall_e installed, and torch.save(encoder.state_dict(), FILE)"
)
VQKD_EXPECTED = (
    "a VQ-KD tokenizer of BEiT v2, such as vqkd_encoder_base_decoder_3x768x12_clip-d5036aa7.pth: a dictionary of "
    "tensors, at its top or under 'model'; only encoder, encode_task_layer and quantize are read"
)
VQKD_HEAD_DIM = 64

layer_norm: type[nn.Module] = partial(nn.LayerNorm, eps=1e-6)  # type: ignore[assignment]  # timm only calls it


@dataclass
class CodebookTarget:
    """The code of every patch.

    tokenizer: float ``[B, 3, H, W]`` in 0..1 -> logits or similarities ``[B, N, codes]``, of which the greatest counts;
        moves to the images' device when it is first called.
    dim: how many codes there are.
    patch: side of a patch of the *student* in pixels, for pictures.
    """

    tokenizer: nn.Module
    dim: int
    patch: int

    codes = True

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 ``[B, H, W, 3]`` of the size that the tokenizer reads -> int64 ``[B, N, 1]``."""
        # Not in half precision: where two codes are close, rounding would not blur the target but change it.
        with frozen_on(self.tokenizer, images.device, half=False):
            scores: Tensor = self.tokenizer(images.permute(0, 3, 1, 2).float() / 255)
            return scores.argmax(-1, keepdim=True)

    def render(self, values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        """A colour per code, at random but always the same: equal colours are equal codes, near ones mean nothing."""
        palette = torch.rand(self.dim, 3, generator=torch.Generator().manual_seed(0))
        return paint(palette[values.detach().cpu().nan_to_num().long().squeeze(-1)], grid, self.patch)


class DVaeConv2d(nn.Module):
    """A convolution that keeps the size; DALL-E's names for weight and bias."""

    def __init__(self, in_channels: int, out_channels: int, side: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(out_channels, in_channels, side, side))
        self.b = nn.Parameter(torch.empty(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.w, self.b, padding=self.w.shape[-1] // 2)


class DVaeBlock(nn.Module):
    """Four convolutions behind ReLUs, scaled by ``gain``, beside the identity or a 1 x 1 convolution."""

    def __init__(self, in_channels: int, out_channels: int, gain: float) -> None:
        super().__init__()
        inner = out_channels // 4
        self.gain = gain
        self.id_path = DVaeConv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()
        shapes = ((in_channels, inner, 3), (inner, inner, 3), (inner, inner, 3), (inner, out_channels, 1))
        self.res_path = nn.ModuleDict({f"conv_{i}": DVaeConv2d(*shape) for i, shape in enumerate(shapes, 1)})

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for convolution in self.res_path.values():
            y = convolution(F.relu(y))
        return self.id_path(x) + self.gain * y


class DVaeEncoder(nn.Module):
    """The encoder of DALL-E's dVAE (Ramesh et al. 2021): four groups of blocks, a maximum over 2 x 2 after the first
    three, and a logit for every code at a grid of 8 x 8 pixels.

    ``forward(images in 0..1 [B, 3, H, W]) -> [B, H/8 * W/8, codes]``. Names are those of its state dict.
    """

    GROUPS = 4

    def __init__(self, codes: int, width: int = 256, blocks: int = 2) -> None:
        super().__init__()
        gain = 1 / (self.GROUPS * blocks) ** 2
        stages: OrderedDict[str, nn.Module] = OrderedDict(input=DVaeConv2d(3, width, 7))
        inner = width
        for group in range(self.GROUPS):
            outer = width * 2**group
            parts: OrderedDict[str, nn.Module] = OrderedDict()
            for block in range(blocks):
                parts[f"block_{block + 1}"] = DVaeBlock(outer if block else inner, outer, gain)
            if group < self.GROUPS - 1:
                parts["pool"] = nn.MaxPool2d(2)
            stages[f"group_{group + 1}"] = nn.Sequential(parts)
            inner = outer
        stages["output"] = nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=DVaeConv2d(inner, codes, 1)))
        self.blocks = nn.Sequential(stages)

    def forward(self, images: Tensor) -> Tensor:
        # Its logit-Laplace likelihood has no mass at 0 and 1, so it was trained on 0.1..0.9.
        logits: Tensor = self.blocks(0.8 * images + 0.1)
        return logits.flatten(2).transpose(1, 2)


class VqKdEncoder(nn.Module):
    """The tokenizer of BEiT v2 (Peng et al. 2022): a ViT, two layers down to the codebook's width, and the nearest
    entry by direction.

    ``forward(images in 0..1 [B, 3, H, W]) -> [B, N, codes]``, cosines. Names are those of its files.
    """

    def __init__(
        self, size: tuple[int, int], patch: int, embed_dim: int, depth: int, codes: int, code_dim: int
    ) -> None:
        super().__init__()
        self.patch = patch
        self.encoder = Beit(
            img_size=size,
            patch_size=patch,
            num_classes=0,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=embed_dim // VQKD_HEAD_DIM,
            qkv_bias=True,
            use_abs_pos_emb=True,
            norm_layer=layer_norm,
        )
        self.encode_task_layer = nn.Sequential(
            nn.Linear(embed_dim, embed_dim), nn.Tanh(), nn.Linear(embed_dim, code_dim)
        )
        self.quantize = nn.ModuleDict({"embedding": nn.Embedding(codes, code_dim)})

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.encoder.fc_norm(self.encoder.forward_features(2 * images - 1)[:, 1:])
        with torch.autocast(images.device.type, enabled=False):
            queries = F.normalize(self.encode_task_layer(tokens.float()), dim=-1)
            embedding = self.quantize["embedding"]
            assert isinstance(embedding, nn.Embedding)
            return queries @ F.normalize(embedding.weight, dim=-1).T


def load_dvae(weights: str | None, codes: int) -> nn.Module:
    """DALL-E's encoder from a dictionary of tensors. Raises ConfigError if the file is missing or another's."""
    file = weights_file(weights, DVAE_EXPECTED)
    state = read_state(file, DVAE_EXPECTED)
    first = _tensor(state, "blocks.input.w", file, DVAE_EXPECTED)
    blocks = sum(name.startswith("blocks.group_1.") and name.endswith("conv_1.w") for name in state)
    encoder = DVaeEncoder(codes, first.shape[0], blocks)
    load_frozen(encoder, state, file, DVAE_EXPECTED)
    return encoder


def load_vqkd(weights: str | None, codes: int, size: tuple[int, int]) -> VqKdEncoder:
    """BEiT v2's tokenizer for images of ``size`` (height, width). Raises ConfigError as :func:`load_dvae` does."""
    file = weights_file(weights, VQKD_EXPECTED)
    read = ("encoder.", "encode_task_layer.", "quantize.embedding.weight")
    state = {name: value for name, value in read_state(file, VQKD_EXPECTED).items() if name.startswith(read)}
    projection = _tensor(state, "encoder.patch_embed.proj.weight", file, VQKD_EXPECTED)
    entries = _tensor(state, "quantize.embedding.weight", file, VQKD_EXPECTED)
    depth = sum(name.startswith("encoder.blocks.") and name.endswith(".norm1.weight") for name in state)
    patch, width = projection.shape[-1], projection.shape[0]
    tokenizer = VqKdEncoder(size, patch, width, depth, codes, entries.shape[1])
    load_frozen(tokenizer, state, file, VQKD_EXPECTED)
    return tokenizer


def _tensor(state: dict[str, Tensor], name: str, file: object, expected: str) -> Tensor:
    if name not in state:
        raise ConfigError(f"target.weights={file} lacks {name}; expected is {expected}")
    return state[name]


def _build_dvae(config: PretrainConfig) -> CodebookTarget:
    target = config.target
    return CodebookTarget(load_dvae(target.weights, target.codes), target.codes, config.backbone.patch_size)


def _build_vqkd(config: PretrainConfig) -> CodebookTarget:
    target = config.target
    vqkd = load_vqkd(target.weights, target.codes, input_size(config))
    check_grid(config, vqkd.patch)
    return CodebookTarget(vqkd, target.codes, config.backbone.patch_size)


def _dvae_parameters(config: PretrainConfig) -> int:
    """Those of DALL-E's encoder."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in DVaeEncoder(config.target.codes).parameters())


def _vqkd_parameters(config: PretrainConfig) -> int:
    """Those of BEiT v2's published tokenizer, a ViT-B/16."""
    with torch.device("meta"):
        tokenizer = VqKdEncoder(input_size(config), 16, 768, 12, config.target.codes, 32)
        return sum(parameter.numel() for parameter in tokenizer.parameters())


_CODES = TargetSpec(_build_vqkd, codes=True, colour=True, second_size=True, dim=lambda config: config.target.codes)
register("vqkd", replace(_CODES, blocks=lambda target: target.tokenizer.encoder.blocks, parameters=_vqkd_parameters))
_DVAE = replace(_CODES, build=_build_dvae, input_patch=DVAE_PATCH, parameters=_dvae_parameters)
register("dvae", replace(_DVAE, blocks=lambda target: [target.tokenizer]))
