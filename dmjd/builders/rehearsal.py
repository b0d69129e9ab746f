"""One step of a configuration without data and without a device, for whoever counts what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dmjd.builders import build_objective, check_target, image_size, target_dim, token_grid
from dmjd.builders.preparation import Prepared
from dmjd.builders.step import build_preparation
from dmjd.config import PretrainConfig
from dmjd.data.batch import Batch
from dmjd.models.flops import count_flops
from dmjd.models.objective import Objective
from dmjd.targets import TARGETS


def rehearse(config: PretrainConfig, images: int) -> tuple[Objective, Prepared]:
    """The objective, not transformed, and what it is given for ``images`` black images.

    They are made on the current default device and by the current mode: on "meta", or under FakeTensorMode, they have
    shapes and no bytes. The states of the random generators stay as they are.
    """
    check_target(config)
    grid = token_grid(config)
    dim = target_dim(config)
    tokenizer = _Blank(dim, TARGETS[config.target.name].codes, config.backbone.patch_size, grid[0] * grid[1])
    objective = _objective(config, dim)
    data = config.data
    prepare = build_preparation(config, tokenizer, len(objective.model.encoder.blocks))
    prepare = replace(prepare, jitter=0.0)  # it reads a table, which a fake mode does not take, and changes no shape
    ids = torch.arange(images)
    pixels = torch.zeros((images, *image_size(config), data.channels), dtype=torch.uint8)
    return objective, prepare(Batch(pixels, ids, ids), 0)


def flops_per_image(config: PretrainConfig) -> int:
    """Model FLOPs of one image with all its views, forward and backward; nothing is computed."""
    with torch.device("meta"):
        objective, prepared = rehearse(config, 1)
        return count_flops(objective, prepared.inputs)


def _objective(config: PretrainConfig, dim: int) -> Objective:
    """Under FakeTensorMode it is made on "meta" first: some initialisations, and timm's Swin, read numbers."""
    with _generators_kept(), unset_fake_temporarily() as fake, torch.device("meta") if fake else nullcontext():
        objective = build_objective(config, dim)
    return objective._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype)) if fake else objective


@dataclass(frozen=True)
class _Blank:
    """Targets in their shape. A frozen network or a teacher that makes them need not be there, and is not counted."""

    dim: int
    codes: bool
    patch: int
    tokens: int

    def __call__(self, images: Tensor) -> Tensor:
        kind = torch.int64 if self.codes else torch.float32
        return torch.zeros(images.shape[0], self.tokens, 1 if self.codes else self.dim, dtype=kind)

    def render(self, values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        raise AssertionError("nobody looks at a rehearsal")


@contextmanager
def _generators_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
