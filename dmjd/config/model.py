"""What is learned: masks, backbone, method and target."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.config.fields import choice, choice_of, number, numbers, path, positive

BACKBONES = ["vit", "convvit", "swin"]
"""Values of ``backbone.name``; each has its record in dmjd/builders/model.py, where others can be registered."""

TARGETS = ["hog", "pixels", "clip", "dvae", "vqkd", "teacher"]
"""Values of ``target.name``; each has its record in dmjd/targets, where others can be registered."""


@dataclass
class MaskConfig:
    """Disjoint masking; the fields are those of ``dmjd.masking.MaskSpec``.

    ``views``: how many masked views are made of each image that is read, the paper's K.
    ``pattern``: what is hidden: single tokens, squares of ``block`` tokens, or BEiT's rectangles.
    ``block``: height and width of a hidden unit in tokens, for the pattern of that name.
    ``mask_ratio``: the part of a view's tokens that is hidden, m_corr.
    ``pred_ratio``: the part of an image's tokens that all views together hide, m_pred; left out, as many as can be.
    ``regulation``: disjoint views hide new ground first, none draws each alone, complementary ones keep no token twice.
    ``rounding``: of rates to counts: exact on the decimals that are typed, or as the official code rounds.
    ``count``: hidden units of a view, in place of ``mask_ratio``.
    ``loss_ratio``: the part of the tokens that the loss is taken on, with one view; left out, those hidden.
    """

    views: int = positive(2)
    pattern: str = choice("block", "uniform", "beit")
    block: list[int] = numbers(2, 2, length=2, least=1)
    mask_ratio: float = number(0.6, above=0, below=1)
    pred_ratio: float | None = number(None, above=0, most=1)
    regulation: str = choice("disjoint", "none", "complementary")
    rounding: str = choice("exact", "official")
    count: int | None = number(None, least=1)
    loss_ratio: float | None = number(None, above=0, most=1)


@dataclass
class ConvStagesConfig:
    """The two convolution stages of a ConViT, at strides 4 and 8.

    ``embed_dims``: channels of each. ``depths``: blocks of each. ``mlp_ratios``: hidden width / width of each.
    """

    embed_dims: list[int] = numbers(256, 384, length=2, above=0)
    depths: list[int] = numbers(2, 2, length=2, least=0)
    mlp_ratios: list[float] = numbers(8.0, 8.0, length=2, above=0, most=1000)


@dataclass
class WindowsConfig:
    """The stages of a Swin, at strides 4, 8, 16 and 32.

    ``depths``: blocks of each stage. ``num_heads``: heads of each stage. ``size``: the side of a window in tokens.
    """

    depths: list[int] = numbers(2, 2, 18, 2, length=4, above=0)
    num_heads: list[int] = numbers(4, 8, 16, 32, length=4, above=0)
    size: int = positive(6)


@dataclass
class BackboneConfig:
    """The encoder.

    For convvit, width, depth, heads and MLP ratio are those of its third stage, a ViT.

    ``name``: a ViT, ConvMAE's ConViT, or a Swin.
    ``patch_size``: the side of a token in pixels; 16 for convvit and 32 for swin.
    ``embed_dim``: width of a token; of swin, of the last stage, which is one token wide.
    ``depth``: blocks; those of swin are in ``windows``.
    ``num_heads``: heads of attention; those of swin are in ``windows``.
    ``mlp_ratio``: hidden width of an MLP / width.
    ``class_token`` (vit): put a cls token before the others.
    ``masked_tokens``: leave hidden tokens out, or put a mask token in their place.
    ``drop_path``: the rate at which branches of the last block are left out; it grows with depth (not swin).
    ``positions`` (vit): fixed, learned, or BEiT's bias of attention by relative position, shared by all blocks.
    ``block`` (vit): timm's, or BEiT's, whose keys have no bias and whose branches ``layer_scale`` may scale.
    ``layer_scale``: what the scales of BEiT's branches begin with; left out, there are none.
    ``multi_scale`` (convvit): add the outputs of the stages before the third to the encoder's.
    """

    name: str = choice_of(BACKBONES)
    patch_size: int = positive(16)
    embed_dim: int = positive(768)
    depth: int = positive(12)
    num_heads: int = positive(12)
    mlp_ratio: float = number(4.0, above=0, most=1000)
    class_token: bool = True
    masked_tokens: str = choice("drop", "mask_token")
    drop_path: float = number(0.0, least=0, below=1)
    positions: str = choice("sincos", "learned", "relative")
    block: str = choice("plain", "beit")
    layer_scale: float | None = number(None, above=0)
    conv_stages: ConvStagesConfig = field(default_factory=ConvStagesConfig)
    multi_scale: bool = True
    windows: WindowsConfig = field(default_factory=WindowsConfig)


@dataclass
class DecoderConfig:
    """The masked branch.

    ``name``: MAE's transformer decoder, or a linear head on the encoder's mask tokens.
    ``dim``: width. ``depth``: blocks. ``num_heads``: heads of attention. ``mlp_ratio``: hidden width of an MLP / width.
    """

    name: str = choice("mae", "linear")
    dim: int = positive(512)
    depth: int = positive(8)
    num_heads: int = positive(16)
    mlp_ratio: float = number(4.0, above=0, most=1000)


@dataclass
class VisibleBranchConfig:
    """The visible distillation branch.

    ``enabled``: whether there is one. ``width``: of its projector.
    ``projector``: three layers with LayerNorm and GELU, or one linear layer.
    """

    enabled: bool = True
    width: int = positive(512)
    projector: str = choice("nonlinear", "linear")


@dataclass
class MethodConfig:
    """What is learned from the views.

    ``name``: of the method, for people.
    ``mim_loss``: of what the masked branch predicts; cross_entropy for targets that are codes, and for them alone.
    ``mim_weight``: the paper's lambda.
    ``initialisation``: whose weights the model starts from.
    """

    name: str = "dmjd"
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    visible_branch: VisibleBranchConfig = field(default_factory=VisibleBranchConfig)
    mim_loss: str = choice("mse", "l1", "smooth_l1", "cosine", "cross_entropy")
    mim_weight: float = positive(1.0)
    initialisation: str = choice("mae", "beit", "simmim", "maskfeat")


@dataclass
class TargetConfig:
    """What is predicted.

    ``name``: histograms of gradients, pixels, features (clip, teacher) or visual codes (dvae, vqkd).
    ``norm``: none or patch for pixels; none, l2 or layernorm for HOG; none or layernorm for features.
    ``cell`` (hog): its side in pixels, half a patch if left out.
    ``bins`` (hog): orientations of a cell.
    ``flavour`` (hog): whose conventions; MaskFeat's go with norm l2.
    ``unbiased`` (pixels): whether norm patch takes the variance that MAE uses.
    ``weights`` (clip, dvae, vqkd): a file on this machine; nothing is ever downloaded.
    ``model`` (clip): open_clip's name of what the file holds.
    ``dim`` (clip): the width of its features.
    ``layer`` (clip): the block whose features they are, counted from 0, or from the last with -1.
    ``ln_post`` (clip): apply its last norm.
    ``projected`` (clip): apply what maps to the space of texts.
    ``codes`` (dvae, vqkd): how many there are.
    ``layers`` (teacher): how many of the last blocks are averaged; the teacher is the average that ``ema_decay`` keeps.
    """

    name: str = choice_of(TARGETS)
    norm: str = choice("layernorm", "none", "l2", "patch")
    cell: int | None = number(None, least=1)
    bins: int = positive(9)
    flavour: str = choice("dmjd", "maskfeat", "maskfeat_gauss", "skimage")
    unbiased: bool = True
    weights: str | None = path()
    model: str = "ViT-B-16-quickgelu"
    dim: int = positive(512)
    layer: int = -1
    ln_post: bool = True
    projected: bool = True
    codes: int = positive(8192)
    layers: int = positive(6)
