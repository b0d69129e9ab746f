"""Batches for a benchmark: on the device already, uploaded from pinned memory, or read from shards of JPEG files."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import cycle
from pathlib import Path

import torch
from photographs import write_shards

from dmjd.config import FinetuneConfig, PretrainConfig
from dmjd.data.batch import Batch
from dmjd.data.build import fetch_ahead, training_batches, training_crop, training_source
from dmjd.data.loader import make_loader
from dmjd.parallel.world import World
from dmjd.train.data_pipeline import Uploader

INPUTS = ("device", "pinned", "shards")
DIFFERENT = 4
"""Synthetic batches in turn: one alone would sit in the L2 cache."""
CLASSES = 1000
"""Of synthetic labels."""


def batches(kind: str, config: PretrainConfig, world: World, micro: int, steps: int) -> Generator[Batch, None, None]:
    """``steps`` of them of ``kind``, or more, as the training loop is given them. Collective."""
    if kind == "shards":
        ranks = world.rank, world.size
        source = world.all_or_none(lambda: training_source(config.data))
        parts = training_batches(config.data, source, config.batch_size, config.seed, *ranks)
        ahead = fetch_ahead(source, config.batch_size, config.seed, *ranks, world.local_rank, world.local_size)
        yield from make_loader(parts, 0, steps, config.workers, world.device.type == "cuda", ahead=ahead)
        return
    pool = [synthetic(config, micro, micro * (world.rank + world.size * index)) for index in range(DIFFERENT)]
    if kind == "device":
        pool = [batch.to(world.device) for batch in pool]
    elif world.device.type == "cuda":
        pool = [batch.map(torch.Tensor.pin_memory) for batch in pool]
    yield from cycle(pool)


def uploader(kind: str, device: torch.device) -> Callable[[Batch], Batch]:
    """The function that copies batches of ``kind`` to the device."""
    return (lambda batch: batch) if kind == "device" else Uploader(device)


def synthetic(config: PretrainConfig | FinetuneConfig, images: int, first: int = 0) -> Batch:
    """Samples ``first`` to ``first + images - 1``, with the second crop where the target reads one. Smooth noise: a
    model can learn from it, and HOG of white noise would be the same everywhere."""
    coarse = torch.rand(images, config.data.channels, 14, 14, generator=torch.Generator().manual_seed(first))
    crops = [
        (255 * torch.nn.functional.interpolate(coarse, size, mode="bilinear")).byte().permute(0, 2, 3, 1).contiguous()
        for size in training_crop(config.data).sizes
    ]
    ids = first + torch.arange(images)
    return Batch(crops[0], ids, ids % CLASSES, *crops[1:])


def provide_shards(folder: Path, images: int, world: World) -> None:
    """Where there is no ``folder`` yet, make it shards of so many photographs. Collective."""
    world.on_main(lambda: None if folder.exists() else write_shards(folder, images))
