from __future__ import annotations

from itertools import permutations

import torch
from torchvision.transforms.v2 import functional as F

from dmjd.builders.augment import ORDERS, colour_jitter


def test_jitter_is_torchvisions_image_by_image() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 20, 24, 3), dtype=torch.uint8, generator=generator)
    factors = 0.6 + 0.8 * torch.rand(6, 3, generator=generator)
    changes = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation)
    result = colour_jitter(images, factors, torch.arange(ORDERS))
    for image, own, order, ours in zip(images, factors.tolist(), permutations(range(3)), result, strict=True):
        expected = image.permute(2, 0, 1)
        for which in order:
            expected = changes[which](expected, own[which])
        difference = (expected.permute(1, 2, 0).int() - ours.int()).abs()
        assert difference.max() <= 1, "one unit where two roundings of a product meet"
        assert difference.float().mean() < 0.01


def test_factors_of_one_change_nothing() -> None:
    images = torch.randint(0, 256, (6, 8, 8, 3), dtype=torch.uint8)
    assert torch.equal(colour_jitter(images, torch.ones(6, 3), torch.arange(6)), images)
