from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from dmjd.builders.preparation import Preparation
from dmjd.config import DataConfig
from dmjd.data.build import training_batches
from dmjd.data.crops import RandomResizedCrop
from dmjd.data.dataset import ArrayDataset, InMemory
from dmjd.masking import MaskSpec
from dmjd.ops import make_key
from dmjd.ops.images import horizontal_flip

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 60, 50, 3), dtype=np.uint8)
DATA = ArrayDataset(PIXELS, np.zeros(4, np.int64), 1, "noise")
CONFIG = DataConfig(image_size=[32, 32], second_size=[16, 16], interpolation="bilinear")


def test_the_second_crop_is_the_same_box_by_lanczos() -> None:
    batch = training_batches(CONFIG, DATA, batch_size=4, seed=3)[1]
    crop = RandomResizedCrop((32, 32), interpolation="bilinear")
    draws = crop.draw(batch.sample_ids, make_key(3, 1))
    for row, index in enumerate(batch.sample_ids.tolist()):
        top, left, height, width = box = draws.box(row, 60, 50)
        image = Image.fromarray(PIXELS[index, top : top + height, left : left + width])
        expected = np.asarray(image.resize((16, 16), Image.Resampling.LANCZOS))
        np.testing.assert_array_equal(batch.second[row].numpy(), expected)
        (first,) = crop.cut(InMemory(PIXELS[index]), box)
        assert torch.equal(batch.images[row], first)
        (bicubic,) = RandomResizedCrop((32, 32)).cut(InMemory(PIXELS[index]), box)
        assert not torch.equal(first, bicubic)


def test_micro_batches_share_it_out_and_none_is_empty() -> None:
    batch = training_batches(CONFIG, DATA, batch_size=4, seed=3)[0]
    assert torch.equal(torch.cat([part.second for part in batch.split(2)]), batch.second)
    plain = training_batches(DataConfig(image_size=[32, 32]), DATA, batch_size=4, seed=3)[0]
    assert plain.second.numel() == 0
    assert [len(part.images) for part in plain.split(2)] == [2, 2]


class Read:
    """A target that tells what it was given."""

    dim, patch, codes = 1, 2, False
    given: torch.Tensor

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.given = images
        return torch.zeros(len(images), 64, 1)

    def render(self, values: torch.Tensor, grid: tuple[int, int]) -> np.ndarray:
        raise AssertionError


def test_flip_and_colours_of_both_crops_agree() -> None:
    read = Read()
    spec = MaskSpec(views=1, mask_ratio=0.5, pattern="uniform")
    batch = training_batches(CONFIG, DATA, batch_size=4, seed=3)[0]

    def prepared(flip: bool, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
        prepare = Preparation(spec, (8, 8), read, (0.5,) * 3, (0.2,) * 3, flip=flip, seed=1, jitter=jitter)
        return prepare(batch, epoch=0).crops, read.given

    crops, second = prepared(flip=True, jitter=0.0)
    flipped = (crops != batch.images).flatten(1).any(1)
    assert 0 < int(flipped.sum()) < 4
    assert torch.equal(second, horizontal_flip(batch.second, flipped))
    crops, second = prepared(flip=False, jitter=0.4)
    pairs = ((crops, batch.images), (second, batch.second))
    ratio = [new.float().mean((1, 2, 3)) / old.float().mean((1, 2, 3)) for new, old in pairs]
    torch.testing.assert_close(ratio[0], ratio[1], atol=0.03, rtol=0)
    assert (ratio[0] - 1).abs().max() > 0.1
    again, _ = prepared(flip=False, jitter=0.4)
    assert torch.equal(again, crops)
