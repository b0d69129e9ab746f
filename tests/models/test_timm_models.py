from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import timm
import torch
from timm.models import get_notrace_functions, get_notrace_modules, group_parameters
from torch import Tensor, nn

import dmjd.models.timm_models  # noqa: F401  # registers the models
from dmjd.models.convvit import ConvViTEncoder

DIMS, DEPTHS = (8, 12, 24), (1, 1, 2)
SMALL: dict[str, Any] = {"embed_dims": DIMS, "depths": DEPTHS, "num_heads": 3, "img_size": (64, 64), "num_classes": 5}


def create(name: str = "convvit_base_patch16", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return timm.create_model(name, **(SMALL | options))


def on_meta(name: str, **options: Any) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, **options)


def make_images(batch: int = 2, height: int = 64, width: int = 64) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


# Sizes


@pytest.mark.parametrize(
    ("name", "options", "tensors", "official"),
    [
        ("convvit_base_patch16", {}, 207, 88_787_816),
        ("convvit_base_patch16", {"mlp_ratios": (4, 4, 4)}, 207, 85_374_824),
        ("convvit_large_patch16", {}, 351, 322_977_384),
    ],
    ids=["dmjd-base", "convmae-base", "dmjd-large"],
)
def test_finetuned_models_have_the_official_size(name: str, options: Any, tensors: int, official: int) -> None:
    model = on_meta(name, **options)
    # The official models count their frozen table of positions.
    assert sum(value.numel() for value in model.parameters()) == official - 196 * model.embed_dim
    assert len(model.state_dict()) == tensors - 1
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["convvit_base_patch16", "convvit_large_patch16"])
def test_the_models_are_registered_and_described(name: str) -> None:
    assert timm.is_model(name)
    assert not timm.is_model_pretrained(name)
    model = on_meta(name)
    assert model.default_cfg["input_size"] == (3, 224, 224)
    assert model.num_classes == 1000
    assert isinstance(model.get_submodule(model.default_cfg["classifier"]), nn.Linear)
    assert isinstance(model.get_submodule(model.default_cfg["first_conv"]), nn.Conv2d)


# Features


@torch.no_grad()
def test_tokens_are_the_encoders() -> None:
    encoder = ConvViTEncoder(
        image_size=(64, 64), in_chans=3, embed_dims=DIMS, depths=DEPTHS, mlp_ratios=(8, 8, 4), num_heads=3
    )
    model = create(num_classes=0, global_pool="").eval()
    missing, unexpected = model.load_state_dict(encoder.state_dict(), strict=False)
    assert not missing
    assert all("output_decode" in name for name in unexpected)
    images = make_images()
    assert torch.equal(model(images).flatten(1, 2), encoder(images))


@torch.no_grad()
def test_the_classifier_reads_the_normalised_mean() -> None:
    model, images = create().eval(), make_images()
    tokens = model.forward_features(images)
    assert tokens.shape == (2, 4, 4, 24)
    pooled = tokens.mean((1, 2))
    pooled = (pooled - pooled.mean(-1, keepdim=True)) / (pooled.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(model.forward_head(tokens, pre_logits=True), pooled, rtol=1e-5, atol=1e-5)
    expected = pooled @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_intermediates_are_maps_of_the_stages() -> None:
    model, images = create(global_pool="", num_classes=0).eval(), make_images(2, 64, 96)
    tokens, maps = model.forward_intermediates(images)
    assert [tuple(stage.shape) for stage in maps] == [(2, 8, 16, 24), (2, 12, 8, 12), (2, 24, 4, 6)]
    assert torch.equal(tokens, model.forward_features(images))
    normed = model.forward_intermediates(images, norm=True, intermediates_only=True)
    assert torch.equal(normed[2], tokens.permute(0, 3, 1, 2))
    assert not torch.equal(maps[2], normed[2])
    # Maps are in raster order: each is what its stage gives for the whole image.
    stage1, stage2, _ = model.forward_stages(images)
    for index, stage in enumerate((stage1, stage2)):
        assert torch.equal(maps[index], stage.permute(0, 3, 1, 2))
        assert torch.equal(normed[index], maps[index])
    torch.testing.assert_close(model.norm(maps[2].permute(0, 2, 3, 1)), tokens, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("indices", "stages"), [(None, [0, 1, 2]), (2, [1, 2]), (1, [2]), ([0, 2], [0, 2]), ([-1], [2]), ([-3, 1], [0, 1])]
)
@torch.no_grad()
def test_intermediates_are_chosen_as_in_timm(indices: Any, stages: list[int]) -> None:
    model, images = create().eval(), make_images()
    every = model.forward_intermediates(images, intermediates_only=True)
    chosen = model.forward_intermediates(images, indices=indices, intermediates_only=True)
    assert len(chosen) == len(stages)
    assert all(torch.equal(stage, every[index]) for stage, index in zip(chosen, stages, strict=True))


def test_intermediates_come_as_maps_only() -> None:
    with pytest.raises(ValueError, match="output_fmt must be NCHW, got 'NLC'"):
        create().forward_intermediates(make_images(), output_fmt="NLC")


@pytest.mark.parametrize(
    ("options", "stages"), [({}, [0, 1, 2]), ({"out_indices": (0, 2)}, [0, 2]), ({"out_indices": (-1,)}, [2])]
)
@torch.no_grad()
def test_features_only_is_a_pyramid(options: Any, stages: list[int]) -> None:
    features = create(features_only=True, **options).eval()
    assert features.feature_info.channels() == [DIMS[stage] for stage in stages]
    assert features.feature_info.reduction() == [(4, 8, 16)[stage] for stage in stages]
    model = create().eval()
    features.model.load_state_dict(model.state_dict(), strict=False)
    for height, width in ((64, 64), (32, 80)):
        images = make_images(2, height, width)
        maps = features(images)
        every = model.forward_intermediates(images, intermediates_only=True)
        for value, stage in zip(maps, stages, strict=True):
            assert torch.equal(value, every[stage])
            assert value.shape[2:] == (height // (4, 8, 16)[stage], width // (4, 8, 16)[stage])


@pytest.mark.parametrize("stages", [1, 2])
@torch.no_grad()
def test_pruned_stages_leave_the_maps_before_them(stages: int) -> None:
    model, pruned, images = create().eval(), create().eval(), make_images()
    wanted = model.forward_intermediates(images, indices=[stages - 1], stop_early=True, intermediates_only=True)
    assert pruned.prune_intermediate_layers([stages - 1]) == [stages - 1]
    assert torch.equal(pruned.forward_features(images).permute(0, 3, 1, 2), wanted[0])
    assert pruned.num_features == DIMS[stages - 1]
    assert not [name for name in pruned.state_dict() if "3" in name or "patch_embed4" in name]


@torch.no_grad()
def test_a_trace_computes_the_logits_of_any_size() -> None:
    model = create().eval()
    leaves = tuple(get_notrace_modules())

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, leaves) or super().is_leaf_module(m, module_qualified_name)

    tracer = Tracer(autowrap_functions=get_notrace_functions(), param_shapes_constant=True)
    traced = torch.fx.GraphModule(model, tracer.trace(model))
    for size in ((64, 64), (32, 80)):
        torch.testing.assert_close(traced(make_images(2, *size)), model(make_images(2, *size)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_device_and_type_are_those_of_every_tensor(dtype: torch.dtype) -> None:
    model = create(device="meta", dtype=dtype)
    model.reset_classifier(3)
    tensors = [*model.parameters(), *model.buffers()]
    assert {(tensor.device.type, tensor.dtype) for tensor in tensors} == {("meta", dtype)}
    assert create(dtype=dtype)(make_images(1, 32, 80).to(dtype)).dtype == dtype


def test_features_only_holds_no_parameter_that_plays_no_part() -> None:
    features = create(features_only=True)
    sum(stage.square().mean() for stage in features(make_images())).backward()
    assert gradients(features).keys() == dict(features.named_parameters()).keys()


@pytest.mark.parametrize("size", ["base", "large"])
def test_feature_info_at_full_size(size: str) -> None:
    features = on_meta(f"convvit_{size}_patch16", features_only=True)
    assert features.feature_info.channels() == {"base": [256, 384, 768], "large": [384, 768, 1024]}[size]
    maps = features(torch.empty(1, 3, 512, 512, device="meta"))
    assert [stage.shape[2:] for stage in maps] == [(128, 128), (64, 64), (32, 32)]


@pytest.mark.parametrize("size", [(32, 80), (96, 64), (16, 16)])
@torch.no_grad()
def test_any_size_is_as_if_built_for_it(size: tuple[int, int]) -> None:
    model, built = create().eval(), create(seed=1, img_size=size).eval()
    built.load_state_dict(model.state_dict())
    assert torch.equal(model(make_images(2, *size)), built(make_images(2, *size)))


def test_an_integer_is_a_square_image_and_other_sides_are_refused() -> None:
    assert create(img_size=32).grid == (2, 2)
    with pytest.raises(ValueError, match="image size 64x40 is not divisible by the patch size 16"):
        create()(make_images(1, 64, 40))


# Classifier


def test_reset_classifier() -> None:
    model, images = create(), make_images()
    assert model.get_classifier() is model.head
    assert model(images).shape == (2, 5)
    model.reset_classifier(7)
    assert (model.num_classes, model.get_classifier().out_features, model.global_pool) == (7, 7, "avg")
    assert model(images).shape == (2, 7)
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    assert model(images).shape == (2, model.num_features) == (2, 24)
    model.reset_classifier(0, "")
    assert model(images).shape == (2, 4, 4, 24)


@pytest.mark.parametrize("pool", ["token", "max"])
def test_an_unknown_pool_is_refused(pool: str) -> None:
    with pytest.raises(ValueError, match=f"global_pool must be one of 'avg', '', got '{pool}'"):
        create(global_pool=pool)


# Layer decay


@pytest.mark.parametrize("size", ["base", "large"])
@pytest.mark.parametrize("options", [{}, {"global_pool": ""}], ids=["fc_norm", "norm"])
def test_layers_for_decay_are_the_official_ones(size: str, options: dict[str, Any]) -> None:
    model = on_meta(f"convvit_{size}_patch16", **options)
    depth = {"base": 11, "large": 23}[size]

    def official(name: str) -> int:
        if name.startswith(("patch_embed", "blocks1", "blocks2")):
            return 0
        return int(name.split(".")[1]) + 1 if name.startswith("blocks3") else depth + 1

    found = group_parameters(model, model.group_matcher(), reverse=True)
    assert found == {name: official(name) for name, _ in model.named_parameters()}
    assert set(found.values()) == set(range(depth + 2))


def test_only_matrices_decay() -> None:
    model = on_meta("convvit_base_patch16")
    assert not model.no_weight_decay()


# Checkpointing and stochastic depth


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_recomputation_changes_no_bit_of_a_gradient(rate: float) -> None:
    plain, recomputed = (create(drop_path_rate=rate) for _ in range(2))
    recomputed.set_grad_checkpointing()
    ran = []
    recomputed.blocks3[0].attn.register_forward_pre_hook(lambda *_: ran.append(1))
    for model in (plain, recomputed):
        model.train()
        torch.manual_seed(4)
        model(make_images(4)).square().sum().backward()
    assert len(ran) == 2  # once forward, once on the way back
    expected = gradients(plain)
    assert gradients(recomputed).keys() == expected.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(value, expected[name]) for name, value in gradients(recomputed).items())
    recomputed.set_grad_checkpointing(False)
    recomputed(make_images(4)).sum().backward()
    assert len(ran) == 3


@pytest.mark.parametrize("copied", [deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_a_model_with_recomputation_can_be_copied(copied: Callable[[Any], Any]) -> None:
    """As by an average of weights, or by torch.save of a whole model."""
    model = create()
    model.set_grad_checkpointing()
    found = copied(model)
    ran = []
    found.blocks3[0].attn.register_forward_pre_hook(lambda *_: ran.append(1))
    for each in (model, found):
        each(make_images()).square().sum().backward()
    assert len(ran) == 2
    expected = gradients(model)
    assert gradients(found).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in gradients(found).items())


def silence(model: Any) -> list[tuple[Any, Any]]:
    """Every residual branch gives 0; their last layers in order, (convolution or attention, MLP) of each block."""
    branches = [(block.conv2, block.mlp.fc2) for block in (*model.blocks1, *model.blocks2)]
    branches += [(block.attn.proj, block.mlp.fc2) for block in model.blocks3]
    with torch.no_grad():
        for layer in (layer for pair in branches for layer in pair):
            layer.weight.zero_()
            layer.bias.zero_()
    return branches


@torch.no_grad()
def test_drop_path_grows_linearly_from_the_first_block_to_the_last() -> None:
    model, images = create(drop_path_rate=0.6, img_size=(16, 16)), make_images(600, 16, 16)
    branches = silence(model)
    assert len(branches) == 4
    stages, rates = (0, 1, 2, 2), (0.0, 0.2, 0.4, 0.6)
    base = model.eval().forward_intermediates(images, intermediates_only=True)
    for pair, stage, rate in zip(branches, stages, rates, strict=True):
        for layer in pair:
            layer.bias.fill_(1.0)  # the branch now adds 1 where it is kept
            added = model.train().forward_intermediates(images, intermediates_only=True)[stage] - base[stage]
            layer.bias.zero_()
            scale = added.flatten(1)[:, 0]
            torch.testing.assert_close(added, scale.view(-1, 1, 1, 1).expand_as(added), rtol=0, atol=1e-5)
            kept = scale > 0.5
            expected = torch.where(kept, 1 / (1 - rate), 0.0)
            torch.testing.assert_close(scale, expected, rtol=0, atol=1e-5)
            # Five standard errors of a binomial share.
            assert abs(kept.double().mean().item() - (1 - rate)) <= 5 * (rate * (1 - rate) / 600) ** 0.5


@torch.no_grad()
def test_drop_path_acts_in_training_alone() -> None:
    plain, model, images = create(), create(drop_path_rate=0.5), make_images(8)
    assert torch.equal(model.eval()(images), plain.eval()(images))
    assert torch.equal(plain.train()(images), plain.eval()(images))
    torch.manual_seed(0)
    first, second = model.train()(images), model(images)
    assert not torch.equal(first, second)
    assert not torch.equal(first, plain(images))
