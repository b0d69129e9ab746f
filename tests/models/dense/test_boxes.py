"""Geometry of boxes against torchvision and detectron2's formulas written plainly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_iou, roi_align

from dmjd.models.dense import boxes as box_ops

STRIDES = [4.0, 8.0, 16.0, 32.0]


def random_boxes(count: int, seed: int = 0, side: float = 128, least: float = 1) -> Tensor:
    draws = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed))
    size = least + draws[:, 2:] ** 2 * (side - least)
    start = draws[:, :2] * (side - size)
    return torch.cat((start, start + size), dim=1)


def test_anchors_are_detectron2s() -> None:
    grids, strides = [(3, 5), (2, 3)], [4.0, 64.0]
    expected = []
    for (height, width), stride, size in zip(grids, strides, (32, 512), strict=True):
        for row in range(height):
            for column in range(width):
                for ratio in (0.5, 1.0, 2.0):
                    w = math.sqrt(size**2 / ratio)
                    h = ratio * w
                    x, y = column * stride, row * stride
                    expected.append([x - w / 2, y - h / 2, x + w / 2, y + h / 2])
    found = box_ops.anchors(grids, strides, torch.device("cpu"))
    assert [len(each) for each in found] == [45, 18]
    torch.testing.assert_close(torch.cat(found), torch.tensor(expected))


@pytest.mark.parametrize("weights", [box_ops.RPN_WEIGHTS, box_ops.HEAD_WEIGHTS])
def test_deltas_are_torchvisions(weights: tuple[float, float, float, float]) -> None:
    boxes, sources = random_boxes(50, 1, least=4), random_boxes(50, 2, least=4)
    coder = BoxCoder(weights)
    deltas = box_ops.encode(boxes, sources, weights)
    torch.testing.assert_close(deltas, coder.encode_single(boxes, sources))
    torch.testing.assert_close(box_ops.decode(deltas, sources, weights), boxes, rtol=1e-4, atol=1e-4)
    large = torch.randn(50, 4, generator=torch.Generator().manual_seed(3)) * 30  # some sides reach the limit
    torch.testing.assert_close(box_ops.decode(large, sources, weights), coder.decode_single(large, sources))


def test_overlaps_are_torchvisions_and_zero_for_boxes_without_area() -> None:
    boxes, others = random_boxes(20, 1), random_boxes(30, 2)
    assert torch.equal(box_ops.overlaps(boxes, others), box_iou(boxes, others))
    flat = torch.tensor([[3.0, 3, 3, 9], [0, 0, 0, 0]])
    assert torch.equal(box_ops.overlaps(flat, torch.cat((flat, others))), torch.zeros(2, 32))


def test_clipping_is_to_the_size_of_each_image() -> None:
    boxes = torch.tensor([[[-3.0, 5, 70, 90]], [[-3, 5, 70, 90]]])
    found = box_ops.clip(boxes, torch.tensor([[64, 50], [100, 60]]))
    assert found.tolist() == [[[0, 5, 50, 64]], [[0, 5, 60, 90]]]


def test_levels_are_detectron2s() -> None:
    sides = [0, 1, 55.9, 56, 111.9, 112, 223.9, 224, 447.9, 448, 3000]
    boxes = torch.tensor([[0, 0, side, side] for side in sides])
    boxes[:, 2] *= 2
    boxes[:, 3] /= 2  # the side is the root of the area
    expected = [int(np.clip(math.floor(4 + math.log2(side / 224 + 1e-8)), 2, 5)) - 2 for side in sides]
    assert box_ops.levels(boxes, 4.0, 4).tolist() == expected


def test_pooling_is_roi_align_on_the_level_of_each_box() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(2, 3, int(512 / s), int(512 / s), generator=generator, requires_grad=True) for s in STRIDES]
    boxes = random_boxes(24, side=512).view(2, 12, 4)
    found = box_ops.pool(maps, STRIDES, boxes, 7)
    expected, levels = [], box_ops.levels(boxes, 4.0, 4)
    assert len(levels.unique()) == 4
    for image in range(2):
        for box, level in zip(boxes[image], levels[image].tolist(), strict=True):
            rois = torch.cat((torch.tensor([float(image)]), box)).unsqueeze(0)
            expected.append(roi_align(maps[level], rois, 7, spatial_scale=1 / STRIDES[level], aligned=True))
    torch.testing.assert_close(found, torch.cat(expected))
    factors = torch.randn(found.shape, generator=generator)
    gradients = torch.autograd.grad((found * factors).sum(), maps)
    wanted = torch.autograd.grad((torch.cat(expected) * factors).sum(), maps)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_pooling_of_a_ramp_gives_the_centres_of_the_cells() -> None:
    """Aligned: the pixel i covers [i, i + 1), so a map with the value of its pixel's centre has the cell's centre."""
    ramp = (torch.arange(64) + 0.5).expand(1, 1, 64, 64) * 4
    box = torch.tensor([[[40.0, 40, 110, 120]]])
    found = box_ops.pool([ramp] + [torch.zeros(1, 1, 2, 2)] * 3, STRIDES, box * 0.5, 7)
    expected = 20 + (torch.arange(7) + 0.5) * 35 / 7
    torch.testing.assert_close(found[0, 0], expected.expand(7, 7))


def test_mask_targets_are_detectron2s_of_bit_masks() -> None:
    generator = np.random.default_rng(0)
    masks = np.zeros((2, 3, 60, 60), np.uint8)
    for mask in masks.reshape(-1, 60, 60):
        y, x = generator.integers(5, 30, 2)
        mask[y : y + 25, x : x + 20] = 1
        mask[y + 5 : y + 9] ^= 1
    index = torch.from_numpy(generator.integers(0, 3, (2, 20)))  # more than are unpacked at a time
    boxes = random_boxes(40, side=60, least=4).view(2, 20, 4)
    found = box_ops.crop_masks(torch.from_numpy(np.packbits(masks, axis=-1)), index, boxes, 28).view(2, 20, 28, 28)
    for image in range(2):
        chosen = torch.from_numpy(masks[image]).float()[index[image]]
        rois = torch.cat((torch.arange(20.0).unsqueeze(1), boxes[image]), dim=1)
        expected = roi_align(chosen.unsqueeze(1), rois, 28, 1.0, 0, True).squeeze(1) >= 0.5
        assert torch.equal(found[image], expected.float())
    assert 0.2 < found.mean() < 0.8
