"""The fine-tuning step of a configuration: against timm and plain AdamW, and with weights of every origin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from scipy.interpolate import RectBivariateSpline
from timm.loss import SoftTargetCrossEntropy
from timm.models.beit import Beit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay
from torch import Tensor

from dmjd.builders.finetune import FinetuneStep, build_finetune_step, classification_and_inputs
from dmjd.builders.weights import load_classifier
from dmjd.config import (
    AugmentConfig,
    BackboneConfig,
    DataConfig,
    EngineConfig,
    FinetuneConfig,
    FinetuneOptimConfig,
    HeadConfig,
    WindowsConfig,
)
from dmjd.data.batch import Batch
from dmjd.errors import CheckpointError, ConfigError
from dmjd.interop.tensors import resize_bias_table
from dmjd.models.classifier import Classification
from dmjd.models.flops import count_flops
from dmjd.models.masked_image_model import Encoder
from dmjd.models.swin import SwinEncoder
from dmjd.models.vit import ViTEncoder
from dmjd.ops.images import normalise
from dmjd.positions import sincos_positions
from dmjd.runs.classes import pack_classes

CLASSES, SIZE, LR = 5, 32, 1e-2
EPS = 1e-2
"""Adam otherwise turns the rounding noise of a gradient of zero, as of the keys' bias, into a full step."""

SIZES: dict[str, Any] = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
PLAIN = AugmentConfig(randaugment=None, mixup=0.0, cutmix=0.0, erase_prob=0.0)
BEIT: dict[str, Any] = {"masked_tokens": "mask_token", "block": "beit", "positions": "relative"}


def configured(size: int = SIZE, parts: int = 1, **options: Any) -> FinetuneConfig:
    backbone = options.pop("backbone", {})
    return FinetuneConfig(
        batch_size=8,
        backbone=BackboneConfig(**(SIZES | backbone)),
        data=DataConfig(image_size=[size, size], flip=False),
        engine=EngineConfig(name="single", device="cpu", grad_accum_steps=parts),
        **options,
    )


def batch(size: int = SIZE) -> Batch:
    images = torch.randint(0, 256, (8, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Batch(images, torch.arange(8), torch.arange(8) % CLASSES)


def parameters(step: FinetuneStep) -> dict[str, Tensor]:
    return step.engine.full_state_dict()


def test_two_steps_are_those_of_timms_model_with_timms_groups() -> None:
    optim = FinetuneOptimConfig(no_decay=["cls_token", "pos_embed"], layer_decay=0.65, weight_decay=0.1, eps=EPS)
    config = configured(backbone={"positions": "learned"}, optim=optim, augment=PLAIN, head=HeadConfig(init_std=0.1))
    step = build_finetune_step(config, CLASSES)
    model = VisionTransformer(img_size=SIZE, num_classes=CLASSES, global_pool="avg", fc_norm=True, **SIZES)
    ours = {name.removeprefix("model.").removeprefix("encoder."): p for name, p in parameters(step).items()}
    model.load_state_dict(ours)
    groups = param_groups_layer_decay(model, 0.1, no_weight_decay_list=("cls_token", "pos_embed"), layer_decay=0.65)
    last = {id(p) for p in model.fc_norm.parameters()}  # timm decays the rate of the last norm, MAE and we do not
    groups = [
        {"params": [p], "lr": LR * (1.0 if id(p) in last else group["lr_scale"]), "weight_decay": group["weight_decay"]}
        for group in groups
        for p in group["params"]
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=EPS)
    data, targets = batch(), torch.full((8, CLASSES), 0.1 / CLASSES)
    targets[torch.arange(8), batch().labels] += 0.9
    images = normalise(data.images, config.data.mean, config.data.std)
    for _ in range(2):
        loss = SoftTargetCrossEntropy()(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step.forward_backward(data, 0)["loss"], loss.detach(), rtol=1e-5, atol=1e-5)
        step.update(LR)
    for name, parameter in parameters(step).items():
        plain = name.removeprefix("model.").removeprefix("encoder.")
        torch.testing.assert_close(parameter, model.get_parameter(plain).detach(), rtol=1e-4, atol=1e-5, msg=plain)
    torch.testing.assert_close(step.logits(data.images), model.eval()(images).detach(), rtol=1e-3, atol=1e-3)


def test_micro_batches_change_nothing_and_a_bad_step_moves_nothing() -> None:
    options: dict[str, Any] = {"backbone": {"drop_path": 0.3}, "head": HeadConfig(dropout=0.2, init_std=0.1)}
    options["optim"] = FinetuneOptimConfig(eps=EPS)
    whole, parts = (build_finetune_step(configured(parts=parts, **options), CLASSES) for parts in (1, 4))
    for step in (whole, parts):
        for epoch in range(2):
            loss = step.forward_backward(batch(), epoch)["loss"]
            assert float(step.update(LR).applied) == 1
    other = whole.forward_backward(batch(), 1)["loss"]
    torch.testing.assert_close(parts.forward_backward(batch(), 1)["loss"], other, rtol=1e-5, atol=1e-5)
    assert float(other) != float(loss)
    before = parameters(whole)
    for name, value in parameters(parts).items():
        torch.testing.assert_close(value, before[name], rtol=1e-4, atol=1e-5, msg=name)
    whole.engine.discard()
    whole.forward_backward(batch(), 2, skip=True)
    assert float(whole.update(LR).applied) == 0
    assert all(torch.equal(value, before[name]) for name, value in parameters(whole).items())


def test_the_average_is_of_the_whole_model_and_stands_in_for_it() -> None:
    step = build_finetune_step(configured(ema_decay=0.5, freeze=1, augment=PLAIN), CLASSES)
    expected = parameters(step)
    assert step.averages.keys() == expected.keys()
    for _ in range(3):
        step.forward_backward(batch(), 0)
        step.update(LR)
        for name, value in parameters(step).items():
            expected[name] = 0.5 * expected[name] + 0.5 * value
    trained, logits = parameters(step), step.logits(batch().images)
    with step.with_average():
        averaged = parameters(step)
        of_average = step.logits(batch().images)
    for name, value in expected.items():
        torch.testing.assert_close(averaged[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert not torch.equal(logits, of_average)
    assert torch.equal(logits, step.logits(batch().images))
    assert all(torch.equal(value, trained[name]) for name, value in parameters(step).items())
    assert step.engine.objective.training


@pytest.mark.parametrize("backbone", [{}, {"drop_path": 0.2, **BEIT}])
def test_the_plan_counts_the_same_model_without_memory(backbone: dict[str, Any]) -> None:
    config = configured(backbone=backbone, freeze=1)
    state = torch.get_rng_state()
    with torch.device("meta"):
        objective, prepared = classification_and_inputs(config, CLASSES, 2)
    assert torch.equal(state, torch.get_rng_state())
    step = build_finetune_step(config, CLASSES)
    assert {n: p.shape for n, p in objective.named_parameters()} == {n: p.shape for n, p in parameters(step).items()}
    assert sum(p.numel() for p in objective.parameters()) == step.parameters[1]
    assert sum(group.parameters for group in step.groups) == step.parameters[1]
    width, tokens, images = 32, 17, 2
    block = 2 * tokens * width * 12 * width + 2 * 2 * tokens**2 * width
    embedding = 2 * 16 * (3 * 64) * width  # frozen, so without a backward pass
    assert count_flops(objective, prepared) == images * (3 * (2 * block + 2 * width * CLASSES) + embedding)


def test_a_data_set_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 classes, and data\.name=folder has 1"):
        build_finetune_step(configured(), 1)
    with pytest.raises(ConfigError, match=r"head\.num_classes=4 is less than the 5 classes"):
        build_finetune_step(configured(head=HeadConfig(num_classes=4)), CLASSES)
    with pytest.raises(ConfigError, match="pooling=cls needs a class token"):
        build_finetune_step(configured(backbone={"class_token": False}, head=HeadConfig(pooling="cls")), CLASSES)
    with pytest.raises(ConfigError, match="batch_size=8"):
        build_finetune_step(configured(parts=8), CLASSES)


def randomised(encoder: Encoder) -> Encoder:
    torch.manual_seed(1)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return encoder


def pre_trained(encoder: Encoder, path: Path, head: int = CLASSES) -> Path:
    """A consolidated checkpoint of a pre-training, whose head has as many outputs as there are classes."""
    state = {f"parameter/model.encoder.{name}": value for name, value in randomised(encoder).state_dict().items()}
    if encoder.mask_token is None:
        state["parameter/model.decoder.mask_token"] = torch.zeros(1, 1, 8)
    for leaf, value in (("weight", torch.ones(head, encoder.embed_dim)), ("bias", torch.ones(head))):
        state[f"parameter/model.head.{leaf}"] = value
    save_file(state, path)
    return path


def vit(**options: Any) -> Encoder:
    return ViTEncoder(image_size=(SIZE, SIZE), in_chans=3, **SIZES, **options)


def objective_of(config: FinetuneConfig) -> Classification:
    return classification_and_inputs(config, CLASSES, 1)[0]


def test_a_pre_training_gives_its_encoder_alone(tmp_path: Path) -> None:
    encoder = vit()
    path = pre_trained(encoder, tmp_path / "run.safetensors")
    step = build_finetune_step(configured(), CLASSES, initial=path)
    assert step.began_from == f"{path}; fc_norm, head as initialised"
    found = parameters(step)
    untrained = parameters(build_finetune_step(configured(), CLASSES))
    for name, value in encoder.state_dict().items():
        if not name.startswith("norm."):
            assert torch.equal(found[f"model.encoder.{name}"], value)
    for name in untrained:
        if not name.startswith("model.encoder."):
            assert torch.equal(found[name], untrained[name])


def test_a_fine_tuned_model_comes_with_its_head_if_the_classes_agree(tmp_path: Path) -> None:
    source = build_finetune_step(configured(head=HeadConfig(init_std=0.1), ema_decay=0.5), CLASSES)
    source.forward_backward(batch(), 0)
    source.update(LR)
    path = tmp_path / "checkpoint"
    path.mkdir()
    source.engine.save(path, source.averages)()
    names = [f"class {number}" for number in range(CLASSES)]
    (path / "classes.json").write_bytes(pack_classes(names))
    again = build_finetune_step(configured(), CLASSES, initial=path, classes=names)
    assert again.began_from == f"{path}; with its head"
    assert torch.equal(again.logits(batch().images), source.logits(batch().images))
    others = build_finetune_step(configured(), CLASSES, initial=path, classes=names[::-1])
    assert others.began_from == f"{path}; head as initialised, since the data has other classes"
    assert not torch.equal(parameters(others)["model.head.weight"], parameters(source)["model.head.weight"])
    average = build_finetune_step(replace(configured(), weights="ema"), CLASSES, initial=path)
    assert all(torch.equal(value, source.averages[name]) for name, value in parameters(average).items())
    more = build_finetune_step(configured(), CLASSES + 1, initial=path)
    assert more.began_from == f"{path}; head as initialised"
    assert torch.equal(parameters(more)["model.fc_norm.weight"], parameters(source)["model.fc_norm.weight"])


def test_a_head_is_not_loaded_behind_a_norm_that_it_was_not_trained_with(tmp_path: Path) -> None:
    source = parameters(build_finetune_step(configured(head=HeadConfig(norm="encoder")), CLASSES))
    path = tmp_path / "run.safetensors"
    save_file({f"parameter/{name}": value for name, value in source.items()}, path)
    step = build_finetune_step(configured(), CLASSES, initial=path)
    assert step.began_from == f"{path}; fc_norm, head as initialised, since it read another norm"


def test_positions_become_learned_ones_of_another_size(tmp_path: Path) -> None:
    path = pre_trained(vit(), tmp_path / "run.safetensors")
    objective = objective_of(configured(backbone={"positions": "learned"}))
    load_classifier(objective, path)
    table = objective.model.encoder.get_parameter("pos_embed").detach()
    torch.testing.assert_close(table[0, 1:], sincos_positions((4, 4), 32))
    assert not table[0, 0].any()
    learned = vit(positions="learned")
    path = pre_trained(learned, tmp_path / "learned.safetensors")
    objective = objective_of(configured(64, backbone={"positions": "learned"}))
    load_classifier(objective, path)
    large = objective.model.encoder.get_parameter("pos_embed").detach()
    expected = timm.layers.resample_abs_pos_embed(learned.get_parameter("pos_embed"), [8, 8], antialias=False)
    torch.testing.assert_close(large, expected.detach(), rtol=1e-4, atol=1e-5)


def test_shared_tables_of_relative_positions_become_those_of_blocks(tmp_path: Path) -> None:
    encoder = vit(**BEIT, layer_scale=0.1)
    path = pre_trained(encoder, tmp_path / "run.safetensors")
    objective = objective_of(configured(backbone={**BEIT, "layer_scale": 0.1, "bias_tables": "per_block"}))
    assert load_classifier(objective, path) == f"{path}; fc_norm, head as initialised"
    images = torch.randn(2, 3, SIZE, SIZE)
    objective.model.encoder.norm, encoder.norm = torch.nn.Identity(), torch.nn.Identity()
    torch.testing.assert_close(objective.model.encoder(images), encoder(images))


def test_windows_of_a_swin_grow(tmp_path: Path) -> None:
    """SimMIM: 192 pixels in windows of 6, then 224 pixels in windows of 7; here 64 in 2 and 96 in 3."""
    windows: dict[str, Any] = {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
    encoder = SwinEncoder(image_size=(64, 64), in_chans=3, embed_dim=32, window=2, **windows)
    path = pre_trained(encoder, tmp_path / "run.safetensors")
    swin = {
        "name": "swin", "patch_size": 32, "embed_dim": 32, "class_token": False, "masked_tokens": "mask_token",
        "windows": WindowsConfig(size=3, **windows), "drop_path": 0.1,
    }  # fmt: skip
    config = configured(96, backbone=swin, head=HeadConfig(norm="encoder"), augment=PLAIN)
    step = build_finetune_step(config, CLASSES, initial=path)
    assert step.began_from == f"{path}; head as initialised"
    for name in (f"layers.{stage}.blocks.0.attn.relative_position_bias_table" for stage in range(3)):
        table, small = parameters(step)[f"model.encoder.{name}"], encoder.get_parameter(name).detach()
        assert len(table) == 25
        neighbours = [row * 5 + column for row in (1, 2, 3) for column in (1, 2, 3)]
        torch.testing.assert_close(table[neighbours], small, rtol=0.1, atol=0.1, msg="neighbours stay neighbours")
    assert bool(step.forward_backward(batch(96), 0)["loss"].isfinite())
    assert float(step.update(LR).applied) == 1


def official_geometric(table: Tensor, old: int, new: int) -> Tensor:
    """SimMIM's utils.py and BEiT's run_class_finetuning.py, with what replaces SciPy's interp2d."""
    left, right = 1.01, 1.5
    while right - left > 1e-6:
        q = (left + right) / 2.0
        if (1.0 - q ** (old // 2)) / (1.0 - q) > new // 2:
            right = q
        else:
            left = q
    distances, current = [], 1.0
    for index in range(old // 2):
        distances.append(current)
        current += q ** (index + 1)
    x = [-each for each in reversed(distances)] + [0] + distances
    read = np.arange(-(new // 2.0), new // 2.0 + 0.1, 1.0)
    heads = [RectBivariateSpline(x, x, head.view(old, old).numpy())(read, read) for head in table.T]
    return torch.stack([torch.from_numpy(head).flatten() for head in heads], 1).float()


@pytest.mark.parametrize(("old", "new", "cls_rows"), [(6, 7, 0), (14, 24, 3), (14, 10, 3)])
def test_bias_tables_are_interpolated_as_the_official_code_does(old: int, new: int, cls_rows: int) -> None:
    spans = 2 * old - 1, 2 * new - 1
    table = torch.randn(spans[0] ** 2 + cls_rows, 4)
    found = resize_bias_table(table, (old, old), (new, new), cls_rows, geometric=True)
    expected = official_geometric(table[: spans[0] ** 2], *spans)
    torch.testing.assert_close(found[: spans[1] ** 2], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[spans[1] ** 2 :], table[spans[0] ** 2 :])


def timm_vit() -> tuple[Any, dict[str, Any]]:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIZE, num_classes=CLASSES, global_pool="avg", fc_norm=True, **SIZES
    )
    return model, {"positions": "learned"}


def timm_beit() -> tuple[Any, dict[str, Any]]:
    sizes = {"img_size": SIZE, "num_classes": CLASSES, "init_values": 0.1, "qkv_bias": True, **SIZES}
    model = Beit(use_abs_pos_emb=False, use_rel_pos_bias=True, **sizes)
    return model, {**BEIT, "layer_scale": 0.1, "bias_tables": "per_block"}


def timm_swin() -> tuple[Any, dict[str, Any]]:
    sizes: dict[str, Any] = {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
    model = SwinTransformer(
        img_size=SIZE, patch_size=4, embed_dim=4, window_size=1, num_classes=CLASSES, drop_path_rate=0.0, **sizes
    )
    return model, {
        "name": "swin", "patch_size": 32, "embed_dim": 32, "class_token": False, "masked_tokens": "mask_token",
        "windows": WindowsConfig(size=1, **sizes),
    }  # fmt: skip


@pytest.mark.parametrize("make", [timm_vit, timm_beit, timm_swin])
def test_a_fine_tuned_file_of_timm_gives_its_logits(
    make: Callable[[], tuple[Any, dict[str, Any]]], tmp_path: Path
) -> None:
    model, backbone = make()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    path = tmp_path / "model.pth"
    torch.save(model.state_dict(), path)
    config = configured(backbone=backbone, head=HeadConfig(norm="encoder" if make is timm_swin else "pooled"))
    step = build_finetune_step(config, CLASSES, initial=path)
    assert step.began_from.endswith("; with its head")
    images = normalise(batch().images, config.data.mean, config.data.std)
    torch.testing.assert_close(step.logits(batch().images), model.eval()(images).detach(), rtol=1e-3, atol=1e-3)
    other = build_finetune_step(config, CLASSES + 2, initial=path)
    assert other.began_from.endswith("; head as initialised")


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ({"embed_dim": 16}, r"of another encoder than the configuration: it has encoder\.blocks\.0\.\S+ of shape"),
        ({"depth": 3}, r"it lacks encoder\.blocks\.2"),
        ({"depth": 1}, r"it has unexpected encoder\.blocks\.1"),
        ({"class_token": False}, r"it has unexpected encoder\.cls_token"),
    ],
)
def test_weights_of_another_encoder_are_an_error_of_one_line(
    backbone: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = pre_trained(vit(), tmp_path / "run.safetensors")
    with pytest.raises(CheckpointError, match=message) as error:
        build_finetune_step(configured(backbone=backbone), CLASSES, initial=path)
    assert "\n" not in str(error.value)
