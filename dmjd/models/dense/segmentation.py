"""Semantic segmentation: an encoder with UPerNet and an auxiliary FCN head, and the objective with their losses.

The heads are transformers' (mmsegmentation's in structure and names) with batch normalisation over all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from dmjd.models.dense.batch_norm import with_batch_norm
from dmjd.models.dense.pyramid import LEVELS, ViTPyramid, build_pyramid
from dmjd.models.dense.upsample import upsample
from dmjd.models.initialisation import adopt_for_maps
from dmjd.models.masked_image_model import Encoder, Model
from dmjd.models.objective import Trainable

IGNORED = 255
"""Class of pixels that are in no loss and no score."""

_AUXILIARY_LEVEL = 2  # stride 16


class UperNet(UperNetHead):
    """transformers' UPerNet head, with :func:`~dmjd.models.dense.upsample.upsample`."""

    def forward(self, maps: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        """Maps at strides 4, 8, 16 and 32 -> features at stride 4."""
        laterals = [layer(x) for layer, x in zip(self.lateral_convs, maps, strict=False)]
        last = maps[-1]
        pooled = [upsample(block(last), last.shape[-2:]) for block in self.psp_modules.blocks]
        laterals.append(self.bottleneck(torch.cat((last, *pooled), dim=1)))
        for level in range(LEVELS - 1, 0, -1):
            finer = laterals[level - 1]
            laterals[level - 1] = finer + upsample(laterals[level], finer.shape[-2:])
        outputs = [layer(x) for layer, x in zip(self.fpn_convs, laterals, strict=False)]
        finest = outputs[0].shape[-2:]
        coarser = [upsample(x, finest) for x in (*outputs[1:], laterals[-1])]
        features: Tensor = self.fpn_bottleneck(torch.cat((outputs[0], *coarser), dim=1))
        return self.classifier(features)


class Segmenter(Model):
    """Encoder, pyramid of four maps, UPerNet and FCN heads without their classifiers, and the classifiers.

    It takes the encoder over and initialises it as in pre-training; the heads are initialised as in mmsegmentation.
    Parameters that take no part leave the encoder: mask token, final norm, ConvMAE's multi-scale convolutions.

    Args:
        maps: of a ViT, the four blocks, from 0, whose outputs the head reads; the last one is its last block. None for
            those at 1/3, 1/2, 2/3 and the end.
        channels, pool_scales: width and pooled grids of UPerNet.
        auxiliary_channels: width of the FCN head, which reads the map at stride 16; None for no such head.

    Raises:
        ValueError: for ``maps`` that the encoder does not have.
    """

    decoder = None

    def __init__(
        self,
        encoder: Encoder,
        num_classes: int,
        *,
        maps: Sequence[int] | None = None,
        channels: int = 512,
        pool_scales: Sequence[int] = (1, 2, 3, 6),
        auxiliary_channels: int | None = 256,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        adopt_for_maps(self)
        self.pyramid = build_pyramid(encoder.map_widths)
        self.maps = _maps(encoder, maps) if isinstance(self.pyramid, ViTPyramid) else ()
        settings = SimpleNamespace(
            hidden_size=channels,
            num_labels=num_classes,
            pool_scales=tuple(pool_scales),
            auxiliary_in_channels=None,
            auxiliary_channels=auxiliary_channels,
            auxiliary_num_convs=1,
            auxiliary_concat_input=False,
        )
        widths = list(self.pyramid.widths)
        self.decode_head = with_batch_norm(UperNet(settings, widths))
        self.auxiliary_head: nn.Module | None = None
        self.auxiliary: nn.Module | None = None
        if auxiliary_channels is not None:
            self.auxiliary_head = with_batch_norm(UperNetFCNHead(settings, widths, _AUXILIARY_LEVEL))
            self.auxiliary = _without_classifier(self.auxiliary_head)
        self.head = _without_classifier(self.decode_head)
        self.dropout_widths = (channels, auxiliary_channels or 0)

    def forward(
        self, images: Tensor, branch_scales: Tensor | None = None, dropout: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            images: float ``[B, C, H, W]``, normalised; sides that are multiples of the encoder's patch.
            branch_scales: the encoder's stochastic depth, ``[depth, 2, B]``, or None.
            dropout: factors of the channels before the classifiers, ``[B, sum of dropout_widths]``, or None.

        Returns:
            Logits ``[B, classes, h, w]`` at stride 4, and in training those of the auxiliary head at stride 16.
        """
        maps = self.pyramid(self.encoder.feature_maps(images, branch_scales, self.maps))
        factors = (None, None) if dropout is None else dropout[..., None, None].split(self.dropout_widths, dim=1)
        logits: Tensor = self.head(_scaled(self.decode_head(maps), factors[0]))
        if self.auxiliary_head is None or self.auxiliary is None or not self.training:
            return logits, None
        return logits, self.auxiliary(_scaled(self.auxiliary_head(maps), factors[1]))


def _maps(encoder: Encoder, chosen: Sequence[int] | None) -> tuple[int, ...]:
    depth = len(encoder.blocks)
    if chosen is None:
        chosen = [max(0, depth * part // 6 - 1) for part in (2, 3, 4, 6)]
    fits = len(chosen) == LEVELS and list(chosen) == sorted(chosen) and chosen[0] >= 0 and chosen[-1] == depth - 1
    if not fits:
        raise ValueError(
            f"head.maps must be {LEVELS} blocks in ascending order, the last of them {depth - 1}, the encoder's; "
            f"got {list(chosen)}"
        )
    return tuple(chosen)


def _without_classifier(head: Any) -> nn.Module:
    """The classifier of ``head``, which then returns its features: dropout comes between the two. Initialises both."""
    classifier: nn.Module = head.classifier
    head.classifier = nn.Identity()
    for part in head.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    assert isinstance(classifier, nn.Conv2d)
    assert classifier.bias is not None
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)
    return classifier


def _scaled(features: Tensor, factors: Tensor | None) -> Tensor:
    return features if factors is None else features * factors.to(features.dtype)


class Segmented(NamedTuple):
    """0-d float32. total: the loss. decode, auxiliary: cross-entropy of the two heads; auxiliary is 0 without one."""

    total: Tensor
    decode: Tensor
    auxiliary: Tensor


class Segmentation(Trainable):
    """Cross-entropy at the images' resolution, in float32 at any precision of the model.

    As in mmsegmentation, ignored pixels have loss 0 and are counted in the mean.

    Args:
        auxiliary_weight: of the auxiliary head's loss.
    """

    model: Segmenter

    def __init__(self, model: Segmenter, auxiliary_weight: float = 0.4) -> None:
        super().__init__(model)
        self.auxiliary_weight = auxiliary_weight

    def forward(
        self,
        images: Tensor,
        maps: Tensor | None = None,
        branch_scales: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Segmented | Tensor:
        """
        Args:
            images: float ``[B, C, H, W]``, normalised; padded with zeros to multiples of the patch.
            maps: the class of each pixel, integer ``[B, H, W]``; 255 for none.
            branch_scales, dropout: as for :class:`Segmenter`.

        Returns:
            The losses; without ``maps`` logits, float32 ``[B, classes, H, W]``.
        """
        height, width = images.shape[-2:]
        patch = self.model.encoder.patch_size
        padded = F.pad(images, (0, -width % patch, 0, -height % patch))
        logits, auxiliary = self.model(padded, branch_scales, dropout)
        logits = _at(padded, logits)[..., :height, :width]
        if maps is None:
            return logits
        decode = _cross_entropy(logits, maps)
        if auxiliary is None:
            return Segmented(decode, decode, decode.new_zeros(()))
        other = _cross_entropy(_at(padded, auxiliary)[..., :height, :width], maps)
        return Segmented(decode + self.auxiliary_weight * other, decode, other)


def _at(images: Tensor, logits: Tensor) -> Tensor:
    """``logits`` at the size of ``images``, float32."""
    return upsample(logits.float().contiguous(), images.shape[-2:])  # cross-entropy copies another layout


def _cross_entropy(logits: Tensor, maps: Tensor) -> Tensor:
    # Without a reduction of its own, whose CUDA kernel adds up in no fixed order.
    return F.cross_entropy(logits, maps.long(), ignore_index=IGNORED, reduction="none").mean()
