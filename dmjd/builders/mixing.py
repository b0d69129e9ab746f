"""Augmentation of a batch of fine-tuning on its device, without a host sync: random erasing, mixup, cutmix, smoothing.

All draws are pure functions of (seed, epoch, sample id). Those of a pair have the id of its first image. They use the
domains of masks, which fine-tuning does not draw: ``MASK`` for mixing, ``RECTANGLE`` for erasing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dmjd.builders.augment import flip_by_coin, jitter_colours
from dmjd.builders.preparation import one_graph
from dmjd.config import AugmentConfig, DataConfig, FinetuneConfig
from dmjd.data.augment import check_policy
from dmjd.data.batch import Batch
from dmjd.errors import ConfigError
from dmjd.ops import Domain, keyed_bits, keyed_uniform, make_key
from dmjd.ops.images import normalise

AREA, ASPECT, ATTEMPTS = (0.02, 1 / 3), (0.3, 1 / 0.3), 10
"""Random erasing: area of all rectangles of an image, as a fraction; height / width; attempts to fit one."""

_RECTANGLE = cast(Domain, int(Domain.RECTANGLE))
"""A plain integer, as in :mod:`dmjd.builders.augment`."""

_NOISE = 1
"""Lane of ``Domain.RECTANGLE`` for the noise; lane 0 draws the rectangles."""
_NOISE_IMAGES = 128
"""Images whose noise is drawn at once, which bounds its temporaries."""

LEAST_ALPHA = 0.001
"""Of mixup and cutmix; quantiles of a much smaller one overflow."""
_QUANTILES = 4096
_WORD_BITS = 33
"""The table begins below half of the least probability that a 32-bit word gives."""


def check_augment(config: FinetuneConfig, processes: int) -> None:
    """Raise ConfigError for a policy that is none, for an alpha near 0, and for pairs that micro-batches would cut."""
    augment, parts = config.augment, config.engine.grad_accum_steps * processes
    if augment.randaugment is not None:
        check_policy(augment.randaugment)
    for key, alpha in (("mixup", augment.mixup), ("cutmix", augment.cutmix)):
        if 0 < alpha < LEAST_ALPHA:
            raise ConfigError(f"augment.{key} must be 0, for none, or at least {LEAST_ALPHA:g}, got {alpha:g}")
    images = config.batch_size // parts
    if images % 2 and (augment.mixup or augment.cutmix):
        raise ConfigError(
            f"augment.mixup and cutmix mix pairs of images, and batch_size={config.batch_size} over {processes} "
            f"process(es) times engine.grad_accum_steps={config.engine.grad_accum_steps} gives micro-batches of "
            f"{images}; set a multiple of {2 * parts}, or augment.mixup=0 augment.cutmix=0"
        )


@dataclass(frozen=True)
class Mixing:
    """Flip, color jitter, normalisation, random erasing, mixup or cutmix of pairs, and smoothed targets, in this order.

    Images 2 i and 2 i + 1 of a batch are a pair, timm's mode "pair": each is mixed with the other, by one lambda. So
    results do not depend on the number of processes and micro-batches, each of which has whole pairs.
    """

    augment: AugmentConfig
    data: DataConfig
    num_classes: int
    seed: int
    compiled: bool = False
    """Whether images are one graph of torch.compile; in eager mode they take about thirty passes over memory."""

    def __call__(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor]:
        """Images and targets of ``batch``, whose labels are in ``range(num_classes)``.

        Returns:
            float32 ``[B, C, H, W]``, and float32 ``[B, num_classes]``, whose rows have the sum 1.
        """
        augment, ids, key = self.augment, batch.sample_ids, make_key(self.seed, epoch)
        targets = smoothed(batch.labels, self.num_classes, augment.smoothing)
        shares = None
        if augment.mixup or augment.cutmix:
            shares, share = draw_shares(ids, key, augment, batch.images.shape[1:3])
            targets = _blend(targets, share[:, None, None])
        images = one_graph(_images) if self.compiled else _images
        return images(self, batch.images, ids, key, shares), targets


def _images(mixing: Mixing, crops: Tensor, sample_ids: Tensor, key: Tensor, shares: Tensor | None) -> Tensor:
    """The images of ``mixing``, with ``shares`` of :func:`draw_shares`."""
    augment, data = mixing.augment, mixing.data
    if data.flip:
        crops = flip_by_coin(crops, sample_ids, key)
    if data.jitter:
        crops = jitter_colours(crops, sample_ids, key, data.jitter)
    images = normalise(crops, data.mean, data.std)
    if augment.erase_prob:
        images = erase(images, sample_ids, key, augment.erase_prob, augment.erase_count)
    return images if shares is None else _blend(images, shares[:, None, None])


def smoothed(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """``smoothing / num_classes`` everywhere, and ``1 - smoothing`` more at the label; float32 ``[B, num_classes]``."""
    off = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), off, device=labels.device)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + off)


def erase(images: Tensor, sample_ids: Tensor, key: Tensor, prob: float, count: int) -> Tensor:
    """Random erasing (Zhong et al. 2017) as timm's mode "pixel": standard normal noise in rectangles of an image.

    An image is erased with probability ``prob``, in 1 to ``count`` rectangles that share the area. A rectangle is the
    first of ten attempts that is smaller than the image; without one there is none.

    Args:
        images: normalised, float ``[B, C, H, W]``.

    Returns:
        A new tensor.
    """
    height, width = images.shape[-2:]
    uniform = keyed_uniform(sample_ids, 2 + count * (2 * ATTEMPTS + 2), key=key, domain=_RECTANGLE)
    number = 1 + (uniform[:, 1] * count).floor()
    place = uniform[:, 2:].unflatten(1, (count, 2 * ATTEMPTS + 2))
    share, shape, corner = place.split((ATTEMPTS, ATTEMPTS, 2), dim=2)
    low, high = map(math.log, ASPECT)
    area = (AREA[0] + share * (AREA[1] - AREA[0])) * height * width / number[:, None, None]
    aspect = (low + shape * (high - low)).exp()
    heights, widths = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
    fits = (heights < height) & (widths < width)
    first = fits.byte().argmax(2, keepdim=True)
    h, w, found = (each.gather(2, first).squeeze(2) for each in (heights, widths, fits))
    top, left = (corner[..., 0] * (height - h + 1)).floor(), (corner[..., 1] * (width - w + 1)).floor()
    rectangles = torch.arange(count, device=images.device) < number[:, None]
    found = found & rectangles & (uniform[:, :1] < prob)
    inside = (box_mask(top, top + h, left, left + w, (height, width)) & found[..., None, None]).any(1, keepdim=True)
    return torch.where(inside, pixel_noise(sample_ids, key, images), images)


def pixel_noise(sample_ids: Tensor, key: Tensor, like: Tensor) -> Tensor:
    """Standard normal numbers in the shape of ``like``; Box and Muller's two of each random word of 32 bits."""
    count = math.prod(like.shape[1:])
    halves = []
    for part in sample_ids.split(_NOISE_IMAGES):
        bits = keyed_bits(part, -(-count // 2), key=key, domain=_RECTANGLE, lane=_NOISE)
        first, second = (((half.float() + 0.5) / 65536) for half in (bits >> 16, bits & 0xFFFF))
        radius, angle = (-2 * first.log()).sqrt(), math.tau * second
        halves.append(torch.cat((radius * angle.cos(), radius * angle.sin()), dim=1)[:, :count])
    return torch.cat(halves).view_as(like).to(like.dtype)


def box_mask(top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, size: tuple[int, int]) -> Tensor:
    """Which pixels are in a box that ends before ``bottom`` and ``right``; bool ``[..., H, W]`` of ``[...]`` each."""
    rows, columns = (torch.arange(side, device=top.device) for side in size)
    inside_rows = (rows >= top[..., None]) & (rows < bottom[..., None])
    inside_columns = (columns >= left[..., None]) & (columns < right[..., None])
    return inside_rows[..., :, None] & inside_columns[..., None, :]


def draw_shares(sample_ids: Tensor, key: Tensor, augment: AugmentConfig, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw mixup (Zhang et al. 2018) or cutmix (Yun et al. 2019) of each pair, as in timm.

    Returns:
        The share of its own pixels that an image of ``size`` (H, W) keeps, the other's being the rest, float32
        ``[B / 2, H, W]``; and of its own target, float32 ``[B / 2]``.
    """
    height, width = size
    uniform = keyed_uniform(sample_ids[::2], 5, key=key, domain=Domain.MASK)
    mixed, switch, chance, u_row, u_column = uniform.unbind(1)
    lam, cut = _draw_lambda(augment, chance, switch)
    lam = torch.where(mixed < augment.mix_prob, lam, 1.0)
    ratio = (1 - lam).sqrt()
    top, bottom = _span(u_row, ratio, height)
    left, right = _span(u_column, ratio, width)
    lam = torch.where(cut, 1 - (bottom - top) * (right - left) / (height * width), lam)
    outside = ~box_mask(top, bottom, left, right, (height, width))
    return torch.where(cut[:, None, None], outside.to(lam.dtype), lam[:, None, None]).float(), lam.float()


def _blend(values: Tensor, own: Tensor) -> Tensor:
    """``own`` of each value and ``1 - own`` of the other of its pair; exact for 0 and 1."""
    pairs = values.unflatten(0, (-1, 2))
    return torch.lerp(pairs.flip(1), pairs, own).flatten(0, 1)


def _span(uniform: Tensor, ratio: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """First and end pixel of a side of cutmix's box: ``ratio`` of the image's around any pixel, cut at the border."""
    center, length = (uniform * side).floor(), (ratio * side).floor()
    return (center - (length / 2).floor()).clamp(min=0), (center + ((length + 1) / 2).floor()).clamp(max=side)


def _draw_lambda(augment: AugmentConfig, chance: Tensor, switch: Tensor) -> tuple[Tensor, Tensor]:
    """Lambda of Beta(alpha, alpha), float64, and whether it is cutmix's; ``[B / 2]`` each."""
    if not augment.mixup or not augment.cutmix:
        lam = beta_quantile(chance, augment.mixup or augment.cutmix)
        return lam, torch.full_like(switch, bool(augment.cutmix), dtype=torch.bool)
    cut = switch < augment.mix_switch_prob
    lam = torch.where(cut, beta_quantile(chance, augment.cutmix), beta_quantile(chance, augment.mixup))
    return lam, cut


def beta_quantile(probability: Tensor, alpha: float) -> Tensor:
    """Quantiles of Beta(alpha, alpha), whose error is below 1e-4 for alpha from 0.01 to 100.

    Args:
        probability: float64 in [0, 1).

    Returns:
        float64 in [0, 1], in the shape of ``probability``.
    """
    table = torch.from_numpy(_logits(alpha)).to(probability.device, non_blocking=True)
    tail = torch.minimum(probability, 1 - probability)
    position = (tail.log2().clamp(min=-_WORD_BITS) + _WORD_BITS) * (_QUANTILES / (_WORD_BITS - 1))
    cell = position.floor().clamp(max=_QUANTILES - 1)
    index, weight = cell.long(), position - cell
    logit = torch.lerp(table[index].double(), table[index + 1].double(), weight)
    return torch.where(probability < 0.5, logit, -logit).sigmoid()


@cache
def _logits(alpha: float) -> npt.NDArray[np.float32]:
    """Logits of the lower quantiles of Beta(alpha, alpha), ``[4097]``: of probabilities 2^-33 to 1/2, equally spaced in
    their logarithm, on which logits depend nearly linearly.

    The logit of a Beta variable has a density proportional to (s (1 - s))^alpha, s its sigmoid; the trapezoidal rule
    integrates it.
    """
    extent = 25 / alpha + 10 / math.sqrt(alpha)  # beyond it the probability is below 2^-35
    logit = np.linspace(-extent, 0, 1 << 15)
    log_density = -alpha * (np.logaddexp(0, -logit) + np.logaddexp(0, logit))
    density = np.exp(log_density - log_density[-1])
    steps = (density[1:] + density[:-1]) / 2 * (logit[1] - logit[0])
    below = density[0] / alpha + np.concatenate(([0.0], np.cumsum(steps)))
    wanted = np.linspace(-_WORD_BITS, -1, _QUANTILES + 1) * math.log(2)
    found: Any = np.interp(wanted, np.log(below / (2 * below[-1])), logit)
    return np.asarray(found, dtype=np.float32)
