"""States of random numbers in the layouts of other code bases, written down from what their files hold."""

from __future__ import annotations

import torch
from torch import Tensor

State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]

DIM, HEADS, HIDDEN, DEPTH, PATCH, GRID = 24, 3, 48, 2, 8, 4
TOKENS = GRID * GRID
TABLE = ((2 * GRID - 1) ** 2 + 3, HEADS)


def layer(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def block(name: str, dim: int = DIM, hidden: int = HIDDEN, *, qv: bool = False) -> Shapes:
    biases = (
        {f"{name}.attn.q_bias": (dim,), f"{name}.attn.v_bias": (dim,)} if qv else {f"{name}.attn.qkv.bias": (3 * dim,)}
    )
    return {
        **layer(f"{name}.norm1", dim),
        f"{name}.attn.qkv.weight": (3 * dim, dim),
        **biases,
        **layer(f"{name}.attn.proj", dim, dim),
        **layer(f"{name}.norm2", dim),
        **layer(f"{name}.mlp.fc1", hidden, dim),
        **layer(f"{name}.mlp.fc2", dim, hidden),
    }


def vit(*, qv: bool = False, positions: bool = True, mask_token: bool = False) -> Shapes:
    shapes: Shapes = {"cls_token": (1, 1, DIM), **layer("patch_embed.proj", DIM, 3, PATCH, PATCH)}
    if positions:
        shapes["pos_embed"] = (1, 1 + TOKENS, DIM)
    if mask_token:
        shapes["mask_token"] = (1, 1, DIM)
    for index in range(DEPTH):
        shapes |= block(f"blocks.{index}", qv=qv)
    return shapes


def mae() -> Shapes:
    shapes = vit() | layer("norm", DIM) | {"mask_token": (1, 1, 16), "decoder_pos_embed": (1, 1 + TOKENS, 16)}
    shapes |= layer("decoder_embed", 16, DIM) | layer("decoder_norm", 16) | layer("decoder_pred", PATCH * PATCH * 3, 16)
    return shapes | block("decoder_blocks.0", 16, 32)


def conv_block(name: str, dim: int) -> Shapes:
    return {
        **layer(f"{name}.norm1", dim),
        **layer(f"{name}.conv1", dim, dim, 1, 1),
        **layer(f"{name}.attn", dim, 1, 5, 5),
        **layer(f"{name}.conv2", dim, dim, 1, 1),
        **layer(f"{name}.norm2", dim),
        **layer(f"{name}.mlp.fc1", 4 * dim, dim, 1, 1),
        **layer(f"{name}.mlp.fc2", dim, 4 * dim, 1, 1),
    }


def convmae(*, branch: bool = False, decoder: bool = True) -> Shapes:
    shapes: Shapes = {"pos_embed": (1, TOKENS, DIM)}
    for stage, (before, after, side) in enumerate(((3, 8, 4), (8, 12, 2), (12, DIM, 2)), 1):
        shapes |= layer(f"patch_embed{stage}.proj", after, before, side, side) | layer(
            f"patch_embed{stage}.norm", after
        )
    shapes |= layer("patch_embed4", DIM, DIM) | layer("norm", DIM)
    shapes |= conv_block("blocks1.0", 8) | conv_block("blocks2.0", 12) | block("blocks3.0") | block("blocks3.1")
    if decoder:
        shapes |= layer("stage1_output_decode", DIM, 8, 4, 4) | layer("stage2_output_decode", DIM, 12, 2, 2)
        shapes |= {"mask_token": (1, 1, 16), "decoder_pos_embed": (1, TOKENS, 16)}
        shapes |= layer("decoder_embed", 16, DIM) | layer("decoder_norm", 16) | layer("decoder_pred", 108, 16)
        shapes |= block("decoder_blocks.0", 16, 32)
    if branch:
        shapes |= layer("proj_embed.0", 20, DIM) | layer("proj_embed.1", 20) | layer("proj_embed.3", 20, 20)
        shapes |= layer("proj_embed.4", 20) | layer("proj_embed.6", 20, 20) | layer("predictor.0", 108, 20)
    return shapes


def beit(*, shared: bool = True, absolute: bool = False, fine_tuned: bool = False) -> Shapes:
    shapes = vit(qv=True, positions=absolute, mask_token=not fine_tuned)
    for index in range(DEPTH):
        if not absolute:
            shapes |= {f"blocks.{index}.gamma_{branch}": (DIM,) for branch in (1, 2)}
            if not shared:
                shapes[f"blocks.{index}.attn.relative_position_bias_table"] = TABLE
    if shared and not absolute:
        shapes["rel_pos_bias.relative_position_bias_table"] = TABLE
    if fine_tuned:
        return shapes | layer("fc_norm", DIM) | layer("head", 10, DIM)
    return shapes | layer("norm", DIM) | layer("lm_head", 32, DIM)


def simmim() -> Shapes:
    shapes = {name: shape for name, shape in (beit() | layer("x", 1)).items() if not name.startswith(("lm_head", "x."))}
    return {f"encoder.{name}": shape for name, shape in shapes.items()} | layer("decoder.0", PATCH**2 * 3, DIM, 1, 1)


def simmim_swin() -> Shapes:
    shapes: Shapes = {"encoder.mask_token": (1, 1, 8), **layer("encoder.patch_embed.proj", 8, 3, 4, 4)}
    shapes |= layer("encoder.patch_embed.norm", 8) | layer("encoder.norm", 16)
    for stage, dim in enumerate((8, 16)):
        name = f"encoder.layers.{stage}.blocks.0"
        shapes |= block(name, dim, 4 * dim) | {f"{name}.attn.relative_position_bias_table": (49, stage + 1)}
    shapes |= layer("encoder.layers.0.downsample.norm", 32) | {"encoder.layers.0.downsample.reduction.weight": (16, 32)}
    return shapes | layer("decoder.0", 8 * 8 * 3, 16, 1, 1)


def maskfeat() -> Shapes:
    shapes = vit(mask_token=True) | layer("pred_head.transforms.0.0", DIM)
    return shapes | layer("pred_head.projections.0", 108, DIM)


def mm_block(name: str, dim: int, hidden: int, *, qv: bool = False) -> Shapes:
    renamed = (("norm", "ln"), ("mlp.fc1", "ffn.layers.0.0"), ("mlp.fc2", "ffn.layers.1"))
    shapes = {}
    for theirs, shape in block(name, dim, hidden, qv=qv).items():
        for old, new in renamed:
            theirs = theirs.replace(old, new)
        shapes[theirs] = shape
    return shapes


def mmpretrain_mae() -> Shapes:
    shapes: Shapes = {"backbone.cls_token": (1, 1, DIM), "backbone.pos_embed": (1, 1 + TOKENS, DIM)}
    shapes |= layer("backbone.patch_embed.projection", DIM, 3, PATCH, PATCH) | layer("backbone.ln1", DIM)
    shapes |= mm_block("backbone.layers.0", DIM, HIDDEN) | mm_block("backbone.layers.1", DIM, HIDDEN)
    shapes |= {"neck.mask_token": (1, 1, 16), "neck.decoder_pos_embed": (1, 1 + TOKENS, 16)}
    shapes |= layer("neck.decoder_embed", 16, DIM) | layer("neck.ln1", 16) | mm_block("neck.decoder_blocks.0", 16, 32)
    return shapes | layer("neck.decoder_pred", PATCH**2 * 3, 16)


def mmpretrain_beit() -> Shapes:
    shapes: Shapes = {"backbone.cls_token": (1, 1, DIM), "backbone.mask_token": (1, 1, DIM)}
    shapes |= layer("backbone.patch_embed.projection", DIM, 3, PATCH, PATCH) | layer("backbone.ln1", DIM)
    for index in range(DEPTH):
        shapes |= mm_block(f"backbone.layers.{index}", DIM, HIDDEN, qv=True)
        shapes |= {f"backbone.layers.{index}.gamma_{branch}": (DIM,) for branch in (1, 2)}
    return shapes | {"backbone.rel_pos_bias.relative_position_bias_table": TABLE} | layer("head.cls_head", 32, DIM)


def mmpretrain_maskfeat() -> Shapes:
    mae_names = {name: shape for name, shape in mmpretrain_mae().items() if name.startswith("backbone.")}
    return mae_names | {"backbone.mask_token": (1, 1, DIM)} | layer("neck.fc", 108, DIM)


def timm_vit() -> Shapes:
    return vit() | layer("norm", DIM)


def draw(shapes: Shapes, seed: int = 0) -> State:
    """No two tensors alike, so that a swap is seen."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


STATES = {
    "mae": ("mae", mae),
    "convmae": ("convmae", convmae),
    "convmae_encoder": ("convmae", lambda: convmae(decoder=False)),
    "dmjd": ("dmjd", lambda: convmae(branch=True)),
    "simmim": ("simmim", simmim),
    "simmim_swin": ("simmim", simmim_swin),
    "beit": ("beit", beit),
    "beit_absolute": ("beit", lambda: beit(absolute=True)),
    "beit_fine_tuned": ("beit", lambda: beit(shared=False, fine_tuned=True)),
    "maskfeat": ("maskfeat", maskfeat),
    "mmpretrain_mae": ("mmpretrain", mmpretrain_mae),
    "mmpretrain_beit": ("mmpretrain", mmpretrain_beit),
    "mmpretrain_maskfeat": ("mmpretrain", mmpretrain_maskfeat),
}
"""Name -> its layout, its shapes."""
