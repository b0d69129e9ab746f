"""A preparation as one graph of torch.compile gives what it gives in eager mode, with one graph for all epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dmjd.builders import mixing, preparation
from dmjd.builders.average import ENCODER, Ema, EmaTeacher
from dmjd.builders.mixing import Mixing
from dmjd.builders.preparation import Preparation
from dmjd.config import AugmentConfig, DataConfig
from dmjd.data.batch import Batch
from dmjd.masking import MaskSpec
from dmjd.models.vit import ViTEncoder
from dmjd.targets import PixelTarget

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are compiled, by a backend that is fast to compile."""
    found: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    def one_graph(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    torch.compiler.reset()
    monkeypatch.setattr(preparation, "one_graph", one_graph)
    monkeypatch.setattr(mixing, "one_graph", one_graph)
    return found


def images(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.mark.parametrize("second", [False, True])
def test_crops_images_and_targets_are_those_of_eager_mode(second: bool, graphs: list[Any]) -> None:
    batch = Batch(images(4, 16, 16, 3), torch.arange(4), torch.full((4,), -1), *([images(4, 8, 8, 3)] * second))
    target = PixelTarget(2 if second else 4, 3, MEAN, STD, norm="patch")
    eager, compiled = (
        Preparation(MaskSpec(), (4, 4), target, MEAN, STD, True, 0, jitter=0.4, compiled=on, compiled_target=on)
        for on in (False, True)
    )
    for epoch in (3, 4):
        expected, found = eager(batch, epoch), compiled(batch, epoch)
        torch.testing.assert_close(found.crops, expected.crops, rtol=0, atol=0)
        torch.testing.assert_close(found.images, expected.images)
        torch.testing.assert_close(found.targets, expected.targets)
    assert len(graphs) == 2


def test_mixed_images_are_those_of_eager_mode(graphs: list[Any]) -> None:
    batch = Batch(images(8, 16, 16, 3), torch.arange(8), torch.arange(8) % 3)
    data = DataConfig(channels=3, mean=list(MEAN), std=list(STD), jitter=0.3)
    augment = AugmentConfig(erase_prob=0.5)
    for epoch in (3, 4):
        expected, found = (Mixing(augment, data, 3, 0, compiled)(batch, epoch) for compiled in (False, True))
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
    assert len(graphs) == 1


def test_a_teacher_of_compiled_blocks_gives_their_outputs() -> None:
    encoder = ViTEncoder(image_size=(16, 16), patch_size=4, in_chans=3, embed_dim=16, depth=3, num_heads=2)
    shards = {ENCODER + name: torch.nn.init.normal_(value) for name, value in encoder.named_parameters()}
    teacher = EmaTeacher(encoder, Ema(shards, 0.5, ENCODER), layers=2)
    inputs = torch.randn(2, 3, 16, 16)
    expected = teacher(inputs)
    for block in teacher.blocks:
        block.forward = torch.compile(block.forward, backend="eager", dynamic=False)
    for found, value in zip(teacher(inputs), expected, strict=True):
        torch.testing.assert_close(found, value)
