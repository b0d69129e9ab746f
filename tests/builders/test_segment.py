"""A step of segmentation from its configuration: layers, draws, initial weights, static form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from dmjd.builders.finetune import classification_and_inputs
from dmjd.builders.model import build_encoder
from dmjd.builders.segment import SegmentStep, build_segment_step, build_segmentation, segmentation_and_inputs
from dmjd.builders.weights import load_classifier, load_encoder_part
from dmjd.config import FinetuneConfig, SegmentConfig
from dmjd.data.batch import Batch
from dmjd.errors import ConfigError
from dmjd.models.flops import count_flops
from dmjd.models.masked_image_model import Encoder
from dmjd.ops.images import normalise
from dmjd.parallel.apply import MODES

CLASSES = 4
BEIT: dict[str, Any] = {"masked_tokens": "mask_token", "block": "beit", "positions": "relative"}


def configuration(name: str = "vit", size: int = 64, window: int | None = None, **backbone: Any) -> SegmentConfig:
    config = SegmentConfig(init=None, batch_size=2)
    config.engine.device = "cpu"
    config.data.image_size, config.test.stride = [size, size], [size, size]
    config.optim.layer_decay = 0.5
    config.head = replace(config.head, channels=8, auxiliary_channels=6)
    shape = config.backbone
    shape.name, shape.embed_dim, shape.depth, shape.num_heads, shape.drop_path = name, 32, 4, 2, 0.2
    if name == "convvit":
        shape.class_token = False
        shape.conv_stages.embed_dims, shape.conv_stages.depths = [16, 24], [1, 1]
    if name == "swin":
        shape.class_token, shape.patch_size, shape.masked_tokens, shape.embed_dim = False, 32, "mask_token", 64
        shape.windows.depths, shape.windows.num_heads, shape.windows.size = [1, 1, 2, 1], [1, 1, 2, 2], 3
    config.backbone = replace(shape, **backbone)
    if window is not None:
        config.attention = replace(config.attention, window=window, global_blocks=[3], relative_positions="decomposed")
    return config


def batch(sample_ids: list[int], size: int = 64) -> Batch:
    """The image of an id does not depend on the others."""
    rows = []
    for sample in sample_ids:
        generator = torch.Generator().manual_seed(sample)
        rows.append(torch.randint(0, 256, (size, size, 4), dtype=torch.uint8, generator=generator))
    images = torch.stack(rows)
    empty = Batch.empty(len(sample_ids), [(size, size)], 3)
    return empty._replace(
        images=images[..., :3].contiguous(), sample_ids=torch.tensor(sample_ids), maps=images[..., 3] % (CLASSES + 1)
    )._replace(maps=torch.where(images[..., 3] % 5 == CLASSES, 255, images[..., 3] % 5))


def parameters(step: SegmentStep) -> dict[str, Tensor]:
    return step.engine.full_state_dict()


KINDS = [("vit", None), ("vit", 3), ("convvit", 3), ("swin", None)]


@pytest.mark.long  # 1 minute of compilation
def test_the_compiled_model_has_the_losses_of_eager() -> None:
    curves = []
    for compiled in ("none", "model"):
        config = configuration()
        config.engine = replace(config.engine, compile=compiled, precision="bf16")
        step = build_segment_step(config, CLASSES)
        losses = []
        for epoch in range(3):
            losses.append(step.forward_backward(batch([5, 9]), epoch)["loss"].item())
            step.update(1e-3)
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=1e-2)


@pytest.mark.parametrize(("name", "window"), KINDS)
def test_a_step_moves_every_parameter_and_repeats_itself_bit_for_bit(name: str, window: int | None) -> None:
    weights = []
    for _ in range(2):
        step = build_segment_step(configuration(name, window=window, drop_path=0.0), CLASSES)
        before = parameters(step)
        losses = step.forward_backward(batch([5, 9]), 1)
        assert losses["loss"].item() == pytest.approx(losses["decode"].item() + 0.4 * losses["auxiliary"].item())
        assert step.update(1e-2).applied == 1
        weights.append(parameters(step))
        assert [key for key, value in weights[-1].items() if torch.equal(value, before[key])] == []
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_recomputing_changes_nothing(mode: str) -> None:
    found = []
    for each in ("none", mode):
        config = configuration("vit", window=3)
        config.engine.activation_checkpointing = each
        step = build_segment_step(config, CLASSES)
        loss = step.forward_backward(batch([1, 2]), 0)["loss"]
        found.append((loss, step.update(1e-2).grad_norm))
    assert found[0] == found[1]


def test_draws_belong_to_images() -> None:
    prepare = build_segment_step(configuration(), CLASSES).prepare
    together = prepare(batch([3, 8, 5]), 2)
    for row, sample in enumerate((3, 8, 5)):
        alone = prepare(batch([sample]), 2)
        assert together.branch_scales is not None
        assert alone.branch_scales is not None
        assert torch.equal(together.branch_scales[..., row : row + 1], alone.branch_scales)
        assert together.dropout is not None
        assert alone.dropout is not None
        assert torch.equal(together.dropout[row : row + 1], alone.dropout)
        assert torch.equal(together.maps[row : row + 1], alone.maps)
    other = prepare(batch([3, 8, 5]), 3)
    assert together.dropout is not None
    assert other.dropout is not None
    assert not torch.equal(together.dropout, other.dropout)
    assert together.dropout.shape == (3, 8 + 6)
    assert together.dropout.unique().tolist() == pytest.approx([0, 1 / 0.9])


@pytest.mark.parametrize(("name", "window"), KINDS)
def test_learning_rates_decay_through_the_blocks_and_not_through_the_head(name: str, window: int | None) -> None:
    step = build_segment_step(configuration(name, window=window), CLASSES)
    scales = step.engine.objective.lr_scales
    assert scales.keys() == dict(step.engine.objective.named_parameters()).keys()
    heads = {key: scale for key, scale in scales.items() if not key.startswith("model.encoder.")}
    assert set(heads.values()) == {1.0}
    assert {key.split(".")[1] for key in heads} == {"pyramid", "decode_head", "auxiliary_head", "auxiliary", "head"}
    for key, scale in scales.items():
        if name == "vit" and key.startswith("model.encoder.blocks."):
            assert scale == 0.5 ** (4 - int(key.split(".")[3])), key
        if name == "convvit" and key.startswith("model.encoder.blocks3."):
            assert scale == 0.5 ** (4 - int(key.split(".")[3])), key


def test_logits_are_those_of_normalised_images_of_any_size() -> None:
    step = build_segment_step(configuration("convvit"), CLASSES)
    images = torch.randint(0, 256, (1, 50, 90, 3), dtype=torch.uint8)
    found = step.logits(images)
    assert (found.shape, found.dtype) == ((1, CLASSES, 50, 90), torch.float32)
    data = step.config.data
    with torch.no_grad():
        expected = step.engine.objective.eval()(normalise(images, tuple(data.mean), tuple(data.std)))
    assert torch.equal(found, expected)


def pre_trained(config: SegmentConfig, path: Path) -> Encoder:
    """The encoder of a consolidated checkpoint of a pre-training at ``path``."""
    encoder = build_encoder(config)
    torch.manual_seed(1)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state = {f"parameter/model.encoder.{name}": value for name, value in encoder.state_dict().items()}
    state |= {"parameter/model.decoder.mask_token": torch.zeros(1, 1, 8)} if encoder.mask_token is None else {}
    state |= {f"parameter/model.head.{leaf}": torch.ones(3) for leaf in ("weight", "bias")}
    save_file(state, path)
    return encoder


@pytest.mark.parametrize(
    ("name", "backbone"), [("vit", {}), ("vit", BEIT), ("convvit", {}), ("swin", {})], ids=["vit", "beit", "c", "swin"]
)
def test_a_pre_training_gives_its_encoder(name: str, backbone: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    encoder = pre_trained(configuration(name, **backbone), path)
    step = build_segment_step(configuration(name, **backbone), CLASSES, initial=path)
    assert step.began_from == str(path)
    found, untrained = parameters(step), parameters(build_segment_step(configuration(name, **backbone), CLASSES))
    unused = ("norm.", "mask_token", "stage1_output", "stage2_output")
    for key, value in encoder.state_dict().items():
        if not key.startswith(unused):
            assert torch.equal(found[f"model.encoder.{key}"], value), key
    for key, value in untrained.items():
        if not key.startswith("model.encoder."):
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("backbone", [{"positions": "learned"}, BEIT | {"bias_tables": "per_block"}, BEIT])
def test_tables_of_another_size_are_interpolated_as_in_fine_tuning(backbone: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    pre_trained(configuration("vit", 64, **backbone), path)
    config = configuration("vit", 96, **backbone)
    objective = build_segmentation(config, CLASSES)
    load_encoder_part(objective, path)
    fine = FinetuneConfig(backbone=config.backbone)
    fine.data.image_size = [96, 96]
    classifier = classification_and_inputs(fine, CLASSES, 1)[0]
    load_classifier(classifier, path)
    for key, value in objective.model.encoder.state_dict().items():
        assert torch.equal(value, classifier.model.encoder.state_dict()[key]), key


def test_windows_begin_without_a_class_token_and_with_tables_of_zeros(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    pre_trained(configuration(), path)
    objective = build_segmentation(configuration(window=3), CLASSES)
    for name, parameter in objective.named_parameters():
        if "rel_pos" in name:
            parameter.data.fill_(1.0)
    assert load_encoder_part(objective, path) == str(path)
    names = dict(objective.model.encoder.named_parameters())
    assert "cls_token" not in names
    assert not any(parameter.any() for name, parameter in names.items() if "rel_pos" in name)


def test_the_encoder_of_another_segmentation_comes_with_its_relative_positions(tmp_path: Path) -> None:
    source = build_segment_step(configuration(size=64, window=3), CLASSES)
    source.forward_backward(batch([1, 2]), 0)
    source.update(0.1)
    path = tmp_path / "checkpoint"
    path.mkdir()
    source.engine.save(path, source.averages)()
    trained = parameters(source)
    larger = build_segment_step(configuration(size=96, window=3), CLASSES + 1, initial=path)
    assert larger.began_from == str(path)
    found = parameters(larger)
    windowed, whole = (f"model.encoder.blocks.{block}.attn.rel_pos_h" for block in (0, 3))
    assert torch.equal(found[windowed], trained[windowed])
    expected = F.interpolate(trained[whole].T[None], size=11, mode="linear")[0].T  # 6 rows of tokens in place of 4
    torch.testing.assert_close(found[whole], expected)
    plain = build_segment_step(configuration(size=64), CLASSES, initial=path)
    assert plain.began_from == f"{path}; cls_token as initialised; without its decomposed relative positions"


def test_flops_are_those_of_whole_attention_and_of_the_products_with_its_tables() -> None:
    """Wider heads, which add the biases on a device, are no model FLOPs."""
    counts = []
    for relative in ("none", "decomposed"):
        config = configuration(class_token=False)
        config.attention = replace(config.attention, relative_positions=relative)
        with torch.device("meta"):
            objective, inputs = segmentation_and_inputs(config, CLASSES, 1)
            counts.append(count_flops(objective, inputs.inputs))
    (h, w), width, depth = (4, 4), 32, 4
    forward = depth * 2 * h * w * (h + w) * width
    assert counts[1] - counts[0] == 3 * forward
    assert counts[0] > 3 * depth * h * w * (2 * 12 * width**2 + 4 * h * w * width)


@pytest.mark.parametrize(("name", "window"), [("vit", 3), ("swin", None)])
def test_the_static_form_has_the_shapes_of_a_step(name: str, window: int | None) -> None:
    config = configuration(name, window=window)
    with FakeTensorMode():
        objective, inputs = segmentation_and_inputs(config, CLASSES, 2)
        with torch.autocast("cpu", torch.bfloat16):
            losses = objective(*inputs.inputs)
            losses.total.backward()
        assert all(each.grad is not None for each in objective.parameters())
    step = build_segment_step(config, CLASSES)
    real = step.prepare(batch([1, 2]), 0)
    for one, other in zip(inputs, real, strict=True):
        assert one is not None
        assert other is not None
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    shapes = {key: value.shape for key, value in objective.state_dict().items()}
    assert shapes == {key: value.shape for key, value in step.engine.objective.state_dict().items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test.mode": "whole"}, r"test\.mode=whole .* backbone\.positions=relative .* set test\.mode=slide"),
        ({"attention.window": 3}, r"relative positions of one grid takes no windows"),
        ({"head.num_classes": 2}, r"head\.num_classes=2 is less than the 4 of the data; set it to null"),
        ({"engine.cuda_graphs": True}, r"engine\.cuda_graphs=true is not available in dmjd segment"),
        ({"data.image_size": [64, 72]}, r"data\.image_size 64x72 is not divisible by backbone\.patch_size=16"),
        ({"head.maps": [0, 1, 2]}, r"head\.maps must be 4 blocks in ascending order, the last of them 3"),
    ],
)
def test_parts_that_do_not_fit_are_rejected_in_one_line(changes: dict[str, Any], message: str) -> None:
    config = configuration(**BEIT)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=message) as raised:
        build_segmentation(config, CLASSES)
    assert "\n" not in str(raised.value)
