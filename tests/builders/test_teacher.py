from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dmjd.builders.average import ENCODER, Ema, EmaTeacher
from dmjd.models.vit import ViTEncoder
from dmjd.ops.images import normalise
from dmjd.targets import TeacherTarget

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


def make() -> ViTEncoder:
    torch.manual_seed(0)
    encoder = ViTEncoder(image_size=(16, 16), patch_size=4, in_chans=3, embed_dim=16, depth=3, num_heads=2)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.3)
    return encoder


def shards(encoder: ViTEncoder) -> dict[str, torch.Tensor]:
    return {ENCODER + name: parameter.detach() for name, parameter in encoder.named_parameters()}


def expected(encoder: ViTEncoder, images: torch.Tensor, layers: int) -> torch.Tensor:
    """data2vec's target, block by block."""
    with torch.no_grad():
        assert encoder.cls_token is not None
        x = encoder.patch_embed(normalise(images, MEAN, STD)) + encoder.positions
        x = torch.cat((encoder.cls_token.expand(len(x), -1, -1), x), 1)
        total = torch.zeros(())
        for index, block in enumerate(encoder.blocks):
            x = block(x)
            if index >= 3 - layers:
                total = total + F.layer_norm(x[:, 1:], (16,))
        return F.layer_norm(total / layers, (16,))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_target_is_that_of_the_average_and_follows_it(layers: int) -> None:
    student = make()
    ema = Ema(shards(student), 0.5, ENCODER)
    target = TeacherTarget(16, 4, MEAN, STD, teacher=EmaTeacher(student, ema, layers))
    images = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    before = target(images)
    torch.testing.assert_close(before, expected(student, images, layers))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(-0.5)
    assert torch.equal(target(images), before), "the teacher is not the student"
    ema.update(torch.ones(()))
    average = make()
    average.load_state_dict({name.removeprefix(ENCODER): value for name, value in ema.averages.items()})
    torch.testing.assert_close(target(images), expected(average, images, layers))
    saved = make().state_dict()
    for name, value in saved.items():  # as a resumed run does
        ema.averages[ENCODER + name].copy_(value)
    average.load_state_dict(saved)
    torch.testing.assert_close(target(images), expected(average, images, layers))


def test_the_teacher_adds_no_parameters_and_no_gradient() -> None:
    student = make()
    ema = Ema(shards(student), 0.9, ENCODER)
    teacher = EmaTeacher(student, ema, 1)
    (output,) = teacher(torch.randn(1, 3, 16, 16, requires_grad=True))
    assert output.shape == (1, 16, 16)
    assert not output.requires_grad
    own = {id(value.untyped_storage()): value.data_ptr() for value in ema.averages.values()}
    pointers = {parameter.data_ptr() for parameter in teacher._encoder.parameters()}
    assert pointers == set(own.values()), "the teacher's memory is the average's"
