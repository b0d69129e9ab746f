"""What is learned: masks, backbone, method and target."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.config.fields import choice, number, numbers, path, positive


@dataclass
class MaskConfig:
    """Disjoint masking; the fields are those of :class:`dmjd.masking.MaskSpec`."""

    views: int = positive(2)
    pattern: str = choice("block", "uniform", "beit")
    block: list[int] = numbers(2, 2, length=2, least=1)
    mask_ratio: float = number(0.6, above=0, below=1)
    pred_ratio: float | None = number(None, above=0, most=1)
    regulation: str = choice("disjoint", "none", "complementary")
    rounding: str = choice("exact", "official")
    count: int | None = number(None, least=1)
    predict_ratio: float | None = number(None, above=0, most=1)


@dataclass
class ConvStagesConfig:
    """The two convolution stages of a ConViT, at strides 4 and 8."""

    embed_dims: list[int] = numbers(256, 384, length=2, above=0)
    depths: list[int] = numbers(2, 2, length=2, least=0)
    mlp_ratios: list[float] = numbers(8.0, 8.0, length=2, above=0)


@dataclass
class WindowsConfig:
    """The stages of a Swin, at strides 4, 8, 16 and 32: blocks, heads, and the side of a window in tokens."""

    depths: list[int] = numbers(2, 2, 18, 2, length=4, above=0)
    num_heads: list[int] = numbers(4, 8, 16, 32, length=4, above=0)
    size: int = positive(6)


@dataclass
class BackboneConfig:
    """The encoder. ``hidden``: leave hidden tokens out, or put a mask token in their place.

    ``positions`` (vit): fixed, learned, or BEiT's bias of attention by relative position, shared by all blocks.
    ``block`` (vit): timm's, or BEiT's, whose keys have no bias and whose branches ``layer_scale`` may scale.
    For "convvit", width, depth, heads and MLP ratio are those of its third stage, a ViT; ``conv_stages`` are the two
    before it, and ``multi_scale`` adds their outputs to the encoder's.
    For "swin", ``embed_dim`` is the last stage's, which is one token wide, and ``windows`` has depths and heads.
    """

    name: str = choice("vit", "convvit", "swin")
    patch_size: int = positive(16)
    embed_dim: int = positive(768)
    depth: int = positive(12)
    num_heads: int = positive(12)
    mlp_ratio: float = positive(4.0)
    class_token: bool = True
    hidden: str = choice("drop", "mask_token")
    drop_path: float = number(0.0, least=0, below=1)
    positions: str = choice("sincos", "learned", "relative")
    block: str = choice("plain", "beit")
    layer_scale: float | None = number(None, above=0)
    conv_stages: ConvStagesConfig = field(default_factory=ConvStagesConfig)
    multi_scale: bool = True
    windows: WindowsConfig = field(default_factory=WindowsConfig)


@dataclass
class DecoderConfig:
    """The masked branch: MAE's transformer decoder, or a linear head on the encoder's mask tokens."""

    name: str = choice("mae", "linear")
    dim: int = positive(512)
    depth: int = positive(8)
    num_heads: int = positive(16)
    mlp_ratio: float = positive(4.0)


@dataclass
class VisibleBranchConfig:
    """The visible distillation branch. ``projector``: three layers with LayerNorm and GELU, or one linear layer."""

    enabled: bool = True
    width: int = positive(512)
    projector: str = choice("nonlinear", "linear")


@dataclass
class MethodConfig:
    """``mim_weight`` is the paper's lambda. ``mim_loss`` is cross_entropy for targets that are codes, and for them
    alone. ``initialisation``: whose weights the model starts from."""

    name: str = "dmjd"
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    visible_branch: VisibleBranchConfig = field(default_factory=VisibleBranchConfig)
    mim_loss: str = choice("mse", "l1", "smooth_l1", "cosine", "cross_entropy")
    mim_weight: float = positive(1.0)
    initialisation: str = choice("mae", "beit", "simmim", "maskfeat")


@dataclass
class TargetConfig:
    """What is predicted. ``norm``: none or patch for pixels; none, l2 or layernorm for HOG; none or layernorm for
    features (clip, teacher).

    ``cell`` (HOG) is in pixels, half a patch if left out; ``flavour`` (HOG) says whose conventions, MaskFeat's go with
    norm l2; ``unbiased`` (pixels) is the variance that MAE uses.

    ``weights`` (clip, dvae, vqkd) is a file on this machine; nothing is ever downloaded. ``model`` (clip) is
    open_clip's name of what the file holds, and ``dim`` the width of its features. ``layer`` counts its blocks from 0,
    or from the last with -1; ``ln_post`` applies its last norm, ``projected`` what maps to the space of texts.
    ``codes`` (dvae, vqkd) is how many there are. ``layers`` (teacher) is how many of the last blocks are averaged; the
    teacher is the average that ``ema_decay`` keeps.
    """

    name: str = choice("hog", "pixels", "clip", "dvae", "vqkd", "teacher")
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
