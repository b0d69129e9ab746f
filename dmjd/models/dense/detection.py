"""Mask R-CNN as ViTDet configures it in detectron2, over any encoder: the model, its losses and its detections.

Layers are torchvision's. Anchors, sampling and pooling are ours (:mod:`dmjd.models.dense.boxes`,
:mod:`dmjd.models.dense.sampling`): torchvision differs from detectron2 there, draws from torch's generator, and makes
the host wait many times. Here the host waits once for each image in training, for non-maximum suppression, and three
times in testing; all else has fixed shapes, with unused places of weight 0. So every parameter has a gradient, also
without any object, and a step takes the same memory for all images.

On a GPU the backward pass of RoIAlign adds with atomics, so its last bits differ between runs. All else here that adds
into one place adds one value that is not 0.

Differences from detectron2:

- Samples of anchors and proposals are keyed by (seed, epoch, sample id), and losses are means over the images, so
  neither depends on the batch.
- Sizes of anchors and of the boxes of a level are multiples of the pyramid's strides. They are the same pixels for
  patches of 16.
- An object that overlaps no anchor matches none. detectron2 matches it with all of them.
- FPN has LayerNorm, where ConvMAE has SyncBN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import nms

from dmjd.models.dense import boxes as box_ops
from dmjd.models.dense.feature_pyramid import FeaturePyramid, LayerNorm2d, SimpleFeaturePyramid
from dmjd.models.dense.sampling import ANCHORS, PROPOSALS, Sample, best, match, sample
from dmjd.models.initialisation import adopt_for_maps
from dmjd.models.masked_image_model import Encoder, Model
from dmjd.models.objective import Trainable

BOX_SIDE, MASK_SIDE = 7, 14
"""Sides of pooled features; a mask has twice the side."""

ANCHOR_SAMPLES = 256
"""Anchors of an image in the loss of the region proposal network, at most half of them positive."""

_FOREGROUND, _BACKGROUND = 0.7, 0.3  # overlaps of positive and negative anchors
_PROPOSAL_OVERLAP, _DETECTION_OVERLAP = 0.7, 0.5  # above it the lower score is suppressed
_OBJECT = 0.5  # least overlap of a positive proposal
_POSITIVE = 4  # the largest share of positive proposals is a quarter


class Dense(NamedTuple):
    """Lists of the five levels, float32: maps ``[B, C, h, w]``; logits ``[B, h * w * 3]`` and deltas
    ``[B, h * w * 3, 4]`` of their anchors."""

    maps: list[Tensor]
    logits: list[Tensor]
    deltas: list[Tensor]


class MaskRCNN(Model):
    """Encoder, feature pyramid, region proposal network, box head and mask head.

    It takes the encoder over and initialises it as in pre-training; the heads are initialised as detectron2's.
    Parameters that take no part leave the encoder: mask token, final norm, ConvMAE's multi-scale convolutions.

    Args:
        pyramid: "simple" (ViTDet's, from the last map) or "fpn" (over the maps of all stages).
        channels: of the pyramid and the heads.
        rpn_convs, box_convs, mask_convs: 3x3 convolutions of each head.
        box_width: of the box head's linear layer.

    Raises:
        ValueError: for pyramid="fpn" and an encoder without stages.
    """

    decoder = None

    def __init__(
        self,
        encoder: Encoder,
        num_classes: int,
        *,
        pyramid: str,
        channels: int = 256,
        rpn_convs: int = 2,
        box_convs: int = 4,
        box_width: int = 1024,
        mask_convs: int = 4,
    ) -> None:
        super().__init__()
        widths = encoder.map_widths
        if pyramid == "fpn" and len(widths) < 3:
            raise ValueError("pyramid=fpn needs a backbone with stages, and a ViT has none; use pyramid=simple")
        self.encoder = encoder
        adopt_for_maps(self)
        self.num_classes = num_classes
        self.pyramid: SimpleFeaturePyramid | FeaturePyramid
        if pyramid == "fpn":
            self.pyramid = FeaturePyramid(widths, channels)
        else:
            self.pyramid = SimpleFeaturePyramid(widths[-1], encoder.patch_size, channels)
        self.rpn = RPNHead(channels, box_ops.ANCHORS_PER_PLACE, rpn_convs)
        shape = channels, BOX_SIDE, BOX_SIDE
        self.box_head = FastRCNNConvFCHead(shape, [channels] * box_convs, [box_width], LayerNorm2d)
        self.box_class = nn.Linear(box_width, num_classes + 1)
        self.box_deltas = nn.Linear(box_width, 4 * num_classes)
        self.mask_head = MaskRCNNHeads(channels, [channels] * mask_convs, 1, LayerNorm2d)
        self.mask_logits = MaskRCNNPredictor(channels, channels, num_classes)
        for layer, std in ((self.box_class, 0.01), (self.box_deltas, 0.001), (self.mask_logits.mask_fcn_logits, 0.001)):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.mask_logits.conv5_mask.bias)
        for layer in self.box_head:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, a=1)
                nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, branch_scales: Tensor | None = None) -> Dense:
        """
        Args:
            images: float ``[B, C, H, W]``, normalised.
            branch_scales: the encoder's stochastic depth, ``[depth, 2, B]``, or None.
        """
        maps = self.pyramid(self.encoder.feature_maps(images, branch_scales))
        logits, deltas = self.rpn(maps)
        return Dense(
            [each.float().contiguous() for each in maps],  # RoIAlign reads this layout
            [each.permute(0, 2, 3, 1).flatten(1).float() for each in logits],
            [
                each.unflatten(1, (box_ops.ANCHORS_PER_PLACE, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3).float()
                for each in deltas
            ],
        )

    def classify(self, maps: Sequence[Tensor], proposals: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, N, classes + 1]``, the background last, and deltas ``[B, N, classes, 4]`` of ``proposals``
        ``[B, N, 4]``, float32."""
        x = self.box_head(self._pool(maps, proposals, BOX_SIDE))
        logits, deltas = self.box_class(x).float(), self.box_deltas(x).float()
        shape = proposals.shape[:2]
        return logits.unflatten(0, shape), deltas.unflatten(0, shape).unflatten(-1, (self.num_classes, 4))

    def segment(self, maps: Sequence[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
        """Logits of the mask of ``labels [B, N]`` in each of ``boxes [B, N, 4]``, float32 ``[B * N, 28, 28]``."""
        logits = self.mask_logits(self.mask_head(self._pool(maps, boxes, MASK_SIDE)))
        index = labels.flatten().view(-1, 1, 1, 1).expand(-1, 1, *logits.shape[-2:])
        return logits.gather(1, index).squeeze(1).float()

    def _pool(self, maps: Sequence[Tensor], boxes: Tensor, side: int) -> Tensor:
        return box_ops.pool(maps[:4], self.pyramid.strides[:4], boxes, side)


class Detected(NamedTuple):
    """Losses, 0-d float32; ``total`` is the sum of the others.

    rpn_class, rpn_box: binary cross-entropy of sampled anchors, and L1 of the deltas of positive ones.
    class_, box: cross-entropy of sampled proposals, and L1 of the deltas of positive ones.
    mask: binary cross-entropy of the masks of positive proposals.
    """

    total: Tensor
    rpn_class: Tensor
    rpn_box: Tensor
    class_: Tensor
    box: Tensor
    mask: Tensor


class Limits(NamedTuple):
    """Numbers of an image: keys of :class:`~dmjd.config.dense.MaskRCNNConfig`.

    suppress: False replaces non-maximum suppression by the highest scores, of the same shapes: no value is read, so it
        works on "meta" and under FakeTensorMode.
    """

    proposals_before: int = 2000
    proposals: int = 1000
    samples: int = 512
    detections: int = 100
    min_score: float = 0.05
    suppress: bool = True


class _Objects(NamedTuple):
    """The objects of a batch, as in :class:`~dmjd.data.batch.Batch`, with the place of each ``present [B, M]`` or not,
    and the key and ids of the draws."""

    boxes: Tensor
    labels: Tensor
    masks: Tensor
    present: Tensor
    key: Tensor
    sample_ids: Tensor

    def sample(self, positive: Tensor, negative: Tensor, count: int, most: int, lane: int) -> Sample:
        """As :func:`~dmjd.models.dense.sampling.sample`."""
        return sample(positive, negative, count, most, sample_ids=self.sample_ids, key=self.key, lane=lane)


class Detection(Trainable):
    """Losses and detections of Mask R-CNN; boxes and losses are float32 at any precision of the model.

    Each loss is a mean over the images: of the anchors' over 256 anchors, of classes and boxes over the image's sampled
    proposals, of masks over its positive ones. That is detectron2's normalisation with one image on each GPU, as ViTDet
    was trained, at any batch and world size.
    """

    model: MaskRCNN

    def __init__(self, model: MaskRCNN, limits: Limits | None = None) -> None:
        super().__init__(model)
        self.limits = Limits() if limits is None else limits

    def forward(
        self,
        images: Tensor,
        boxes: Tensor | None = None,
        labels: Tensor | None = None,
        masks: Tensor | None = None,
        key: Tensor | None = None,
        sample_ids: Tensor | None = None,
        branch_scales: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> Detected | list[dict[str, Tensor]]:
        """
        Args:
            images: float ``[B, C, H, W]``, normalised, padded at the bottom and the right.
            boxes, labels, masks: of the objects, as in :class:`~dmjd.data.batch.Batch`; labels are -1 in places without
                an object.
            key: of the draws, from :func:`dmjd.ops.make_key`. sample_ids: int64 ``[B]``.
            branch_scales: as for :class:`MaskRCNN`.
            sizes: without ``boxes``: (height, width) of the images without padding, ``[B, 2]``.

        Returns:
            The losses; without ``boxes`` those of :meth:`detect`.
        """
        if boxes is None:
            assert sizes is not None
            return self._detect(images, sizes)
        assert labels is not None
        assert masks is not None
        assert key is not None
        assert sample_ids is not None
        present = labels >= 0
        # Nothing is read from the places without an object.
        objects = _Objects(
            torch.where(present.unsqueeze(-1), boxes.float(), 0), labels.clamp(min=0), masks, present, key, sample_ids
        )
        maps, logits, deltas = self.model(images, branch_scales)
        anchors = self._anchors(maps)
        rpn_class, rpn_box = _anchor_losses(logits, deltas, anchors, objects)
        whole = torch.tensor(images.shape[-2:]).to(images.device, non_blocking=True).expand(len(images), 2)
        proposals, real = self._propose(logits, deltas, anchors, whole, self.limits.proposals_before)
        class_, box, mask = self._head_losses(maps, proposals, real, objects)
        return Detected(rpn_class + rpn_box + class_ + box + mask, rpn_class, rpn_box, class_, box, mask)

    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """Detections of each image, by descending score: boxes ``[n, 4]`` in pixels of ``images``, scores ``[n]``,
        labels int64 ``[n]`` and masks ``[n, 28, 28]``, probabilities in the grid of the box.

        Args:
            images, sizes: as for a call.
        """
        found = self(images, sizes=sizes)
        assert isinstance(found, list)
        return found

    def _anchors(self, maps: Sequence[Tensor]) -> list[Tensor]:
        grids = [(each.shape[-2], each.shape[-1]) for each in maps]
        return box_ops.anchors(grids, self.model.pyramid.strides, maps[0].device)

    @torch.no_grad()
    def _propose(
        self, logits: Sequence[Tensor], deltas: Sequence[Tensor], anchors: Sequence[Tensor], sizes: Tensor, before: int
    ) -> tuple[Tensor, Tensor]:
        """Proposals ``[B, limits.proposals, 4]`` by descending score, and which places hold one.

        Args:
            sizes: ``[B, 2]``, to which boxes are clipped.
            before: proposals of each level before non-maximum suppression within the level.
        """
        found = []
        for level, (logit, delta, anchor) in enumerate(zip(logits, deltas, anchors, strict=True)):
            index = best(logit, before)
            boxes = box_ops.decode(_take(delta, index), anchor[index], box_ops.RPN_WEIGHTS)
            found.append((boxes, logit.gather(1, index), torch.full_like(index, level)))
        boxes, scores, levels = (torch.cat(column, dim=1) for column in zip(*found, strict=True))
        boxes = box_ops.clip(boxes, sizes)
        usable = _usable(boxes) & scores.isfinite()
        boxes, scores = _or_unit(boxes, usable), torch.where(usable, scores, -torch.inf)
        count = self.limits.proposals
        if self.limits.suppress:
            kept = [_suppress(*each, _PROPOSAL_OVERLAP, count) for each in zip(boxes, scores, levels, strict=True)]
            index = torch.stack([F.pad(each, (0, count - len(each)), value=-1) for each in kept])
        else:
            index = best(scores, count)
            index = F.pad(index, (0, count - index.shape[1]), value=-1)
        real = usable.gather(1, index.clamp(min=0)) & (index >= 0)
        return _or_unit(_take(boxes, index.clamp(min=0)), real), real

    def _head_losses(
        self, maps: Sequence[Tensor], proposals: Tensor, real: Tensor, objects: _Objects
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of classes, boxes and masks, of a sample of ``proposals [B, N, 4]`` where they are ``real [B, N]`` and
        of the objects' own boxes."""
        count = self.limits.samples
        most = count // _POSITIVE
        with torch.no_grad():
            proposals = torch.cat((proposals, objects.boxes), dim=1)
            real = torch.cat((real, objects.present), dim=1)
            matched = match(proposals, objects.boxes, objects.present)
            positive = real & (matched.overlap >= _OBJECT)
            index, positive, used = objects.sample(positive, real & ~positive, count, most, PROPOSALS)
            proposals = _or_unit(_take(proposals, index), used)
            matches = matched.objects.gather(1, index)
            classes = torch.where(positive, objects.labels.gather(1, matches), self.model.num_classes)
        logits, deltas = self.model.classify(maps, proposals)
        entropies = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view_as(classes)
        samples = used.sum(dim=1).clamp(min=1)
        class_ = _mean(entropies, used, samples)

        first = slice(0, most)  # positive proposals come first
        proposals, matches, positive, classes = (each[:, first] for each in (proposals, matches, positive, classes))
        classes = torch.where(positive, classes, 0)
        deltas = deltas[:, first].gather(2, classes[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)
        targets = torch.where(positive.unsqueeze(-1), _take(objects.boxes, matches), proposals)
        distances = (deltas - box_ops.encode(targets, proposals, box_ops.HEAD_WEIGHTS)).abs().sum(dim=-1)
        box = _mean(distances, positive, samples)

        mask_logits = self.model.segment(maps, proposals, classes)
        shapes = box_ops.crop_masks(objects.masks, matches, proposals, 2 * MASK_SIDE)
        entropies = F.binary_cross_entropy_with_logits(mask_logits, shapes, reduction="none").mean(dim=(1, 2))
        mask = _mean(entropies.view_as(distances), positive, positive.sum(dim=1).clamp(min=1))
        return class_, box, mask

    @torch.no_grad()
    def _detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        maps, logits, deltas = self.model(images)
        proposals, real = self._propose(logits, deltas, self._anchors(maps), sizes, self.limits.proposals_before // 2)
        class_logits, class_deltas = self.model.classify(maps, proposals)
        scores = class_logits.softmax(dim=-1)[..., :-1]  # [B, N, classes]
        boxes = box_ops.decode(class_deltas, proposals.unsqueeze(2), box_ops.HEAD_WEIGHTS)
        boxes = box_ops.clip(boxes.flatten(1, 2), sizes).view_as(boxes)
        candidates = (scores > self.limits.min_score) & _usable(boxes) & real.unsqueeze(-1)
        found = []
        for image_boxes, image_scores, each in zip(boxes, scores, candidates, strict=True):
            rows, classes = each.nonzero(as_tuple=True)
            kept, values = image_boxes[rows, classes], image_scores[rows, classes]
            index = _suppress(kept, values, classes, _DETECTION_OVERLAP, self.limits.detections)
            found.append((kept[index], values[index], classes[index]))
        # As many masks for every image: a sharded mask head is then called equally on every rank.
        rest = [self.limits.detections - len(classes) for _, _, classes in found]
        padded = torch.stack([F.pad(each[0], (0, 0, 0, more)) for each, more in zip(found, rest, strict=True)])
        labels = torch.stack([F.pad(each[2], (0, more)) for each, more in zip(found, rest, strict=True)])
        masks = self.model.segment(maps, padded, labels).sigmoid().unflatten(0, labels.shape)
        return [
            {"boxes": each[0], "scores": each[1], "labels": each[2], "masks": mask[: len(each[2])]}
            for each, mask in zip(found, masks, strict=True)
        ]


def _anchor_losses(
    logits: Sequence[Tensor], deltas: Sequence[Tensor], anchors: Sequence[Tensor], objects: _Objects
) -> tuple[Tensor, Tensor]:
    """Losses of the region proposal network: of objectness, and of the boxes of positive anchors."""
    every = torch.cat(list(anchors))
    with torch.no_grad():
        matched = match(every.unsqueeze(0), objects.boxes, objects.present)
        positive = (matched.overlap >= _FOREGROUND) | matched.closest
        negative = (matched.overlap < _BACKGROUND) & ~positive
        index, positive, used = objects.sample(positive, negative, ANCHOR_SAMPLES, ANCHOR_SAMPLES // 2, ANCHORS)
        sources = every[index]
        targets = torch.where(positive.unsqueeze(-1), _take(objects.boxes, matched.objects.gather(1, index)), sources)
        targets = box_ops.encode(targets, sources, box_ops.RPN_WEIGHTS)
    logit = torch.cat(list(logits), dim=1).gather(1, index)
    entropies = F.binary_cross_entropy_with_logits(logit, positive.float(), reduction="none")
    distances = (_take(torch.cat(list(deltas), dim=1), index) - targets).abs().sum(dim=-1)
    return _mean(entropies, used, ANCHOR_SAMPLES), _mean(distances, positive, ANCHOR_SAMPLES)


def _mean(values: Tensor, chosen: Tensor, count: Tensor | int) -> Tensor:
    """Mean over the images of the sum of ``values [B, N]`` where ``chosen``, divided by ``count`` (``[B]``)."""
    return (torch.where(chosen, values, 0).sum(dim=1) / count).mean()


def _take(values: Tensor, index: Tensor) -> Tensor:
    """``[B, N, 4]`` at ``[B, K]`` -> ``[B, K, 4]``."""
    return values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def _usable(boxes: Tensor) -> Tensor:
    """Which boxes are finite and have an area."""
    return boxes.isfinite().all(dim=-1) & (boxes[..., 2:] > boxes[..., :2]).all(dim=-1)


def _or_unit(boxes: Tensor, real: Tensor) -> Tensor:
    """``boxes`` with (0, 0, 1, 1) in the places that hold none: its deltas are finite."""
    unit = torch.cat((torch.zeros_like(boxes[..., :2]), torch.ones_like(boxes[..., 2:])), dim=-1)
    return torch.where(real.unsqueeze(-1), boxes, unit)


def _suppress(boxes: Tensor, scores: Tensor, groups: Tensor, overlap: float, count: int) -> Tensor:
    """Non-maximum suppression: indices of up to ``count`` boxes, of ``[N, 4]`` of one image, by descending score, that
    no box of the same group with a higher score overlaps by more than ``overlap``. Here the host waits for the device.
    """
    # Groups are moved apart, in float64, where that does not round overlaps.
    places = boxes.double() + (groups.double() * _APART).unsqueeze(1)
    order = scores.sort(descending=True, stable=True).indices
    for end in (_TRIED * count, len(order)):
        part = order[:end]  # the first boxes depend on those of higher scores alone
        kept = part[nms(places[part], scores[part].double(), overlap)[:count]]
        if len(kept) == count or end >= len(order):
            break
    return kept


_APART = 1 << 15
"""Pixels between groups: more than the largest image has."""

_TRIED = 4
"""Boxes that are tried first, in multiples of the wanted ones: suppression takes the square of their number."""
