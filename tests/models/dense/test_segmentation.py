"""UPerNet on each backbone: against transformers' heads, mmsegmentation's loss in plain loops, and properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from dmjd.models.dense.batch_norm import BatchNorm2d
from dmjd.models.dense.grid_attention import attend_on_grid
from dmjd.models.dense.pyramid import build_pyramid
from dmjd.models.dense.segmentation import Segmentation, Segmented, Segmenter
from dmjd.models.masked_image_model import Encoder
from tests.models.dense.test_features import convvit, images, swin, vit

CLASSES = 5
BACKBONES: dict[str, Callable[..., Encoder]] = {"vit": vit, "convvit": convvit, "swin": swin}


def segmentation(kind: str = "vit", auxiliary_channels: int | None = 6, **options: Any) -> Segmentation:
    torch.manual_seed(0)
    encoder = BACKBONES[kind](**options)
    if kind == "swin":
        attend_on_grid(encoder, None, None, "none", encoder.grid)
    return Segmentation(Segmenter(encoder, CLASSES, channels=8, auxiliary_channels=auxiliary_channels))


def classes(*size: int, ignored: float = 0.2) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(0, CLASSES, size, generator=generator)
    drawn[torch.rand(size, generator=generator) < ignored] = 255
    return drawn.to(torch.uint8)


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_head_reads_maps_at_strides_4_8_16_and_32(kind: str) -> None:
    model = segmentation(kind).model
    seen: list[list[Tensor]] = []
    model.decode_head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    logits, auxiliary = model(images(64, 96))
    assert [tuple(each.shape[2:]) for each in seen[0]] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    assert tuple(each.shape[1] for each in seen[0]) == model.pyramid.widths
    assert logits.shape == (2, CLASSES, 16, 24)
    assert auxiliary is not None
    assert auxiliary.shape == (2, CLASSES, 4, 6)


@pytest.mark.parametrize("kind", BACKBONES)
def test_every_parameter_has_a_gradient(kind: str) -> None:
    objective = segmentation(kind)
    nothing = [name for name, each in objective.named_parameters() if each.ndim > 1 and not each.abs().sum()]
    assert not nothing
    objective(images(64, 64), classes(2, 64, 64)).total.backward()
    assert [name for name, each in objective.named_parameters() if each.grad is None] == []
    assert all(each.grad is not None and each.grad.isfinite().all() for each in objective.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_heads_equal_transformers_with_their_own_classifiers(training: bool) -> None:
    model = segmentation().model.train(training)
    settings = SimpleNamespace(
        hidden_size=8,
        num_labels=CLASSES,
        pool_scales=(1, 2, 3, 6),
        auxiliary_in_channels=None,
        auxiliary_channels=6,
        auxiliary_num_convs=1,
        auxiliary_concat_input=False,
    )
    heads = UperNetHead(settings, [32] * 4), UperNetFCNHead(settings, [32] * 4, 2)
    assert model.auxiliary_head is not None
    for theirs, ours, classifier in zip(
        heads, (model.decode_head, model.auxiliary_head), (model.head, model.auxiliary), strict=True
    ):
        assert isinstance(classifier, nn.Module)
        state = ours.state_dict() | {f"classifier.{name}": value for name, value in classifier.state_dict().items()}
        theirs.load_state_dict(state)
        theirs.train(training)
    pixels = images(64, 64)
    maps = model.pyramid(model.encoder.feature_maps(pixels, None, model.maps))
    decode, auxiliary = heads[0](maps), heads[1](maps)
    found = model(pixels)
    torch.testing.assert_close(found[0], decode, rtol=1e-4, atol=1e-5)
    if training:
        torch.testing.assert_close(found[1], auxiliary, rtol=1e-4, atol=1e-5)
    else:
        assert found[1] is None


def test_the_pyramid_of_a_vit_is_beits() -> None:
    torch.manual_seed(0)
    pyramid, maps = build_pyramid([8]), [torch.randn(2, 8, 3, 5) for _ in range(4)]
    up = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8), nn.GELU(), nn.ConvTranspose2d(8, 8, 2, 2))
    names = pyramid.state_dict()
    up.load_state_dict({name.removeprefix("fpn1."): value for name, value in names.items() if "fpn1" in name})
    found = pyramid(maps)
    torch.testing.assert_close(found[0], up(maps[0]))
    torch.testing.assert_close(
        found[1], F.conv_transpose2d(maps[1], names["fpn2.weight"], names["fpn2.bias"], stride=2)
    )
    assert torch.equal(found[2], maps[2])
    assert torch.equal(found[3], F.max_pool2d(maps[3], 2, 2))


def test_the_fourth_map_of_a_convvit_is_a_strided_convolution_of_the_third() -> None:
    torch.manual_seed(0)
    pyramid = build_pyramid([4, 6, 8])
    maps = [torch.randn(2, width, side, side) for width, side in ((4, 16), (6, 8), (8, 4))]
    state = pyramid.state_dict()
    x = F.conv2d(maps[2], state["fpn4.0.weight"], state["fpn4.0.bias"], stride=2, padding=1)
    x = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(pyramid(maps)[3], F.gelu(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(pyramid(maps)[:3], maps, strict=True))


def plain_loss(logits: Tensor, maps: Tensor) -> float:
    """mmsegmentation's ``cross_entropy`` with ``avg_non_ignore=False``: the sum over pixels, divided by all of them."""
    total = 0.0
    for image in range(maps.shape[0]):
        for row in range(maps.shape[1]):
            for column in range(maps.shape[2]):
                label = int(maps[image, row, column])
                if label != 255:
                    scores = [float(value) for value in logits[image, :, row, column].double()]
                    top = max(scores)
                    total += top + math.log(sum(math.exp(each - top) for each in scores)) - scores[label]
    return total / maps.numel()


def test_losses_are_mmsegmentations_at_the_resolution_of_images() -> None:
    objective, pixels, maps = segmentation(), images(32, 32), classes(2, 32, 32)
    with torch.no_grad():
        found = objective(pixels, maps)
    objective.load_state_dict(segmentation().state_dict())  # running statistics have moved
    with torch.no_grad():
        low = objective.model(pixels)
    decode, auxiliary = (
        plain_loss(F.interpolate(each, size=(32, 32), mode="bilinear", align_corners=False), maps) for each in low
    )
    assert found.decode.item() == pytest.approx(decode, rel=1e-5)
    assert found.auxiliary.item() == pytest.approx(auxiliary, rel=1e-5)
    assert found.total.item() == pytest.approx(decode + 0.4 * auxiliary, rel=1e-5)


def test_without_labelled_pixels_loss_and_gradients_are_0() -> None:
    objective = segmentation()
    losses = objective(images(64, 64), torch.full((2, 64, 64), 255, dtype=torch.uint8))
    losses.total.backward()
    assert losses.total.item() == 0
    assert all(each.grad is not None and not each.grad.any() for each in objective.parameters())


def test_ignored_pixels_change_nothing_but_the_mean() -> None:
    objective, pixels, maps = segmentation(auxiliary_channels=None).eval(), images(64, 64), classes(2, 64, 64)
    other = objective(pixels, torch.where(maps == 255, 0, maps)).total
    assert objective(pixels, maps).total.item() < other.item()
    logits = objective(pixels)
    sums = F.cross_entropy(logits, maps.long(), ignore_index=255, reduction="sum")
    assert objective(pixels, maps).total.item() == pytest.approx(sums.item() / maps.numel(), rel=1e-5)


def test_without_an_auxiliary_head_its_loss_is_0() -> None:
    objective = segmentation(auxiliary_channels=None)
    found = objective(images(64, 64), classes(2, 64, 64))
    assert isinstance(found, Segmented)
    assert found.auxiliary.shape == ()
    assert found.auxiliary.item() == 0
    assert found.total.item() == found.decode.item()
    assert not [name for name in objective.state_dict() if "auxiliary" in name]


def test_dropout_scales_the_channels_before_the_classifiers() -> None:
    model, pixels = segmentation().model, images(64, 64)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    factors = torch.tensor([0, 0.5, 1, 2, 0, 1, 1, 0, 3, 0, 1, 0.25, 1, 0]).expand(2, -1)
    found = model(pixels, None, factors)
    model.load_state_dict(state)
    scaled = segmentation().model
    scaled.load_state_dict(state)
    for layer, part in ((scaled.head, factors[0, :8]), (scaled.auxiliary, factors[0, 8:])):
        assert isinstance(layer, nn.Conv2d)
        layer.weight.data.mul_(part.view(1, -1, 1, 1))
    for one, other in zip(found, scaled(pixels), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", BACKBONES)
def test_logits_of_any_size_are_those_of_the_padded_image(kind: str) -> None:
    objective, pixels = segmentation(kind).eval(), images(70, 85)
    with torch.no_grad():
        logits = objective(pixels)
        assert logits.shape == (2, CLASSES, 70, 85)
        padded = F.pad(pixels, (0, 11, 0, 26 if kind == "swin" else 10))  # to multiples of 32, or 16
        assert torch.equal(logits, objective(padded)[..., :70, :85])


def test_running_statistics_are_used_in_evaluation_alone() -> None:
    objective, pixels = segmentation(), images(64, 64)
    before = objective.eval()(pixels)
    assert torch.equal(objective(pixels), before)
    objective.train()(pixels, classes(2, 64, 64))
    assert not torch.equal(objective.eval()(pixels), before)
    norms = [each for each in objective.modules() if isinstance(each, nn.BatchNorm2d)]
    assert norms
    assert all(type(each) is BatchNorm2d and int(each.num_batches_tracked) == 1 for each in norms)


def test_unused_parameters_leave_the_encoder() -> None:
    options = {"block": "beit", "masked_tokens": "mask_token", "positions": "learned"}
    names = set(segmentation("vit", None, **options).state_dict())
    assert not {"model.encoder.mask_token", "model.encoder.norm.weight"} & names
    assert {"model.encoder.cls_token", "model.encoder.pos_embed"} <= names
    assert not [name for name in segmentation("convvit").state_dict() if "output_decode" in name]


@torch.no_grad()
def test_a_beit_encoder_is_initialised_as_in_pre_training() -> None:
    torch.manual_seed(0)
    encoder = vit(block="beit", masked_tokens="mask_token", positions="learned", layer_scale=0.1)
    model = Segmenter(encoder, CLASSES, channels=8)
    weights = dict(model.named_parameters())
    deviations = [weights[f"encoder.blocks.{block}.attn.proj.weight"].std().item() for block in range(4)]
    assert deviations == pytest.approx([deviations[0] / math.sqrt(depth) for depth in (1, 2, 3, 4)], rel=0.1)
    assert weights["encoder.patch_embed.proj.weight"].abs().max() <= 0.02
    # He et al. 2015, by the outputs
    assert weights["decode_head.bottleneck.conv.weight"].std().item() == pytest.approx(math.sqrt(2 / (8 * 9)), rel=0.05)
    assert weights["head.weight"].std().item() == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("maps", [[0, 1, 2], [0, 1, 2, 2], [3, 2, 1, 0], [-1, 0, 1, 3]])
def test_maps_that_are_not_four_blocks_are_rejected(maps: list[int]) -> None:
    with pytest.raises(ValueError, match=r"head\.maps must be 4 blocks in ascending order"):
        Segmenter(vit(), CLASSES, maps=maps)


@pytest.mark.parametrize(
    ("depth", "expected"), [(12, (3, 5, 7, 11)), (24, (7, 11, 15, 23)), (4, (0, 1, 1, 3)), (2, (0, 0, 0, 1))]
)
def test_default_maps_are_at_a_third_a_half_two_thirds_and_the_end(depth: int, expected: tuple[int, ...]) -> None:
    assert Segmenter(vit(depth=depth), CLASSES, channels=8).maps == expected
