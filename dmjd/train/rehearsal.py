"""One step of a configuration without data and without a device, for whoever counts what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.models.objective import Objective
from dmjd.train.build import build_mask_spec, build_objective, build_tokenizer, image_size, token_grid
from dmjd.train.preparation import Preparation, Prepared


def rehearse(config: PretrainConfig, images: int) -> tuple[Objective, Prepared]:
    """The objective, not transformed, and what it is given for ``images`` black images.

    They are made on the current default device and by the current mode: on "meta", or under FakeTensorMode, they have
    shapes and no bytes. The states of the random generators stay as they are.
    """
    grid = token_grid(config)
    spec, tokenizer = build_mask_spec(config.mask, grid), build_tokenizer(config)
    with _generators_kept():
        objective = build_objective(config, tokenizer.dim)
    data = config.data
    prepare = Preparation(
        spec,
        grid,
        tokenizer,
        tuple(data.mean),
        tuple(data.std),
        flip=data.flip,
        seed=config.seed,
        depth=len(objective.model.encoder.blocks),
        drop_path=config.backbone.drop_path,
    )
    ids = torch.arange(images)
    pixels = torch.zeros((images, *image_size(config), data.channels), dtype=torch.uint8)
    return objective, prepare(Batch(pixels, ids, ids), 0)


@contextmanager
def _generators_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
