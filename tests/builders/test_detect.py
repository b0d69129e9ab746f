"""A step of detection from its configuration: layers, draws, static form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dmjd.builders.detect import build_detect_step, build_detection, detection_and_inputs
from dmjd.config import DetectConfig
from dmjd.data.batch import Batch
from dmjd.errors import ConfigError
from dmjd.models.flops import count_flops
from dmjd.parallel.memory import trace_step

CLASSES = 3


def configuration(backbone: str = "vit") -> DetectConfig:
    config = DetectConfig(batch_size=2)
    config.engine.device = "cpu"
    config.data.image_size = [64, 64]
    config.optim.layer_decay = 0.5
    config.head = replace(
        config.head, channels=16, box_convs=1, box_width=32, mask_convs=1, proposals_before=80, proposals=40, samples=32
    )
    shape = config.backbone
    shape.name, shape.embed_dim, shape.depth, shape.num_heads, shape.patch_size = backbone, 32, 4, 2, 8
    shape.class_token, shape.drop_path = False, 0.1
    if backbone == "convvit":
        shape.patch_size = 16
        shape.conv_stages.embed_dims, shape.conv_stages.depths = [16, 24], [1, 1]
    elif backbone == "swin":
        shape.patch_size, shape.embed_dim, shape.masked_tokens, shape.positions = 32, 64, "mask_token", "sincos"
        shape.windows.depths, shape.windows.num_heads, shape.windows.size = [1, 1, 1, 1], [1, 1, 2, 2], 4
    else:
        config.attention = replace(config.attention, window=3, relative_positions="decomposed")
    return config


def batch(sample_ids: list[int]) -> Batch:
    """Images with two objects each, but the last one of several has none."""
    boxes = torch.tensor([[8.0, 8, 40, 40], [20, 24, 60, 62]])
    masks = torch.zeros(2, 64, 8, dtype=torch.uint8)
    masks[0, 8:40, 1:5], masks[1, 24:62, 2:7] = 255, 255
    images = torch.stack([torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8) for _ in sample_ids])
    labels = torch.tensor([[0, 2]] * (len(sample_ids) - 1) + [[-1, -1]])
    return Batch(
        images,
        torch.tensor(sample_ids),
        labels,
        boxes=boxes.expand(len(sample_ids), 2, 4).clone(),
        masks=masks.expand(len(sample_ids), 2, 64, 8).clone(),
    )


@pytest.mark.parametrize("backbone", ["vit", "convvit", "swin"])
def test_a_step_moves_every_parameter_and_repeats_itself_bit_for_bit(backbone: str) -> None:
    config, data = configuration(backbone), batch([5, 9])
    weights = []
    for _ in range(2):
        step = build_detect_step(config, CLASSES)
        before = {name: value.clone() for name, value in step.engine.full_state_dict().items()}
        losses = step.forward_backward(data, 1)
        parts = [value for name, value in losses.items() if name != "loss"]
        assert len(parts) == 5
        assert torch.allclose(losses["loss"], torch.stack(parts).sum())
        # Zero-initialised tables and such get gradients as well: a parameter without one would stop DDP.
        assert all(each.grad is not None for each in step.engine.objective.parameters())
        assert step.update(1e-2).applied == 1
        weights.append(step.engine.full_state_dict())
        assert all(not torch.equal(value, before[name]) for name, value in weights[-1].items())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_learning_rates_decay_through_the_blocks_and_not_through_the_heads() -> None:
    config = configuration()
    scales = build_detect_step(config, CLASSES).engine.objective.lr_scales
    for name, scale in scales.items():
        if name.startswith("model.encoder.blocks."):
            assert scale == 0.5 ** (4 - int(name.split(".")[3])), name
        elif name.startswith("model.encoder."):
            assert scale == 0.5**5, name
        else:
            assert scale == 1, name
    assert {name.split(".")[1] for name in scales} == {
        "encoder", "pyramid", "rpn", "box_head", "box_class", "box_deltas", "mask_head", "mask_logits"
    }  # fmt: skip


def test_detections_are_in_their_images_and_do_not_depend_on_the_batch() -> None:
    step = build_detect_step(configuration(), CLASSES)
    images, sizes = batch([1, 2, 3]).images, torch.tensor([[64, 64], [40, 64], [64, 24]])
    found = step.detect(images, sizes)
    for each, (height, width) in zip(found, sizes.tolist(), strict=True):
        assert len(each["boxes"]) == len(each["scores"]) == len(each["labels"]) == len(each["masks"]) > 0
        assert each["boxes"][:, 0::2].max() <= width
        assert each["boxes"][:, 1::2].max() <= height
        assert each["boxes"].min() >= 0
        assert (each["scores"] > 0.05).all()
        assert (each["scores"].diff() <= 0).all()
        assert each["masks"].shape[1:] == (28, 28)
        assert set(each["labels"].tolist()) <= set(range(CLASSES))
    alone = [step.detect(images[i : i + 1], sizes[i : i + 1])[0] for i in range(3)]
    for one, other in zip(found, alone, strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-4) for name in one)


def test_flops_of_the_heads_are_those_of_their_layers() -> None:
    config = configuration("convvit")
    counts = []
    for samples in (32, 64):
        config.head.samples = samples
        with torch.device("meta"):
            objective, prepared = detection_and_inputs(config, CLASSES, 1)
            counts.append(count_flops(objective, prepared.inputs))
    # 32 more proposals in the box head and 8 more in the mask head, forward and backward.
    box = 32 * 49 * 16 * 16 * 9 + 32 * 16 * 49 * 32 + 32 * 32 * (4 * CLASSES + CLASSES + 1)
    mask = 8 * (196 * 16 * 16 * 9 + 196 * 16 * 16 * 4 + 784 * 16 * CLASSES)
    assert counts[1] - counts[0] == 3 * 2 * (box + mask)


def test_the_static_form_takes_the_memory_of_a_step() -> None:
    config = configuration()
    step = build_detect_step(config, CLASSES)
    objective = step.engine.objective
    real = trace_step(objective, step.prepare(batch([5, 9]), 0).inputs)
    with FakeTensorMode():
        static, prepared = detection_and_inputs(config, CLASSES, 2)
        assert trace_step(static, prepared.inputs) == real
    assert {n: p.shape for n, p in static.named_parameters()} == {n: p.shape for n, p in objective.named_parameters()}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("head.num_classes", 2, "head.num_classes=2 is less than the 3 of the data"),
        ("head.pyramid", "fpn", "pyramid=fpn needs a backbone with stages, and a ViT has none; use pyramid=simple"),
        ("data.image_size", [64, 60], "64x60 is not divisible by backbone.patch_size=8"),
        ("data.image_size", [8, 64], "data.image_size=8x64 is too small"),
        ("engine.cuda_graphs", True, "engine.cuda_graphs=true is not available in dmjd detect"),
        ("attention.global_blocks", [4], "must be in 0..3"),
    ],
)
def test_parts_that_do_not_fit_are_an_error(key: str, value: object, message: str) -> None:
    config = configuration()
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError) as error:
        build_detection(config, CLASSES)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
