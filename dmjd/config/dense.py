"""Configuration of ``dmjd segment`` and ``dmjd detect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dmjd.config.data import DataConfig
from dmjd.config.fields import (
    choice,
    found_at_start,
    may_change,
    naming,
    number,
    numbers,
    path,
    positive,
    recorded,
    size,
)
from dmjd.config.finetune import DownstreamConfig
from dmjd.config.step import FinetuneOptimConfig


@dataclass
class AttentionConfig:
    """Attention of the encoder's ViT blocks, for images larger than in pre-training.

    window: Window size of windowed attention, in tokens per side. null: global attention in every block.
    global_blocks: Blocks with global attention if window is set, counted from 0; for convvit within stage 3. null:
        four, evenly spaced (2, 5, 8, 11 of 12 blocks).
    relative_positions: decomposed: ViTDet's learned biases of rows and columns in each block, initialised to 0. none:
        only the encoder's own position encoding.
    """

    window: int | None = number(None, least=1)
    global_blocks: list[int] | None = field(default=None)
    relative_positions: str = choice("none", "decomposed")


@dataclass
class UperNetConfig:
    """UPerNet head, with an auxiliary FCN head in training.

    maps: Four ViT blocks whose outputs the head reads, counted from 0, in ascending order. The last must be the
        encoder's last block. null: blocks at 1/3, 1/2, 2/3 and the end (3, 5, 7, 11 of 12). Other backbones give the
        outputs of their stages.
    channels: Width of the head.
    pool_scales: Grid sizes of the pyramid pooling module.
    dropout: Dropout rate of channels before the classifiers.
    auxiliary_channels: Width of the auxiliary head.
    auxiliary_weight: Loss weight of the auxiliary head. 0: no auxiliary head.
    num_classes: Number of classes. null: taken from the data set, and stored in the run.
    """

    maps: list[int] | None = field(default=None)
    channels: int = positive(512)
    pool_scales: list[int] = numbers(1, 2, 3, 6, least=1, most=64)
    dropout: float = number(0.1, least=0, below=1)
    auxiliary_channels: int = positive(256)
    auxiliary_weight: float = number(0.4, least=0)
    num_classes: int | None = found_at_start(number(None, least=2, most=255))


@dataclass
class MaskRCNNConfig:
    """Feature pyramid, region proposal network, box and mask heads of Mask R-CNN.

    pyramid: Feature pyramid. simple: ViTDet's, from the last map. fpn: FPN over the maps of all stages. auto: simple
        for a ViT, fpn for the other backbones.
    channels: Width of the pyramid and of the heads.
    rpn_convs: Convolutions of the region proposal network.
    box_convs: Convolutions of the box head, before one linear layer.
    box_width: Width of the linear layer of the box head.
    mask_convs: Convolutions of the mask head.
    proposals_before: Proposals per level before non-maximum suppression (NMS), in training; half as many in testing. An
        object smaller than the anchors has dozens of equal proposals, so a few hundred proposals would miss objects.
    proposals: Proposals per image after NMS.
    samples: Proposals per image on which the heads are trained, at most a quarter of them positive.
    detections: Maximum number of detections per image.
    min_score: Minimum score of a detection.
    num_classes: Number of classes. null: taken from the data set, and stored in the run.
    """

    pyramid: str = choice("auto", "simple", "fpn")
    channels: int = positive(256)
    rpn_convs: int = positive(2)
    box_convs: int = number(4, least=0)
    box_width: int = positive(1024)
    mask_convs: int = positive(4)
    proposals_before: int = number(2000, least=2)
    proposals: int = positive(1000)
    samples: int = number(512, least=4)
    detections: int = may_change(positive(100))
    min_score: float = may_change(number(0.05, least=0, below=1))
    num_classes: int | None = found_at_start(number(None, least=1, most=100_000))


@dataclass
class DenseDataConfig(DataConfig):
    """Images with annotations. Fields of :class:`DataConfig` that have no meaning here are not keys."""

    val_percent: float = recorded(0.0)
    val_seed: int = recorded(0)
    endings: str | None = recorded()
    skip_undecodable: bool = recorded(False)
    skipped_folders: str | None = recorded()
    pad: int = recorded(0)
    cache: str | None = recorded()
    cache_gib: float = recorded(100.0)
    samples: int | None = recorded()
    shuffle_buffer: int = recorded(1000)
    crop_scale: list[float] = field(default_factory=lambda: [1.0, 1.0], metadata={"recorded": True})
    crop_ratio: list[float] = field(default_factory=lambda: [1.0, 1.0], metadata={"recorded": True})
    interpolation: str = recorded("bilinear")
    crop_pct: float = recorded(1.0)
    second_size: list[int] | None = recorded()
    jitter: float = recorded(0.0)


@dataclass
class SegmentDataConfig(DenseDataConfig):
    """Images with a class for each pixel, and their augmentation (mmsegmentation's for ADE20K).

    root: Folder of the data set.
    name: ade20k: images/{training,validation}/*.jpg and annotations/{training,validation}/*.png below root. A pixel's
        class number is its value in a grey or palette PNG; 255: no class. Class names: one per line in
        root/classes.txt, else from root/objectInfo150.txt.
    image_size: Height and width of training crops and of the windows of slide testing, in pixels.
    resize: Limits of the shorter and the longer side, in pixels: images are resized to the largest size within both,
        without distortion.
    resize_ratio: Range of the random factor on resize in training.
    max_class_share: A crop is drawn again, up to ten times, while one class covers this share of its labelled pixels or
        more (mmsegmentation's cat_max_ratio). 1: never.
    distortion: Random brightness, contrast, saturation and hue (mmsegmentation's PhotoMetricDistortion).
    reduce_zero_label: Ignore class 0 of the masks, and number class n as n - 1.
    """

    name: str = choice("ade20k")
    image_size: list[int] = size(512, 512, least=1, most=16_384)
    resize: list[int] = numbers(512, 2048, length=2, least=1, most=16_384)
    resize_ratio: list[float] = numbers(0.5, 2.0, length=2, above=0, most=4)
    max_class_share: float = number(0.75, above=0, most=1)
    distortion: bool = True
    reduce_zero_label: bool = True


@dataclass
class DetectDataConfig(DenseDataConfig):
    """Images with objects, and their augmentation: large-scale jitter.

    root: Folder of the data set.
    name: coco: root/train2017/*.jpg and root/annotations/instances_train2017.json, likewise val2017.
    train: Name of the training split: of its image folder and of annotations/instances_NAME.json.
    val: Name of the validation split, likewise.
    image_size: Height and width in pixels. Images are resized to fit, without distortion, and padded at the bottom and
        the right.
    scale: Range of the random factor on image_size in training (large-scale jitter). Larger images are cropped, smaller
        ones padded.
    """

    name: str = choice("coco")
    train: str = naming("train2017", "the training images")
    val: str = naming("val2017", "the validation images")
    image_size: list[int] = size(1024, 1024, least=1, most=16_384)
    scale: list[float] = numbers(0.1, 2.0, length=2, above=0, most=4)


@dataclass
class DenseOptimConfig(FinetuneOptimConfig):
    """AdamW, learning-rate schedule and layer-wise decay of the learning rate.

    base_lr: Base learning rate of a batch of 256 images; the peak is base_lr * batch_size / 256.
    """

    base_lr: float = positive(1.6e-3)
    min_lr: float = number(0.0, least=0)
    warmup_epochs: float | None = number(1.0, least=0)
    layer_decay: float = number(0.75, above=0, most=1)


@dataclass
class SegmentTestConfig:
    """Inference on an image.

    mode: slide: sliding windows of data.image_size, whose logits are averaged. whole: the resized image in one pass.
    stride: Stride of the sliding windows, as height and width in pixels. null: two thirds of a window, 341 of 512.
    scales: Scale factors on data.resize (multi-scale testing). With several scales, or with flip, class probabilities
        are averaged.
    flip: Also average over the mirrored image.
    """

    mode: str = choice("slide", "whole")
    stride: list[int] | None = size(least=1)
    scales: list[float] = numbers(1.0, above=0, most=100)
    flip: bool = False


def window_stride(stride: Sequence[int] | None, window: Sequence[int]) -> list[int]:
    """Height and width of the steps between windows: ``stride``, by default two thirds of a window."""
    return list(stride or (max(2 * side // 3, 1) for side in window))


@dataclass
class SegmentConfig(DownstreamConfig):
    """Semantic segmentation: an encoder with a UPerNet head. Defaults: ADE20K with a ViT-B, 160,000 steps of 16 images.

    test: Used in the run's validations (`dmjd miou` has its own).
    """

    run: str = may_change(path("runs/segment", of="a folder"))
    epochs: int = positive(127)
    batch_size: int = positive(16)
    data: SegmentDataConfig = field(default_factory=SegmentDataConfig)
    optim: DenseOptimConfig = field(default_factory=DenseOptimConfig)
    head: UperNetConfig = field(default_factory=UperNetConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    test: SegmentTestConfig = may_change(field(default_factory=SegmentTestConfig))
    recipe: str = recorded("none")
    command: str = recorded("segment")


@dataclass
class DetectConfig(DownstreamConfig):
    """Object detection and instance segmentation: an encoder with Mask R-CNN. Defaults: optimizer of ViTDet-B on COCO;
    preset=coco_vitdet_base adds its windowed attention.
    """

    run: str = may_change(path("runs/detect", of="a folder"))
    epochs: int = positive(100)
    batch_size: int = positive(64)
    data: DetectDataConfig = field(default_factory=DetectDataConfig)
    optim: DenseOptimConfig = field(default_factory=DenseOptimConfig)
    head: MaskRCNNConfig = field(default_factory=MaskRCNNConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    recipe: str = recorded("none")
    command: str = recorded("detect")
