"""timm's RandAugment of a crop in a loader worker: a pure function of (seed, epoch, sample id).

Shears and translations move each row, or each column, by its own number of pixels. Pillow interpolates them in two
dimensions; here they take one, in a third of the time, with pixels that differ by at most 1 of 255. All other
operations are Pillow's, or give the same pixels.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.random import RandomState
from PIL import Image
from torch import Tensor

from dmjd.errors import ConfigError
from dmjd.ops.philox import Domain, keyed_bits

_LANE = 1
"""Lane of ``Domain.CROP``; lane 0 draws the crop."""

_SECTION = r"m\d\d?|n[1-9]|p(0(\.\d+)?|1(\.0+)?)|mstd\d+(\.\d+)?|mmax[1-9]\d?|inc[01]|t(weights|3a|3aw)"
_POLICY = re.compile(f"rand(-({_SECTION}))*")


def check_policy(policy: str) -> None:
    """Raise ConfigError unless ``policy`` is a RandAugment policy; timm skips sections that it cannot read."""
    if not _POLICY.fullmatch(policy):
        raise ConfigError(
            f"augment.randaugment={policy} is not a RandAugment policy; write rand and sections of m (magnitude), n "
            "(operations), p, mstd, mmax, inc and t, such as rand-m9-mstd0.5-inc1, or null for none"
        )


_Image = Tensor | Image.Image
"""An image between two operations: uint8 ``[H, W, C]``, or Pillow's after an operation of Pillow."""

Operations = tuple[Callable[[_Image], _Image], ...]


class RandAugment:
    """RandAugment (Cubuk et al. 2019) of timm: n random operations, each applied with probability p.

    On one channel, operations change the grey values; ``Color`` leaves them as they are.

    Args:
        policy: in timm's notation, such as "rand-m9-mstd0.5-inc1".
        mean: mean colour for pixel values in 0..1, one value per channel; fills what a geometric operation uncovers.
        interpolation: "bicubic" or "bilinear", of geometric operations.

    Raises:
        ConfigError: as :func:`check_policy`.
    """

    def __init__(self, policy: str, mean: Sequence[float], interpolation: str) -> None:
        check_policy(policy)
        from timm.data.auto_augment import rand_augment_transform  # seconds of imports

        colour = tuple(min(255, max(0, round(255 * value))) for value in mean)
        self._timm = rand_augment_transform(
            policy,
            {
                "img_mean": colour if len(colour) > 1 else colour[0],
                "interpolation": Image.Resampling[interpolation.upper()],
            },
        )
        own = _EXACT | _SHIFTS if interpolation == "bicubic" else _EXACT
        for operation in self._timm.ops:
            operation.aug_fn = partial(_append, own.get(operation.name) or partial(_on_pillow, operation.aug_fn))

    def draw(self, sample_ids: Tensor, key: Tensor) -> list[Operations]:
        """Draw the operations of ``sample_ids``, int64 ``[B]``; ``key`` from :func:`dmjd.ops.philox.make_key`.

        timm draws from the global generators of Python and numpy. Python's is seeded for each image, and restored at
        the end; the choice of operations is timm's call of numpy with a generator of its own, whose stream numpy
        guarantees.
        """
        timm, generator, drawn = self._timm, RandomState(), list[Operations]()
        state = random.getstate()
        try:
            for choice, rest in keyed_bits(sample_ids, 2, key=key, domain=Domain.CROP, lane=_LANE).tolist():
                generator.seed(choice)
                random.seed(rest)
                weights = timm.choice_weights
                chosen = generator.choice(len(timm.ops), timm.num_layers, replace=weights is None, p=weights)
                operations: Operations = ()
                for number in chosen:
                    operations = timm.ops[number](operations)
                drawn.append(operations)
        finally:
            random.setstate(state)
        return drawn


def apply(operations: Operations, crop: Tensor) -> Tensor:
    """``crop``, uint8 ``[H, W, C]``, after ``operations`` of :meth:`RandAugment.draw`."""
    image: _Image = crop
    for operation in operations:
        image = operation(image)
    return _as_tensor(image)


def _append(function: Callable[..., _Image], operations: Operations, *arguments: Any, **options: Any) -> Operations:
    """In place of timm's function of an image: no function draws, so it can be applied later."""
    return (*operations, lambda image: function(image, *arguments, **options))


def _on_pillow(function: Callable[..., Image.Image], image: _Image, *arguments: Any, **options: Any) -> Image.Image:
    pillow = Image.fromarray(image.squeeze(-1).numpy()) if isinstance(image, Tensor) else image
    return function(pillow, *arguments, **options)


def _as_tensor(image: _Image) -> Tensor:
    if isinstance(image, Tensor):
        return image
    return torch.from_numpy(np.array(image)).view(image.height, image.width, -1)


def _invert(image: _Image, **_: Any) -> Tensor:
    return ~_as_tensor(image)


def _posterize(image: _Image, bits: int, **_: Any) -> Tensor:
    """Keep the first ``bits`` bits: none below 1, all above 8. Of 0 bits, which magnitude 10 gives, Pillow 13 raises an
    error; older ones give black, as here."""
    return _as_tensor(image) & (256 - 2 ** (8 - min(8, max(0, bits))))


def _shear_x(image: _Image, factor: float, fillcolor: Any, **_: Any) -> Tensor:
    crop = _as_tensor(image)
    return _shift_rows(crop, factor * (np.arange(crop.shape[0]) + 0.5), fillcolor)


def _shear_y(image: _Image, factor: float, fillcolor: Any, **_: Any) -> Tensor:
    columns = _as_tensor(image).transpose(0, 1).contiguous()
    return _shear_x(columns, factor, fillcolor).transpose(0, 1).contiguous()


def _translate_x(image: _Image, share: float, fillcolor: Any, **_: Any) -> Tensor:
    crop = _as_tensor(image)
    return _shift_rows(crop, np.full(crop.shape[0], share * crop.shape[1]), fillcolor)


def _translate_y(image: _Image, share: float, fillcolor: Any, **_: Any) -> Tensor:
    crop = _as_tensor(image)
    height, width = crop.shape[:2]
    row_of_rows = crop.reshape(1, height, -1)
    return _shift_rows(row_of_rows, np.full(1, share * height), np.tile(fillcolor, width)).view(crop.shape)


_SHIFTS: dict[str, Callable[..., Tensor]] = {
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateXRel": _translate_x,
    "TranslateYRel": _translate_y,
}
_EXACT: dict[str, Callable[..., Tensor]] = {
    "Invert": _invert,
    "Posterize": _posterize,
    "PosterizeIncreasing": _posterize,
}


def _shift_rows(crop: Tensor, offsets: npt.NDArray[np.floating[Any]], fill: Any) -> Tensor:
    """``out[y, x] = crop[y, x + offsets[y]]`` by the cubic of Pillow's ``transform`` (a = -1, edges repeated).

    Pixels from outside of the image become ``fill``, so a row may be read beyond its repeated edges.
    """
    height, width, channels = crop.shape
    row, count = (width + 4) * channels, width * channels
    memory = np.empty((height + 2) * row, dtype=np.uint8)
    padded = memory[row:-row].reshape(height, width + 4, channels)
    padded[:, 2:-2] = pixels = crop.numpy()
    padded[:, :2], padded[:, -2:] = pixels[:, :1], pixels[:, -1:]
    first = np.floor(offsets)
    windows = sliding_window_view(memory, count + 3 * channels)
    starts = row * np.arange(1, height + 1) + channels * (first.astype(np.int64) + 1)
    taps = torch.from_numpy(windows[starts.clip(0, len(windows) - 1)].astype(np.float32))
    d = torch.from_numpy(offsets - first).float()[:, None]
    weights = (-d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, d**3 - d**2)
    total = (taps[:, :count] * weights[0]).add_(1e-3)  # Pillow truncates; the weights' rounded sum may be below 1
    for tap in (1, 2, 3):
        total.addcmul_(taps[:, tap * channels : tap * channels + count], weights[tap])
    moved = total.clamp_(0, 255).numpy().astype(np.uint8).reshape(crop.shape)
    begin, end = (np.ceil(edge - offsets - 0.5)[:, None] for edge in (0, width))
    columns, pixel = np.arange(width, dtype=np.float32), np.dtype((np.void, channels))
    outside = (columns < begin) | (columns >= end)
    moved.view(pixel)[..., 0][outside] = np.atleast_1d(np.asarray(fill, dtype=np.uint8)).view(pixel)  # in one copy each
    return torch.from_numpy(moved)
