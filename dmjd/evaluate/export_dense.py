"""Whole models of segmentation and detection as modules of fixed shapes, for ``dmjd export``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import nms

from dmjd.evaluate.onnx_model import Outputs, relative
from dmjd.models.dense import boxes as box_ops
from dmjd.models.dense.detection import Detection
from dmjd.models.dense.segmentation import Segmentation
from dmjd.models.objective import Trainable

CANDIDATES = 4096
"""Pairs of proposal and class of an image, those of the highest scores, that suppression compares."""
TIE = 1e-5
"""Scores that differ by at most this much may be in another order in a file."""
_PROPOSAL_OVERLAP, _DETECTION_OVERLAP = 0.7, 0.5


def whole_model(objective: Trainable, form: str) -> Outputs:
    """The outputs of a model of segmentation or detection for ``format=FORM``."""
    if isinstance(objective, Segmentation):
        return SegmentationLogits(objective)
    assert isinstance(objective, Detection)
    return Detector(objective, torch.float32 if form == "onnx" else torch.float64)


class SegmentationLogits(Outputs):
    """Output of a segmentation model: ``logits [B, classes, H, W]`` of normalised float32 images ``[B, C, H, W]``."""

    outputs = ("logits",)

    def __init__(self, segmentation: Segmentation) -> None:
        super().__init__()
        self.segmentation = segmentation

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        logits = self.segmentation(images)
        assert isinstance(logits, Tensor)
        return (logits,)


class Detector(Outputs):
    """Detections of one image by a detection model, in fixed shapes: ``boxes [n, 4]`` in pixels of the image, ``scores
    [n]``, ``labels [n]``, and ``masks [n, 28, 28]``, probabilities in the grid of the box. n is ``head.detections``;
    places without a detection have label -1 and score 0, behind the others.

    Inputs: a normalised float32 image ``[1, C, H, W]``, padded at the bottom and the right, and its (height, width)
    without padding, int64 ``[1, 2]``. Equal to :meth:`~dmjd.models.dense.detection.Detection.detect` while at most
    :data:`CANDIDATES` pairs of proposal and class have ``head.min_score``.

    Args:
        precision: of the overlaps in suppression. ONNX has float32 alone, in which boxes of the last classes lie on a
            grid of about 1/100 pixel: a pair whose overlap is that close to the limit may be decided otherwise.
    """

    inputs = ("images", "sizes")
    outputs = ("boxes", "scores", "labels", "masks")
    needs = ("torchvision",)
    batches, traced = (1,), 1

    def __init__(self, detection: Detection, precision: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.detection, self.precision = detection, precision

    def sample(self, batch: int, shape: tuple[int, int, int]) -> tuple[Tensor, ...]:
        return *super().sample(batch, shape), torch.tensor([[shape[1], shape[2] // 2 + 1]])

    def differences(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
        """Of the scores, and of the rest where no other detection has nearly the same score: their order is open."""
        apart = (expected[1].diff().abs() > TIE).tolist()
        alone = [left and right for left, right in zip([True, *apart], [*apart, True], strict=True)]
        kept = torch.tensor(alone) & (expected[2] >= 0)
        chosen = [[values[1], *(values[place].float()[kept] for place in (0, 2, 3))] for values in (found, expected)]
        return {
            name: relative(value, wanted) if wanted.any() else float(value.abs().sum())
            for name, value, wanted in zip(("scores", "boxes", "labels", "masks"), *chosen, strict=True)
        }

    def forward(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        model, limits = self.detection.model, self.detection.limits
        maps, logits, deltas = model(images)
        grids = [(each.shape[-2], each.shape[-1]) for each in maps]
        anchors = box_ops.anchors(grids, model.pyramid.strides, images.device)
        levels = []
        for level, (logit, delta, anchor) in enumerate(zip(logits, deltas, anchors, strict=True)):
            index = logit[0].topk(min(limits.proposals_before // 2, logit.shape[1])).indices
            boxes = box_ops.decode(delta[0, index], anchor[index], box_ops.RPN_WEIGHTS)
            levels.append((boxes, logit[0, index], torch.full_like(index, level)))
        boxes, scores, groups = (torch.cat(column) for column in zip(*levels, strict=True))
        boxes = box_ops.clip(boxes.unsqueeze(0), sizes)[0]
        usable = _usable(boxes) & scores.isfinite()
        boxes, scores = _or_unit(boxes, usable), torch.where(usable, scores, -torch.inf)
        apart = max(images.shape[-2:]) + 1
        index, real = self._suppressed(boxes, scores, groups * apart, _PROPOSAL_OVERLAP, limits.proposals)
        real = real & usable[index]
        proposals = _or_unit(boxes[index], real).unsqueeze(0)
        class_logits, class_deltas = model.classify(maps, proposals)
        classes = class_logits.softmax(dim=-1)[0, :, :-1]
        boxes = box_ops.decode(class_deltas, proposals.unsqueeze(2), box_ops.HEAD_WEIGHTS).flatten(1, 2)
        boxes = box_ops.clip(boxes, sizes)[0]
        candidates = (classes > limits.min_score).flatten() & _usable(boxes) & real.repeat_interleave(classes.shape[1])
        scores, index = torch.where(candidates, classes.flatten(), -1).topk(min(CANDIDATES, classes.numel()))
        boxes, labels = boxes[index], index % classes.shape[1]
        index, real = self._suppressed(boxes, scores, labels * apart, _DETECTION_OVERLAP, limits.detections)
        real = real & (scores[index] >= 0)
        boxes, labels = torch.where(real.unsqueeze(1), boxes[index], 0), torch.where(real, labels[index], 0)
        masks = model.segment(maps, boxes.unsqueeze(0), labels.unsqueeze(0)).sigmoid()
        return boxes, torch.where(real, scores[index], 0), torch.where(real, labels, -1), masks

    def _suppressed(
        self, boxes: Tensor, scores: Tensor, places: Tensor, overlap: float, count: int
    ) -> tuple[Tensor, Tensor]:
        """Non-maximum suppression: indices of ``count`` of the boxes ``[N, 4]`` by descending score, and which places
        hold one. Boxes of different groups are moved apart by ``places [N]`` pixels.

        Two boxes of the lowest score far from all others are kept always: torch.export takes a result of no or of one
        box for another program.
        """
        far = boxes.new_tensor([[-4, -4, -3, -3], [-8, -8, -7, -7]], dtype=self.precision)
        apart = torch.cat((boxes.to(self.precision) + places.to(self.precision).unsqueeze(1), far))
        kept = nms(apart, torch.cat((scores, scores.new_full((2,), -torch.inf))).to(self.precision), overlap)
        index = torch.cat((kept, kept.new_full((count,), len(boxes))))[:count]
        real = index < len(boxes)
        return torch.where(real, index, 0), real


def _usable(boxes: Tensor) -> Tensor:
    """Which boxes are finite and have an area."""
    return boxes.isfinite().all(dim=-1) & (boxes[..., 2:] > boxes[..., :2]).all(dim=-1)


def _or_unit(boxes: Tensor, real: Tensor) -> Tensor:
    """``boxes`` with (0, 0, 1, 1) in the places that hold none."""
    unit = torch.cat((torch.zeros_like(boxes[..., :2]), torch.ones_like(boxes[..., 2:])), dim=-1)
    return torch.where(real.unsqueeze(-1), boxes, unit)
