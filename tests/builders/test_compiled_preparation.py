"""A preparation as one graph of torch.compile gives what it gives in eager mode, with one graph for all epochs."""

from __future__ import annotations

from functools import partial
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
from dmjd.targets import TARGETS, PixelTarget, TeacherTarget

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are compiled, by a backend that is fast to compile."""
    found: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    compiled = partial(torch.compile, backend=backend)
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", compiled)
    for module in (preparation, mixing):  # not that of earlier tests, which is kept
        monkeypatch.setattr(module, "one_graph", partial(compiled, fullgraph=True, dynamic=False))
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


def a_teacher() -> TeacherTarget:
    encoder = ViTEncoder(image_size=(16, 16), patch_size=4, in_chans=3, embed_dim=16, depth=3, num_heads=2)
    shards = {ENCODER + name: torch.nn.init.normal_(value) for name, value in encoder.named_parameters()}
    return TeacherTarget(16, 4, MEAN, STD, teacher=EmaTeacher(encoder, Ema(shards, 0.5, ENCODER), layers=2))


def test_a_teacher_of_compiled_modules_gives_its_targets(graphs: list[Any]) -> None:
    torch.manual_seed(0)
    target = a_teacher()
    batch = images(2, 16, 16, 3)
    expected = target(batch)
    modules = TARGETS["teacher"].blocks
    assert modules is not None
    for module in modules(target):
        module.forward = torch.compile(module.forward, dynamic=False)
    for _ in range(2):
        torch.testing.assert_close(target(batch), expected)
    assert len(graphs) == 2, "blocks of one shape share a graph; the rest of the target is one more"
