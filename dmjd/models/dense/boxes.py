"""Boxes (x1, y1, x2, y2) in pixels: anchors, deltas, overlaps and pooling, in float32 and with fixed shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torchvision.ops import roi_align

ANCHORS_PER_PLACE = 3
"""Of the ratios height / width .5, 1 and 2."""

_SIZE = 8  # side of a level's square anchor in its strides: 32 px at stride 4
_CANONICAL = 14  # strides of the first level: boxes with sides from 56 to 112 px are pooled at stride 4
_LARGEST = math.log(1000 / 16)  # of the logarithm of a decoded side in sides of its anchor

RPN_WEIGHTS = (1.0, 1.0, 1.0, 1.0)
HEAD_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""Factors of the deltas (dx, dy, dw, dh)."""


def anchors(grids: Sequence[tuple[int, int]], strides: Sequence[float], device: torch.device) -> list[Tensor]:
    """Anchors of each level, ``[h * w * 3, 4]``, those of one place together, as detectron2's with offset 0.

    Args:
        grids: (h, w) of the levels.
    """
    found = []
    for (height, width), stride in zip(grids, strides, strict=True):
        sides = [(_SIZE * stride / math.sqrt(ratio), _SIZE * stride * math.sqrt(ratio)) for ratio in (0.5, 1.0, 2.0)]
        cell = torch.tensor([(-w / 2, -h / 2, w / 2, h / 2) for w, h in sides]).to(device, non_blocking=True)
        x = (torch.arange(width, device=device) * stride).expand(height, width)
        y = (torch.arange(height, device=device) * stride).unsqueeze(1).expand(height, width)
        found.append((torch.stack((x, y, x, y), dim=-1).unsqueeze(-2) + cell).flatten(0, 2))
    return found


def encode(boxes: Tensor, sources: Tensor, weights: tuple[float, ...]) -> Tensor:
    """Deltas ``[..., 4]`` that move ``sources`` onto ``boxes``; both of positive width and height."""
    wx, wy, ww, wh = weights
    x, y, width, height = _centres(boxes)
    source_x, source_y, source_width, source_height = _centres(sources)
    return torch.stack(
        (
            wx * (x - source_x) / source_width,
            wy * (y - source_y) / source_height,
            ww * torch.log(width / source_width),
            wh * torch.log(height / source_height),
        ),
        dim=-1,
    )


def decode(deltas: Tensor, sources: Tensor, weights: tuple[float, ...]) -> Tensor:
    """The inverse of :func:`encode`, with sides of at most 62.5 times the source's."""
    dx, dy, dw, dh = (delta / weight for delta, weight in zip(deltas.unbind(-1), weights, strict=True))
    x, y, width, height = _centres(sources)
    x, y = dx * width + x, dy * height + y
    half_width = torch.exp(dw.clamp(max=_LARGEST)) * width / 2
    half_height = torch.exp(dh.clamp(max=_LARGEST)) * height / 2
    return torch.stack((x - half_width, y - half_height, x + half_width, y + half_height), dim=-1)


def _centres(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x1, y1, x2, y2 = boxes.unbind(-1)
    width, height = x2 - x1, y2 - y1
    return x1 + width / 2, y1 + height / 2, width, height


def clip(boxes: Tensor, sizes: Tensor) -> Tensor:
    """``boxes [B, N, 4]`` within images of ``sizes``, (height, width) ``[B, 2]``."""
    ends = sizes.flip(-1).repeat(1, 2).unsqueeze(1)
    return torch.minimum(boxes.clamp(min=0), ends.to(boxes.dtype))


def overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union: ``[..., M, 4]`` and ``[..., N, 4]`` -> ``[..., M, N]``; 0 for boxes without area."""
    a, b = (each.unbind(-1) for each in (boxes.unsqueeze(-2), others.unsqueeze(-3)))
    width = (torch.minimum(a[2], b[2]) - torch.maximum(a[0], b[0])).clamp_(min=0)
    both = (torch.minimum(a[3], b[3]) - torch.maximum(a[1], b[1])).clamp_(min=0).mul_(width)
    either = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return torch.where(either > 0, both / either, 0)


def levels(boxes: Tensor, first_stride: float, count: int) -> Tensor:
    """Index of the level that a box is pooled from, in ``range(count)``: each doubling of the side is a level."""
    width, height = boxes[..., 2] - boxes[..., 0], boxes[..., 3] - boxes[..., 1]
    # 16 strides of a level are detectron2's 224 px at stride 16; its epsilon keeps the logarithm of 0 finite.
    canonical = 4 * _CANONICAL * first_stride
    return torch.floor(2 + torch.log2(torch.sqrt(width * height) / canonical + 1e-8)).clamp(0, count - 1).long()


def pool(maps: Sequence[Tensor], strides: Sequence[float], boxes: Tensor, side: int) -> Tensor:
    """RoIAlign of each box from the map of its level, with as many samples as pixels: detectron2's "ROIAlignV2".

    Args:
        maps: of the levels, float32 ``[B, C, h, w]``. strides: of the levels, in pixels.
        boxes: float32 ``[B, N, 4]``.
        side: of the output.

    Returns:
        float32 ``[B * N, C, side, side]``, channels-last.
    """
    level = levels(boxes, strides[0], len(maps)).unsqueeze(-1)
    images = torch.arange(boxes.shape[0], device=boxes.device, dtype=boxes.dtype).repeat_interleave(boxes.shape[1])

    def of_level(index: int, each: Tensor, stride: float) -> Tensor:
        # A box without area has no samples and pools zeros. So all levels have fixed shapes, and the host waits for
        # no list of the boxes of a level.
        here = torch.where(level == index, boxes, 0).flatten(0, 1)
        rois = torch.cat((images.unsqueeze(1), here), dim=1)
        return roi_align(each, rois, side, spatial_scale=1 / stride, aligned=True)

    pooled = (of_level(index, *each) for index, each in enumerate(zip(maps, strides, strict=True)))
    return reduce(Tensor.add_, pooled).contiguous(memory_format=torch.channels_last)


def crop_masks(masks: Tensor, index: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Targets of the mask head: whether at least half of each cell of a grid in a box is in the object's mask.

    Args:
        masks: packed along rows, uint8 ``[B, M, H, ceil(W / 8)]``.
        index: the object of each box, int64 ``[B, N]``. boxes: ``[B, N, 4]``.
        side: of the grid.

    Returns:
        float32 ``[B * N, side, side]``, 0 or 1.
    """
    rows = torch.arange(masks.shape[0], device=masks.device).unsqueeze(1)
    index = (index + rows * masks.shape[1]).flatten()
    shifts = 7 - torch.arange(8, device=masks.device, dtype=torch.uint8)
    found = []
    # Unpacked masks take H * W * 4 bytes for each box, too many for all boxes of a batch.
    part = max(1, _UNPACKED // (8 * masks.shape[-2] * masks.shape[-1]))
    for chosen, box in zip(index.split(part), boxes.flatten(0, 1).split(part), strict=True):
        bits = (masks.flatten(0, 1)[chosen].unsqueeze(-1) >> shifts & 1).flatten(-2).float()
        image = torch.arange(len(chosen), device=box.device, dtype=box.dtype)
        rois = torch.cat((image.unsqueeze(1), box), dim=1)
        found.append(roi_align(bits.unsqueeze(1), rois, side, aligned=True).squeeze(1))
    return (torch.cat(found) >= 0.5).float()


_UNPACKED = 16 << 20
"""Pixels of masks that are unpacked at a time, 64 MiB: 16 masks of 1024 x 1024."""
