"""From a uint8 batch to what the objective takes, on the device and without a host sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dmjd.data.batch import Batch
from dmjd.masking import MaskedViews, MaskSpec
from dmjd.ops import Domain, keyed_bits, make_key
from dmjd.ops.images import horizontal_flip, normalise
from dmjd.targets import Tokenizer
from dmjd.train.drop_path import draw_branch_scales


def flip_by_coin(batch: Batch, key: Tensor) -> Tensor:
    """The batch's crops, each flipped with probability 1/2 as a pure function of ``key`` and its sample id."""
    coin = keyed_bits(batch.sample_ids, 1, key=key, domain=Domain.FLIP).squeeze(1) & 1
    return horizontal_flip(batch.images, coin.bool())


class Prepared(NamedTuple):
    """crops: uint8 ``[B, H, W, C]`` after the flip. The rest is what the objective takes, in its order: images float
    ``[B, C, H, W]``, views, targets ``[B, N, dim]``, and the scales of stochastic depth or None."""

    crops: Tensor
    images: Tensor
    masked_views: MaskedViews
    targets: Tensor
    branch_scales: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, MaskedViews, Tensor, Tensor | None]:
        """The objective's arguments."""
        return self.images, self.masked_views, self.targets, self.branch_scales


@dataclass(frozen=True)
class Preparation:
    """Flip, masks, targets, normalisation: a pure function of (seed, epoch, batch).

    Targets are made from the crop in 0..255, which HOG is defined on; normalisation comes last. ``depth`` is the
    encoder's, for ``drop_path``.
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

    def __call__(self, batch: Batch, epoch: int) -> Prepared:
        key = make_key(self.seed, epoch)
        crops = flip_by_coin(batch, key) if self.flip else batch.images
        masked_views = self.mask_spec.draw(batch.sample_ids, self.grid, seed=self.seed, epoch=epoch)
        targets = self.tokenizer(crops)
        scales = None
        if self.drop_path:
            views = self.mask_spec.views
            scales = draw_branch_scales(batch.sample_ids, key, views=views, depth=self.depth, rate=self.drop_path)
        return Prepared(crops, normalise(crops, self.mean, self.std), masked_views, targets, scales)
