"""From a uint8 batch to the inputs of the objective, on the device and without a host sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dmjd.builders.augment import flip_by_coin, jitter_colours
from dmjd.data.batch import Batch
from dmjd.masking import MaskedViews, MaskSpec
from dmjd.ops import Domain, keyed_uniform, make_key
from dmjd.ops.images import normalise
from dmjd.targets import Tokenizer

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Prepared(NamedTuple):
    """Inputs of the objective, and the crops that they are made of.

    crops: uint8 ``[B, H, W, C]`` after flip and jitter.
    images: float32 ``[B, C, H, W]``, normalised.
    targets: float32 ``[B, N, dim]``, or codes, int64 ``[B, N, 1]``.
    branch_scales: of :func:`draw_branch_scales`; None without drop path.
    """

    crops: Tensor
    images: Tensor
    masked_views: MaskedViews
    targets: Tensor
    branch_scales: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, MaskedViews, Tensor, Tensor | None]:
        """Arguments of the objective, in order."""
        return self.images, self.masked_views, self.targets, self.branch_scales


@dataclass(frozen=True)
class Preparation:
    """Flip, jitter, masks, targets, normalisation: a pure function of (seed, epoch, batch).

    Targets are made from the crop in 0..255, which HOG is defined on, or from the second crop if the batch has one.

    depth: blocks of the encoder. drop_path: rate of the last block. jitter: strength of colour jitter.
    compiled: run flip, jitter and normalisation as one graph of torch.compile, since in eager mode each is several
        passes over the images. compiled_target: likewise the target.
    """

    mask_spec: MaskSpec
    grid: tuple[int, int]
    tokenizer: Tokenizer
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    seed: int
    depth: int = 0
    drop_path: float = 0.0
    jitter: float = 0.0
    compiled: bool = False
    compiled_target: bool = False

    def __call__(self, batch: Batch, epoch: int) -> Prepared:
        key = make_key(self.seed, epoch)
        augment = one_graph(_augmented) if self.compiled else _augmented
        crops, read, images = augment(self, batch.images, batch.second, batch.sample_ids, key)
        masked_views = self.mask_spec.draw(batch.sample_ids, self.grid, seed=self.seed, epoch=epoch)
        targets = (one_graph(_targets) if self.compiled_target else _targets)(self.tokenizer, read)
        scales = None
        if self.drop_path:
            views = self.mask_spec.views
            scales = draw_branch_scales(batch.sample_ids, key, views=views, depth=self.depth, rate=self.drop_path)
        return Prepared(crops, images, masked_views, targets, scales)

    def augment(self, images: Tensor, sample_ids: Tensor, key: Tensor) -> Tensor:
        """uint8 ``[B, H, W, C]``, flipped and jittered."""
        if self.flip:
            images = flip_by_coin(images, sample_ids, key)
        return jitter_colours(images, sample_ids, key, self.jitter) if self.jitter else images


@cache
def one_graph(function: _Function) -> _Function:
    """``function`` under torch.compile, as one graph per shape of its tensors."""
    compiled: _Function = torch.compile(function, fullgraph=True, dynamic=False)  # type: ignore[assignment]
    return compiled


def _augmented(
    prepare: Preparation, images: Tensor, second: Tensor, sample_ids: Tensor, key: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Crops, the crops that the target reads, and the normalised crops."""
    crops = prepare.augment(images, sample_ids, key)
    read = prepare.augment(second, sample_ids, key) if second.numel() else crops
    return crops, read, normalise(crops, prepare.mean, prepare.std)


def _targets(tokenizer: Tokenizer, images: Tensor) -> Tensor:
    return tokenizer(images)


def draw_dropout(sample_ids: Tensor, key: Tensor, *, width: int, rate: float) -> Tensor:
    """Dropout: factors of the features of images, 0 if dropped and ``1 / (1 - rate)`` if kept, float32 ``[B, width]``.

    Args:
        sample_ids, key: as for :func:`draw_branch_scales`.
    """
    draws = keyed_uniform(sample_ids, width, key=key, domain=Domain.DROP_PATH, lane=_DROPOUT)
    return ((draws >= rate) / (1 - rate)).float()


_DROPOUT = 1 << 16
"""Lane of ``Domain.DROP_PATH`` for dropout; drop path uses a lane per view."""


def draw_branch_scales(sample_ids: Tensor, key: Tensor, *, views: int, depth: int, rate: float) -> Tensor:
    """Drop path: scales of each block's attention and MLP branch, 0 if dropped and ``1 / (1 - p)`` if kept.

    Args:
        sample_ids: int64 ``[B]``.
        key: from :func:`dmjd.ops.make_key`.
        rate: p of the last block; p grows linearly from 0 at the first (Huang et al. 2016), as in timm.

    Returns:
        float32 ``[depth, 2, views * B]``, view-major.
    """
    rates = torch.linspace(0, rate, depth, device=sample_ids.device).repeat_interleave(2)
    draws = [keyed_uniform(sample_ids, 2 * depth, key=key, domain=Domain.DROP_PATH, lane=view) for view in range(views)]
    scales = (torch.cat(draws) >= rates) / (1 - rates)
    return scales.float().T.unflatten(0, (depth, 2)).contiguous()
