"""From a uint8 batch to what the objective takes, on the device and without a host sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from dmjd.data.batch import Batch
from dmjd.data.colour import ORDERS, colour_jitter
from dmjd.masking import MaskedViews, MaskSpec
from dmjd.ops import Domain, keyed_bits, keyed_uniform, make_key
from dmjd.ops.images import horizontal_flip, normalise
from dmjd.targets import Tokenizer
from dmjd.train.drop_path import draw_branch_scales

_COLOURS = 1
"""The lane of flips' domain that holds colours: both change how a sample looks, and no word serves twice."""


def flip_by_coin(images: Tensor, sample_ids: Tensor, key: Tensor) -> Tensor:
    """uint8 ``[B, H, W, C]``, each flipped with probability 1/2 as a pure function of ``key`` and its sample id."""
    coin = keyed_bits(sample_ids, 1, key=key, domain=Domain.FLIP).squeeze(1) & 1
    return horizontal_flip(images, coin.bool())


def jitter_colours(images: Tensor, sample_ids: Tensor, key: Tensor, strength: float) -> Tensor:
    """uint8 ``[B, H, W, 3]`` with factors uniform in 1 +- ``strength``, a pure function as :func:`flip_by_coin` is.

    BEiT does this to the whole image before cropping, which only the mean grey of a change of contrast can tell.
    """
    uniform = keyed_uniform(sample_ids, 4, key=key, domain=Domain.FLIP, lane=_COLOURS)
    order = (uniform[:, 3] * len(ORDERS)).long()
    return colour_jitter(images, 1 + strength * (2 * uniform[:, :3] - 1), order)


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
    """Flip, colours, masks, targets, normalisation: a pure function of (seed, epoch, batch).

    Targets are made from the crop in 0..255, which HOG is defined on, or from its second size where the batch has one;
    normalisation comes last. ``depth`` is the encoder's, for ``drop_path``.
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

    def __call__(self, batch: Batch, epoch: int) -> Prepared:
        key = make_key(self.seed, epoch)
        crops = self._augment(batch.images, batch.sample_ids, key)
        read = crops if not batch.second.numel() else self._augment(batch.second, batch.sample_ids, key)
        masked_views = self.mask_spec.draw(batch.sample_ids, self.grid, seed=self.seed, epoch=epoch)
        targets = self.tokenizer(read)
        scales = None
        if self.drop_path:
            views = self.mask_spec.views
            scales = draw_branch_scales(batch.sample_ids, key, views=views, depth=self.depth, rate=self.drop_path)
        return Prepared(crops, normalise(crops, self.mean, self.std), masked_views, targets, scales)

    def _augment(self, images: Tensor, sample_ids: Tensor, key: Tensor) -> Tensor:
        if self.flip:
            images = flip_by_coin(images, sample_ids, key)
        return jitter_colours(images, sample_ids, key, self.jitter) if self.jitter else images
