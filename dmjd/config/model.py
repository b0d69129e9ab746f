"""Model configuration: masking, backbone, method and target."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmjd.config.fields import choice, choice_of, found_at_start, number, numbers, path, positive, size

BACKBONES = ["vit", "convvit", "swin"]
"""Values of ``backbone.name``; each has its record in dmjd/builders/model.py, where others can be registered."""

TARGETS = ["hog", "pixels", "clip", "dvae", "vqkd", "teacher"]
"""Values of ``target.name``; each has its record in dmjd/targets, where others can be registered."""


@dataclass
class MaskConfig:
    """Masking.

    Set at most one of pred_ratio (fraction of the tokens masked in at least one view) and loss_ratio (views=1: fraction
    of the tokens in the loss).

    views: Masked views per image and step (K).
    pattern: Shape of a masked unit. block: rectangle of `block` tokens. uniform: single tokens. beit: BEiT's random
        rectangles.
    block: (pattern=block) Height and width of a masked unit, in tokens.
    mask_ratio: Fraction of the tokens masked in each view (m_corr).
    pred_ratio: Fraction of the tokens masked in at least one view (m_pred). null: the largest possible, min(1, views
        * mask_ratio) for disjoint views.
    regulation: Relation between the views of an image. disjoint: a view first masks tokens that no earlier view
        masked. none: views are independent. complementary: no token is visible in two views.
    rounding: Masked units per view. exact: ceil(mask_ratio * units) in decimal arithmetic. official: units - int(units
        * (1 - mask_ratio)) in floating point, as the official DMJD code.
    count: Masked units per view; overrides mask_ratio. null: use mask_ratio.
    loss_ratio: (views=1) Fraction of the tokens on which the loss is computed. null: the masked tokens.
    """

    views: int = positive(2)
    pattern: str = choice("block", "uniform", "beit")
    block: list[int] = size(2, 2, least=1)
    mask_ratio: float = number(0.6, above=0, below=1)
    pred_ratio: float | None = number(None, above=0, most=1)
    regulation: str = choice("disjoint", "none", "complementary")
    rounding: str = choice("exact", "official")
    count: int | None = number(None, least=1)
    loss_ratio: float | None = number(None, above=0, most=1)


@dataclass
class ConvStagesConfig:
    """Convolution stages 1 and 2 of ConvViT, at strides 4 and 8.

    embed_dims: Channels of each stage.
    depths: Blocks of each stage.
    mlp_ratios: MLP hidden width / channels, of each stage.
    """

    embed_dims: list[int] = numbers(256, 384, length=2, above=0)
    depths: list[int] = numbers(2, 2, length=2, least=0, most=1024)
    mlp_ratios: list[float] = numbers(8.0, 8.0, length=2, above=0, most=1000)


@dataclass
class WindowsConfig:
    """The four stages of Swin, at strides 4, 8, 16 and 32.

    depths: Blocks of each stage.
    num_heads: Attention heads of each stage.
    size: Window size, in tokens.
    """

    depths: list[int] = numbers(2, 2, 18, 2, length=4, above=0, most=1024)
    num_heads: list[int] = numbers(4, 8, 16, 32, length=4, above=0)
    size: int = positive(6)


@dataclass
class BackboneConfig:
    """Encoder. For convvit, embed_dim, depth, num_heads and mlp_ratio belong to stage 3 (a ViT).

    name: Architecture. vit: ViT. convvit: ConvMAE's convolution and ViT stages. swin: Swin.
    patch_size: Patch size in pixels. Must be 16 for convvit and 32 for swin.
    embed_dim: Embedding dimension. swin: of the last stage.
    depth: Transformer blocks. swin: set by windows.depths.
    num_heads: Attention heads. swin: set by windows.num_heads.
    mlp_ratio: MLP hidden width / embedding dimension.
    class_token: (vit) Prepend a class token.
    masked_tokens: drop: the encoder processes visible tokens only (MAE). mask_token: masked tokens are replaced by a
        learned embedding (BEiT, SimMIM).
    drop_path: Stochastic depth rate of the last block; increases linearly from 0 with depth.
    positions: (vit) Position encoding. sincos: fixed sine-cosine. learned: learned embedding per position. relative:
        BEiT's relative position bias. learned_relative: learned embedding and relative position bias, as in CAE's
        fine-tuned models.
    bias_tables: (positions=relative, learned_relative) Tables of the relative position bias. shared: one for all
        blocks, as in pre-training. per_block: one per block, as in the fine-tuning of BEiT and SimMIM.
    block: (vit) plain: timm's block. beit: BEiT's block; its key projection has no bias, and layer_scale is optional.
    layer_scale: (block=beit) Initial value of LayerScale. null: no LayerScale.
    multi_scale: (convvit) Add the outputs of stages 1 and 2 to the encoder's output during pre-training.
    """

    name: str = choice_of(BACKBONES)
    patch_size: int = positive(16)
    embed_dim: int = positive(768)
    depth: int = number(12, above=0, most=1024)
    num_heads: int = positive(12)
    mlp_ratio: float = number(4.0, above=0, most=1000)
    class_token: bool = True
    masked_tokens: str = choice("drop", "mask_token")
    drop_path: float = number(0.0, least=0, below=1)
    positions: str = choice("sincos", "learned", "relative", "learned_relative")
    bias_tables: str = choice("shared", "per_block")
    block: str = choice("plain", "beit")
    layer_scale: float | None = number(None, above=0)
    conv_stages: ConvStagesConfig = field(default_factory=ConvStagesConfig)
    multi_scale: bool = True
    windows: WindowsConfig = field(default_factory=WindowsConfig)


@dataclass
class DecoderConfig:
    """Decoder of the masked tokens (mask prediction branch).

    name: mae: transformer decoder. linear: linear layer on the encoder's mask tokens (needs
        backbone.masked_tokens=mask_token).
    dim: (mae) Embedding dimension.
    depth: (mae) Transformer blocks.
    num_heads: (mae) Attention heads.
    mlp_ratio: (mae) MLP hidden width / embedding dimension.
    """

    name: str = choice("mae", "linear")
    dim: int = positive(512)
    depth: int = number(8, above=0, most=1024)
    num_heads: int = positive(16)
    mlp_ratio: float = number(4.0, above=0, most=1000)


@dataclass
class VisibleBranchConfig:
    """Visible distillation branch: a second loss, on the visible tokens.

    enabled: Use this branch.
    width: Hidden width of the projector.
    projector: nonlinear: three layers with LayerNorm and GELU. linear: one layer.
    """

    enabled: bool = True
    width: int = positive(512)
    projector: str = choice("nonlinear", "linear")


@dataclass
class MethodConfig:
    """Loss and heads.

    name: Name of the method, for logs and reports only.
    mim_loss: Loss on masked tokens. cross_entropy if and only if the target is a class index (dvae, vqkd).
    mim_weight: Weight of mim_loss (the paper's lambda). The visible branch's loss has weight 1.
    beta: Beta of the smooth L1 loss, in the visible branch and for mim_loss=smooth_l1: the difference at which the loss
        changes from quadratic to linear.
    initialisation: Weight initialisation, as in the official code of the named method.
    """

    name: str = "dmjd"
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    visible_branch: VisibleBranchConfig = field(default_factory=VisibleBranchConfig)
    mim_loss: str = choice("mse", "l1", "smooth_l1", "cosine", "cross_entropy")
    mim_weight: float = positive(1.0)
    beta: float = positive(2.0)
    initialisation: str = choice("mae", "beit", "simmim", "maskfeat")


@dataclass
class TargetConfig:
    """Prediction target.

    name: hog: histograms of oriented gradients. pixels: the patch's pixels, normalised by data.mean and data.std. clip:
        CLIP features. dvae: codes of DALL-E's dVAE. vqkd: codes of BEiT v2. teacher: features of the encoder's EMA, as
        in data2vec.
    norm: Normalisation. layernorm (hog, clip, teacher): mean 0 and variance 1 of each vector. l2 (hog): unit length of
        each vector. patch (pixels): mean 0 and variance 1 of each patch, MAE's norm_pix_loss. dvae and vqkd: none. A
        vector holds a token's features; for hog, the histogram of one cell and channel.
    cell: (hog) Cell size in pixels. null: half a patch.
    bins: (hog) Orientation bins per cell.
    flavour: (hog) Variant. dmjd: official DMJD code. maskfeat (with norm=l2): official MaskFeat code. maskfeat_gauss:
        MaskFeat in MMPreTrain. skimage: skimage.feature.hog.
    unbiased: (pixels, norm=patch) Divide by the unbiased variance, as in MAE.
    weights: (clip, dvae, vqkd) Local file of the target model's weights. Nothing is downloaded.
    model: (clip) open_clip's name of the model whose weights target.weights holds.
    dim: (clip) Feature dimension.
    layer: (clip) Index of the block whose output is used; -1 is the last.
    ln_post: (clip) Apply the final LayerNorm.
    projected: (clip) Apply the projection to the image-text space.
    codes: (dvae, vqkd) Codebook size.
    layers: (teacher) Number of blocks, counted from the last, whose outputs are averaged. Needs ema_decay.
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


@dataclass
class HeadConfig:
    """Classification head.

    pooling: Image feature. mean: mean of the patch tokens. cls: class token.
    norm: pooled: a new LayerNorm after the pooling, in place of the encoder's final norm. encoder: the encoder's final
        norm, before the pooling.
    init_std: Standard deviation of the head's initial weights (truncated normal distribution).
    init_scale: Factor of the head's initial weights.
    dropout: Dropout rate before the head.
    num_classes: Number of classes. null: taken from the data set, and stored in the run.
    """

    pooling: str = choice("mean", "cls")
    norm: str = choice("pooled", "encoder")
    init_std: float = positive(2e-5)
    init_scale: float = positive(1.0)
    dropout: float = number(0.0, least=0, below=1)
    num_classes: int | None = found_at_start(number(None, least=2, most=1_000_000))
