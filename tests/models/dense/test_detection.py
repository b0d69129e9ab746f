"""Losses and detections against detectron2's formulas written plainly and against torchvision's Mask R-CNN."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import box_iou, nms, roi_align

from dmjd.models.dense import boxes as box_ops
from dmjd.models.dense.boxes import HEAD_WEIGHTS, RPN_WEIGHTS
from dmjd.models.dense.detection import Detected, Detection, Limits, MaskRCNN, _suppress
from dmjd.models.dense.sampling import ANCHORS, PROPOSALS
from dmjd.ops import Domain, make_key
from dmjd.ops.philox import keyed_bits
from tests.models.dense.test_boxes import random_boxes

SIDE, CLASSES = 64, 3
KEY = make_key(1, 2)
LIMITS = Limits(proposals_before=60, proposals=50, samples=40, detections=12)


class Patches(nn.Module):
    """An encoder of one convolution."""

    patch_size, map_widths, num_prefix_tokens = 8, (16,), 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.patches = nn.Conv2d(3, 16, 8, 8)

    def feature_maps(self, images: Tensor, branch_scales: Tensor | None = None) -> list[Tensor]:
        return [self.patches(images)]


def detector(limits: Limits = LIMITS) -> Detection:
    """A detector whose random weights make proposals and scores differ."""
    torch.manual_seed(0)
    encoder: Any = Patches()
    model = MaskRCNN(
        encoder, CLASSES, pyramid="simple", channels=8, rpn_convs=1, box_convs=1, box_width=16, mask_convs=1
    )
    for layer, std in (
        (model.rpn.cls_logits, 1),
        (model.rpn.bbox_pred, 0.3),
        (model.box_class, 1),
        (model.box_deltas, 0.5),
        (model.mask_logits.mask_fcn_logits, 1),
    ):
        nn.init.normal_(layer.weight, std=std)
    return Detection(model, limits)


class Inputs(NamedTuple):
    images: Tensor
    boxes: Tensor
    labels: Tensor
    masks: Tensor
    key: Tensor
    sample_ids: Tensor

    def row(self, row: int) -> Inputs:
        one = slice(row, row + 1)
        return Inputs(*(each if each is self.key else each[one] for each in self))


def inputs() -> Inputs:
    """Two images with three objects, and one without any."""
    generator = torch.Generator().manual_seed(0)
    boxes = torch.tensor([[[4.0, 6, 30, 28], [20, 20, 60, 50], [40, 2, 62, 12]]]).repeat(3, 1, 1)
    boxes[1] = boxes[1].flip(0) / 2 + 3
    masks = torch.randint(0, 256, (3, 3, SIDE, SIDE // 8), generator=generator, dtype=torch.uint8)
    return Inputs(
        torch.randn(3, 3, SIDE, SIDE, generator=generator),
        boxes,
        torch.tensor([[0, 2, 1], [1, 0, 0], [-1, -1, -1]]),
        masks,
        KEY,
        torch.tensor([11, 12, 13]),
    )


def call(objective: Detection, given: Inputs) -> Detected:
    found = objective(*given)
    assert isinstance(found, Detected)
    return found


def drawn(labels: Tensor, count: int, share: float, sample_id: int, lane: int) -> tuple[list[int], list[int]]:
    """detectron2's subsample_labels (1 positive, 0 negative), with keyed draws in place of randperm."""
    ids = torch.tensor([sample_id])
    bits = keyed_bits(ids, len(labels), key=KEY, domain=Domain.MASK, lane=lane)[0].tolist()
    positive = sorted((labels == 1).nonzero().flatten().tolist(), key=lambda place: bits[place])
    negative = sorted((labels == 0).nonzero().flatten().tolist(), key=lambda place: bits[place])
    positive = positive[: int(count * share)]
    return positive, negative[: count - len(positive)]


def deltas(boxes: Tensor, sources: Tensor, weights: tuple[float, ...]) -> Tensor:
    """detectron2's Box2BoxTransform.get_deltas."""
    widths, heights = sources[:, 2] - sources[:, 0], sources[:, 3] - sources[:, 1]
    target_widths, target_heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    dx = (boxes[:, 0] + boxes[:, 2] - sources[:, 0] - sources[:, 2]) / 2 / widths
    dy = (boxes[:, 1] + boxes[:, 3] - sources[:, 1] - sources[:, 3]) / 2 / heights
    columns = dx, dy, torch.log(target_widths / widths), torch.log(target_heights / heights)
    return torch.stack([weight * each for weight, each in zip(weights, columns, strict=True)], dim=1)


def of_detectron2(objective: Detection, given: Inputs, proposals: Tensor) -> list[Tensor]:
    """detectron2's five losses of one image."""
    model, limits, sample_id = objective.model, objective.limits, int(given.sample_ids)
    present = given.labels[0] >= 0
    boxes, labels, masks = given.boxes[0, present], given.labels[0, present], given.masks[0, present]
    dense = model(given.images)
    anchors = torch.cat(objective._anchors(dense.maps))
    logits, predicted = torch.cat(dense.logits, 1)[0], torch.cat(dense.deltas, 1)[0]

    kinds, matched = torch.zeros(len(anchors)), torch.zeros(len(anchors), dtype=torch.int64)
    if len(boxes):
        ious = box_iou(boxes, anchors)
        values, matched = ious.max(dim=0)
        kinds = torch.where(values >= 0.7, 1.0, torch.where(values < 0.3, 0.0, -1.0))
        kinds[(ious == ious.max(dim=1, keepdim=True).values).any(dim=0)] = 1
    positive, negative = drawn(kinds, 256, 0.5, sample_id, ANCHORS)
    chosen = positive + negative
    rpn_class = F.binary_cross_entropy_with_logits(logits[chosen], kinds[chosen], reduction="sum") / 256
    rpn_box = torch.zeros(())
    if positive:
        wanted = deltas(boxes[matched[positive]], anchors[positive], RPN_WEIGHTS)
        rpn_box = F.l1_loss(predicted[positive], wanted, reduction="sum") / 256

    proposals = torch.cat((proposals, boxes))
    kinds, matched = torch.zeros(len(proposals)), torch.zeros(len(proposals), dtype=torch.int64)
    if len(boxes):
        values, matched = box_iou(boxes, proposals).max(dim=0)
        kinds = (values >= 0.5).float()
    # Objects come after the places of all proposals, of which some hold none.
    gap = limits.proposals - (len(proposals) - len(boxes))
    spread = torch.cat((kinds[: len(kinds) - len(boxes)], torch.full((gap,), -1.0), kinds[len(kinds) - len(boxes) :]))
    positive, negative = (
        [place - gap if place >= limits.proposals else place for place in places]
        for places in drawn(spread, limits.samples, 0.25, sample_id, PROPOSALS)
    )
    chosen = positive + negative
    scores, offsets = (each[0] for each in model.classify(dense.maps, proposals[chosen].unsqueeze(0)))
    classes = torch.full((len(chosen),), CLASSES)
    classes[: len(positive)] = labels[matched[positive]] if len(boxes) else 0
    class_ = F.cross_entropy(scores, classes)
    box = mask = torch.zeros(())
    if positive:
        count = len(positive)
        wanted = deltas(boxes[matched[positive]], proposals[positive], HEAD_WEIGHTS)
        box = F.l1_loss(offsets[range(count), classes[:count]], wanted, reduction="sum") / len(chosen)
        x = model._pool(dense.maps, proposals[positive].unsqueeze(0), 14)
        shapes = model.mask_logits(model.mask_head(x))[range(count), classes[:count]]
        bits = (masks.unsqueeze(-1) >> torch.arange(7, -1, -1) & 1).flatten(-2).float()
        rois = torch.cat((torch.arange(float(count)).unsqueeze(1), proposals[positive]), dim=1)
        target = roi_align(bits[matched[positive]].unsqueeze(1), rois, 28, 1.0, 0, True)[:, 0] >= 0.5
        mask = F.binary_cross_entropy_with_logits(shapes, target.float())
    return [rpn_class, rpn_box, class_, box, mask]


def proposed(objective: Detection, images: Tensor, sizes: Tensor, before: int) -> tuple[Tensor, Tensor]:
    dense = objective.model(images)
    return objective._propose(dense.logits, dense.deltas, objective._anchors(dense.maps), sizes, before)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_losses_of_an_image_are_detectron2s(row: int) -> None:
    objective, given = detector(), inputs().row(row)
    found = call(objective, given)
    boxes, real = proposed(objective, given.images, torch.tensor([[SIDE, SIDE]]), LIMITS.proposals_before)
    expected = of_detectron2(objective, given, boxes[0, real[0]])
    torch.testing.assert_close(torch.stack(found[1:]), torch.stack(expected))
    torch.testing.assert_close(found.total, torch.stack(expected).sum())
    assert all(value > 0 for value in expected) or row == 2
    names, parameters = zip(*objective.named_parameters(), strict=True)
    wanted = torch.autograd.grad(torch.stack(expected).sum(), parameters, allow_unused=row == 2)
    for name, one, other in zip(names, torch.autograd.grad(found.total, parameters), wanted, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, msg=name)


def test_losses_of_a_batch_are_means_over_its_images() -> None:
    objective, given = detector(), inputs()
    found = torch.stack(call(objective, given))
    expected = torch.stack([torch.stack(call(objective, given.row(row))) for row in range(3)])
    torch.testing.assert_close(found, expected.mean(dim=0))


def test_places_without_an_object_and_the_order_of_objects_change_nothing() -> None:
    objective, given = detector(), inputs()
    expected = torch.stack(call(objective, given))
    rubbish = given._replace(
        boxes=torch.cat((given.boxes, torch.full((3, 9, 4), torch.nan)), dim=1),
        labels=F.pad(given.labels, (0, 9), value=-1),
        masks=F.pad(given.masks, (0, 0, 0, 0, 0, 9), value=255),
    )
    torch.testing.assert_close(torch.stack(call(objective, rubbish)), expected)
    order = [2, 0, 1]
    moved = given._replace(boxes=given.boxes[:, order], labels=given.labels[:, order], masks=given.masks[:, order])
    torch.testing.assert_close(torch.stack(call(objective, moved)), expected)


def test_other_epochs_and_ids_draw_other_samples() -> None:
    objective, given = detector(), inputs()
    values = {
        tuple(torch.stack(call(objective, each)).tolist())
        for each in (given, given._replace(key=make_key(1, 3)), given._replace(sample_ids=given.sample_ids + 1))
    }
    assert len(values) == 3
    assert tuple(torch.stack(call(objective, given)).tolist()) in values


def test_without_any_object_every_parameter_has_a_finite_gradient() -> None:
    objective, given = detector(), inputs()
    found = call(objective, given._replace(labels=torch.full_like(given.labels, -1)))
    assert found.rpn_class > 0 < found.class_
    assert found.rpn_box == found.box == found.mask == 0
    found.total.backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in objective.parameters())


def test_without_any_proposal_losses_are_finite() -> None:
    objective, given = detector(), inputs()
    nn.init.constant_(objective.model.rpn.bbox_pred.bias, -1e9)  # every box is outside of the image, or empty
    boxes, real = proposed(objective, given.images, torch.tensor([[SIDE, SIDE]] * 3), 60)
    assert not real.any()
    assert boxes.isfinite().all()
    found = call(objective, given)
    assert all(value.isfinite() for value in found)
    found.total.backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in objective.parameters())


def test_losses_of_images_that_are_not_finite_are_nan() -> None:
    """The engine skips such a step."""
    given = inputs()
    found = call(detector(), given._replace(images=given.images * torch.nan))
    assert found.total.isnan()
    found.total.backward()


def test_proposals_are_torchvisions() -> None:
    objective, images = detector(), inputs().images
    sizes = [(64, 64), (50, 64), (64, 33)]
    boxes, real = proposed(objective, images, torch.tensor(sizes), 60)
    dense = objective.model(images)
    anchors = torch.cat(objective._anchors(dense.maps))
    limits = {"training": 60, "testing": 60}, {"training": 50, "testing": 50}
    theirs: Any = RegionProposalNetwork(None, nn.Identity(), 0.7, 0.3, 256, 0.5, *limits, 0.7)
    theirs.min_size = 1e-30
    decoded = theirs.box_coder.decode_single(torch.cat(dense.deltas, 1).flatten(0, 1), anchors.repeat(3, 1))
    counts = [each.shape[1] for each in dense.logits]
    expected, _ = theirs.filter_proposals(decoded.view(3, -1, 4), torch.cat(dense.logits, 1), sizes, counts)
    for row in range(3):
        torch.testing.assert_close(boxes[row, real[row]], expected[row])
    assert real.sum() > 60


@pytest.mark.parametrize("copies", [1, 40])
def test_suppression_is_torchvisions_within_each_group(copies: int) -> None:
    """With copies, fewer boxes than wanted are left of those that are tried first."""
    boxes = random_boxes(60).repeat(copies, 1)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(len(boxes), generator=generator).round(decimals=2)  # ties
    groups = torch.randint(0, 3, (len(boxes),), generator=generator)
    order = scores.sort(descending=True, stable=True).indices
    left: set[int] = set()
    for group in range(3):
        where = order[groups[order] == group]
        left |= set(where[nms(boxes[where], scores[where], 0.3)].tolist())
    expected = [place for place in order.tolist() if place in left]
    for count in (5, 20, len(boxes)):
        assert _suppress(boxes, scores, groups, 0.3, count).tolist() == expected[:count]


def test_detections_are_torchvisions() -> None:
    objective, images = detector(), inputs().images
    sizes = [(64, 64), (50, 64), (64, 33)]
    found = objective.eval().detect(images, torch.tensor(sizes))
    boxes, real = proposed(objective, images, torch.tensor(sizes), LIMITS.proposals_before // 2)
    maps = objective.model(images).maps
    logits, offsets = objective.model.classify(maps, boxes)
    # torchvision's background is class 0, with deltas of its own.
    logits = logits.roll(1, dims=-1)[real]
    offsets = F.pad(offsets, (0, 0, 1, 0))[real].flatten(1)
    theirs = RoIHeads(None, None, None, 0.5, 0.5, 40, 0.25, None, 0.05, 0.5, 12)
    per_image = [boxes[row, real[row]] for row in range(3)]
    expected = theirs.postprocess_detections(logits, offsets, per_image, sizes)
    for row, each in enumerate(found):
        torch.testing.assert_close(each["boxes"], expected[0][row], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(each["scores"], expected[1][row])
        assert torch.equal(each["labels"], expected[2][row] - 1)
        x = objective.model._pool([level[row : row + 1] for level in maps], each["boxes"].unsqueeze(0), 14)
        masks = objective.model.mask_logits(objective.model.mask_head(x)).sigmoid()
        torch.testing.assert_close(each["masks"], masks[range(len(x)), each["labels"]])
    assert [len(each["boxes"]) for each in found] == [12, 12, 12]


def test_an_image_without_detections_has_empty_ones() -> None:
    objective = detector()
    nn.init.constant_(objective.model.box_class.bias, -100)
    nn.init.constant_(objective.model.box_class.bias[-1:], 100)
    found = objective.eval().detect(inputs().images[:1], torch.tensor([[64, 64]]))[0]
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "boxes": (0, 4), "scores": (0,), "labels": (0,), "masks": (0, 28, 28)
    }  # fmt: skip


def test_losses_under_bfloat16_are_float32_and_near_those_of_float32() -> None:
    objective, given = detector(), inputs()
    expected = torch.stack(call(objective, given))
    with torch.autocast("cpu", torch.bfloat16):
        found = call(objective, given)
    assert all(value.dtype == torch.float32 for value in found)
    torch.testing.assert_close(torch.stack(found), expected, rtol=0.1, atol=0.05)


def test_initial_weights_of_the_heads_are_detectron2s() -> None:
    torch.manual_seed(0)
    encoder: Any = Patches()
    model = MaskRCNN(encoder, 80, pyramid="simple", channels=32, box_width=64)
    stds = {
        "rpn.conv.1.0": 0.01,
        "rpn.cls_logits": 0.01,
        "rpn.bbox_pred": 0.01,
        "box_head.3.0": math.sqrt(2 / (32 * 9)),
        "box_head.5": math.sqrt(1 / (32 * 49)),  # uniform with variance 1 / inputs
        "box_class": 0.01,
        "box_deltas": 0.001,
        "mask_head.3.0": math.sqrt(2 / (32 * 9)),
        "mask_logits.conv5_mask": math.sqrt(2 / (32 * 4)),
        "mask_logits.mask_fcn_logits": 0.001,
    }
    parameters = dict(model.named_parameters())
    for name, std in stds.items():
        assert parameters[f"{name}.weight"].std().item() == pytest.approx(std, rel=0.15), name
        if f"{name}.bias" in parameters:
            assert not parameters[f"{name}.bias"].any(), name
    # No bias before a norm.
    assert not any(name.startswith(("box_head.0.0.b", "mask_head.0.0.b")) for name in parameters)
    assert box_ops.ANCHORS_PER_PLACE == 3


@pytest.mark.gpu
def test_the_host_waits_once_for_each_image() -> None:
    objective = detector().cuda()
    given = Inputs(*(each.cuda() for each in inputs()))
    call(objective, given).total.backward()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            call(objective, given).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in found if "synchroniz" in str(each.message)]
    assert len(waits) <= 3, [str(each.message) for each in waits]


@pytest.mark.gpu
def test_losses_on_the_gpu_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # it would change the order of proposals
    objective, given = detector(), inputs()
    expected = torch.stack(call(objective, given))
    found = torch.stack(call(objective.cuda(), Inputs(*(each.cuda() for each in given))))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
