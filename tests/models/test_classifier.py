"""Classifiers compute what timm's models of the same weights do, and hold nothing that the loss does not need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from timm.loss import SoftTargetCrossEntropy
from timm.models.beit import Beit, RelativePositionBias
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from dmjd.models.attention import relative_bias
from dmjd.models.classifier import Classification, Classified, Classifier
from dmjd.models.convvit import ConvViTEncoder
from dmjd.models.masked_image_model import Encoder
from dmjd.models.swin import SwinEncoder
from dmjd.models.timm_models import ConvViT
from dmjd.models.vit import ViTEncoder
from dmjd.positions import sincos_positions

CLASSES, SIZE = 7, 32
DIMS: dict[str, Any] = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
TIMM: dict[str, Any] = {"img_size": SIZE, "num_classes": CLASSES, **DIMS}
CONV: dict[str, Any] = {"embed_dims": (8, 16, 32), "depths": (1, 1, 2), "mlp_ratios": (2, 2, 2), "num_heads": 4}
SWIN: dict[str, Any] = {"depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8)}
BEIT: dict[str, Any] = {"masked_tokens": "mask_token", "block": "beit", "positions": "relative", "layer_scale": 0.1}


def vit(**options: Any) -> Encoder:
    return ViTEncoder(image_size=(SIZE, SIZE), in_chans=3, **DIMS, **options)


def convvit() -> Encoder:
    return ConvViTEncoder(image_size=(SIZE, SIZE), in_chans=3, **CONV)


def swin() -> Encoder:
    return SwinEncoder(image_size=(64, 64), in_chans=3, embed_dim=64, window=4, **SWIN)


def fixed(model: VisionTransformer) -> nn.Module:
    assert isinstance(model.pos_embed, nn.Parameter)
    model.pos_embed.data.copy_(torch.cat((torch.zeros(1, 32), sincos_positions((4, 4), 32))))
    return model


def beit_of_timm(**options: Any) -> nn.Module:
    norm = partial(nn.LayerNorm, eps=1e-6)  # BEiT's own, where timm has torch's 1e-5
    plain: dict[str, Any] = {"use_abs_pos_emb": False, "init_values": 0.1, "qkv_bias": True, "norm_layer": norm}
    return Beit(**TIMM, **(plain | options))


Pair = tuple[Callable[[], Encoder], str, str, Callable[[], nn.Module]]
PAIRS: dict[str, Pair] = {
    "mae": (vit, "mean", "pooled", lambda: fixed(VisionTransformer(**TIMM, global_pool="avg", fc_norm=True))),
    "vit, class token": (vit, "cls", "encoder", lambda: fixed(VisionTransformer(**TIMM, global_pool="token"))),
    "maskfeat": (
        lambda: vit(positions="learned", masked_tokens="mask_token"),
        "mean",
        "pooled",
        lambda: VisionTransformer(**TIMM, global_pool="avg", fc_norm=True),
    ),
    "beit": (
        lambda: vit(**BEIT, bias_tables="per_block"),
        "mean",
        "pooled",
        lambda: beit_of_timm(use_rel_pos_bias=True),
    ),
    "beit, shared": (lambda: vit(**BEIT), "mean", "pooled", lambda: beit_of_timm(use_shared_rel_pos_bias=True)),
    "beit, learned": (
        lambda: vit(block="beit", masked_tokens="mask_token", positions="learned"),
        "cls",
        "encoder",
        lambda: beit_of_timm(use_abs_pos_emb=True, init_values=None, global_pool="token"),
    ),
    "convvit": (convvit, "mean", "pooled", lambda: ConvViT(img_size=SIZE, num_classes=CLASSES, **CONV)),
    "swin": (
        swin,
        "mean",
        "encoder",
        lambda: SwinTransformer(
            img_size=64, patch_size=4, embed_dim=8, window_size=4, num_classes=CLASSES, drop_path_rate=0.0, **SWIN
        ),
    ),
}


def loaded(pair: Pair) -> tuple[Classifier, nn.Module]:
    """A classifier and timm's model, with the same random weights."""
    make, pooling, norm, timms = pair
    torch.manual_seed(0)
    model = timms().eval()
    for name, parameter in model.named_parameters():
        if name != "pos_embed" or not isinstance(make().positions, Tensor):
            nn.init.normal_(parameter, std=0.2)
    ours = Classifier(make(), CLASSES, pooling=pooling, norm=norm)
    kept = ours.state_dict().keys()
    state = {}
    for name, value in model.state_dict().items():
        name = name.replace("head.fc.", "head.")
        state[name if name.startswith(("head.", "fc_norm.")) else f"encoder.{name}"] = value
    ours.load_state_dict({name: state[name] for name in kept})
    return ours, model


@pytest.mark.parametrize("case", PAIRS)
def test_logits_and_gradients_are_timms(case: str) -> None:
    ours, model = loaded(PAIRS[case])
    size = 64 if case == "swin" else SIZE
    images = torch.randn(3, 3, size, size)
    logits, expected = ours(images), model(images)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    targets = torch.randn(3, CLASSES).softmax(1)
    Classification(ours)(images, targets).total.backward()
    SoftTargetCrossEntropy()(expected, targets).backward()
    theirs = {name.replace("head.fc.", "head."): p for name, p in model.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, f"{name} is outside of the loss"
        other = theirs[name.removeprefix("encoder.")].grad
        assert other is not None
        torch.testing.assert_close(parameter.grad, other, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("grid", [(4, 4), (2, 5), (1, 3)])
def test_a_bias_without_an_index_is_timms(grid: tuple[int, int]) -> None:
    oracle: Any = RelativePositionBias(grid, 3)
    table = oracle.relative_position_bias_table
    nn.init.normal_(table)
    expected = oracle()
    found = relative_bias(table, grid, True)
    assert torch.equal(found, expected)
    assert torch.equal(relative_bias(table, grid, False), expected[:, 1:, 1:])
    weights = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((bias * weights).sum(), table)[0] for bias in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_loss_is_in_float32_and_logits_come_without_targets() -> None:
    objective = Classification(Classifier(vit(), CLASSES, init_std=0.5))
    images, targets = torch.randn(4, 3, SIZE, SIZE), torch.eye(CLASSES)[:4]
    with torch.autocast("cpu", torch.bfloat16):
        found, logits = objective(images, targets), objective(images)
    assert isinstance(found, Classified)
    assert torch.equal(found.logits, logits)
    assert logits.dtype == torch.bfloat16
    expected = -(logits.double().log_softmax(1) * targets).sum(1).mean()
    torch.testing.assert_close(found.total.double(), expected, rtol=1e-6, atol=0)
    assert not found.logits.requires_grad


@pytest.mark.parametrize(("std", "scale"), [(2e-5, 1.0), (0.02, 1e-3)])
def test_the_head_begins_near_zero_and_norms_at_one(std: float, scale: float) -> None:
    model = Classifier(vit(), 500, init_std=std, init_scale=scale)
    assert float(model.head.weight.detach().std() / (std * scale)) == pytest.approx(1, rel=0.05)
    assert not model.head.bias.any()
    assert all(
        bool((p == 1).all()) for name, p in model.named_parameters() if "norm" in name and name.endswith("weight")
    )
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_an_untrained_encoder_begins_as_in_pre_training() -> None:
    mae, beit = Classifier(vit(), CLASSES), Classifier(vit(**BEIT, bias_tables="per_block"), CLASSES)
    qkv, fc2 = "encoder.blocks.0.attn.qkv.weight", "encoder.blocks.1.mlp.fc2.weight"
    largest = {name: float(beit.get_parameter(name).detach().abs().max()) for name in (qkv, fc2)}
    bound = (6 / (32 + 96)) ** 0.5  # Xavier's
    assert float(mae.get_parameter(qkv).detach().abs().max()) == pytest.approx(bound, rel=0.02)
    assert largest[qkv] <= 0.02
    assert largest[fc2] <= 0.02 / 2


@pytest.mark.parametrize("make", [vit, convvit, swin, lambda: vit(**BEIT, bias_tables="per_block")])
def test_drop_path_leaves_branches_out_of_single_images(make: Callable[[], Encoder]) -> None:
    torch.manual_seed(0)
    encoder = make()
    model = Classifier(encoder, CLASSES, init_std=1.0, norm="encoder").eval()
    side = encoder.patch_size * encoder.grid[0]
    images, depth = torch.randn(3, 3, side, side), len(encoder.blocks)
    scales = torch.ones(depth, 2, 3)
    scales[:, :, 1] = 0
    scales[1, 0, 2] = 2
    logits, whole = model(images, scales), model(images)
    torch.testing.assert_close(logits[0], whole[0])
    second: Any = list(encoder.blocks)[1]
    branch = second.conv2 if hasattr(second, "conv2") else second.attn
    handle = branch.register_forward_hook(lambda module, inputs, output: 2 * output)
    torch.testing.assert_close(logits[2], model(images)[2], rtol=1e-4, atol=1e-4)
    handle.remove()
    for block in encoder.blocks:  # without its branches a block is the identity
        block.forward = lambda x, *_: x
    torch.testing.assert_close(logits[1], model(images)[1])


def test_dropout_scales_features() -> None:
    model = Classifier(vit(), CLASSES, init_std=1.0)
    images, features = torch.randn(2, 3, SIZE, SIZE), []
    model.head.register_forward_hook(lambda module, inputs, output: features.append(inputs[0]))
    scales = torch.rand(2, 32)
    model(images), model(images, None, scales)
    torch.testing.assert_close(features[1], features[0] * scales)


def test_a_class_token_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="pooling=cls needs a class token"):
        Classifier(convvit(), CLASSES, pooling="cls")
