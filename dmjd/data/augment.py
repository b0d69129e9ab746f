"""timm's RandAugment of a crop in a loader worker: a pure function of (seed, epoch, sample id).

Shears and translations move each row, or each column, by its own number of pixels. Pillow interpolates them in two
dimensions; here they take one, in 1/3 of the time, with pixels that differ by at most 1 of 255. All other operations
are Pillow's.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import RandomState
from PIL import Image, ImageOps
from torch import Tensor

from dmjd.errors import ConfigError
from dmjd.ops.philox import Domain, keyed_bits

_LANE = 1
"""Lane of ``Domain.CROP``; lane 0 draws the crop."""

_SECTION = r"m\d\d?|n[1-9]|p(0?\.\d+|[01](\.0*)?)|mstd\d+(\.\d+)?|mmax[1-9]\d?|inc[01]|t(weights|3a|3aw)"
_POLICY = re.compile(f"rand(-({_SECTION}))*")


def check_policy(policy: str) -> None:
    """Raise ConfigError unless ``policy`` is a RandAugment policy; timm skips sections that it cannot read."""
    if not _POLICY.fullmatch(policy):
        raise ConfigError(
            f"augment.randaugment={policy} is no RandAugment policy; write rand and sections of m (magnitude), n "
            "(operations), p, mstd, mmax, inc and t, such as rand-m9-mstd0.5-inc1, or null for none"
        )


class RandAugment:
    """RandAugment (Cubuk et al. 2019) of timm: n random operations of Pillow, each applied with probability p.

    Its operations draw from Python's global generator, which is seeded for each image and restored after it.
    Of one channel the operations change the grey values; ``Color`` leaves them as they are.

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
        self._transform = rand_augment_transform(
            policy,
            {
                "img_mean": colour if len(colour) > 1 else colour[0],
                "interpolation": Image.Resampling[interpolation.upper()],
            },
        )
        own = _SHIFTS if interpolation == "bicubic" else {}
        for operation in self._transform.ops:
            kept = _posterize if operation.name.startswith("Posterize") else operation.aug_fn
            operation.aug_fn = own.get(operation.name, kept)

    def draw(self, sample_ids: Tensor, key: Tensor) -> list[tuple[int, int]]:
        """A seed for each of ``sample_ids``, int64 ``[B]``; ``key`` from :func:`dmjd.ops.philox.make_key`."""
        bits = keyed_bits(sample_ids, 2, key=key, domain=Domain.CROP, lane=_LANE)
        return [(first, second) for first, second in bits.tolist()]

    def __call__(self, crop: Tensor, seed: tuple[int, int]) -> Tensor:
        """``crop``, uint8 ``[H, W, C]``, augmented; ``seed`` from :meth:`draw`."""
        timm = self._transform
        # RandomState, since numpy guarantees its stream; timm's own choice is the same call of the global generator.
        chosen = RandomState(seed[0]).choice(
            timm.ops, timm.num_layers, replace=timm.choice_weights is None, p=timm.choice_weights
        )
        image = original = Image.fromarray(crop.squeeze(-1).numpy())
        state = random.getstate()
        random.seed(seed[1])
        try:
            for operation in chosen:
                image = operation(image)
        finally:
            random.setstate(state)
        return crop if image is original else torch.from_numpy(np.array(image)).view(crop.shape)


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep the first ``bits`` bits; 0, which magnitude 10 gives and Pillow 13 rejects, is black as in older ones."""
    return ImageOps.posterize(image, bits) if bits else image.point([0] * 256 * len(image.getbands()))


def _shear_x(image: Image.Image, factor: float, fillcolor: Any, **_: Any) -> Image.Image:
    return _shift_rows(image, factor * (np.arange(image.height) + 0.5), fillcolor)


def _shear_y(image: Image.Image, factor: float, fillcolor: Any, **_: Any) -> Image.Image:
    return _shift_rows(image, factor * (np.arange(image.width) + 0.5), fillcolor, transpose=True)


def _translate_x(image: Image.Image, share: float, fillcolor: Any, **_: Any) -> Image.Image:
    return _shift_rows(image, np.full(image.height, share * image.width), fillcolor)


def _translate_y(image: Image.Image, share: float, fillcolor: Any, **_: Any) -> Image.Image:
    return _shift_rows(image, np.full(image.width, share * image.height), fillcolor, transpose=True)


_SHIFTS: dict[str, Callable[..., Image.Image]] = {
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateXRel": _translate_x,
    "TranslateYRel": _translate_y,
}


def _shift_rows(
    image: Image.Image, offsets: npt.NDArray[np.float64], fill: Any, transpose: bool = False
) -> Image.Image:
    """``out[y, x] = image[y, x + offsets[y]]``, by the cubic of Pillow's ``transform`` (a = -1, edges repeated).

    Args:
        image: of mode RGB or L.
        fill: colour of pixels from outside of the image.
        transpose: shift columns in place of rows.
    """
    raw, kind = ("RGBX", np.dtype(np.uint32)) if image.mode == "RGB" else ("L", np.dtype(np.uint8))
    pixels = np.frombuffer(image.tobytes("raw", raw), kind).reshape(image.height, image.width)
    pixels = np.ascontiguousarray(pixels.T) if transpose else pixels
    height, width = pixels.shape
    first = np.floor(offsets).astype(np.intp)
    columns = (first[:, None] + np.arange(-1, width + 2)).clip(0, width - 1)
    near = pixels.ravel().take(columns + (np.arange(height) * width)[:, None]).view(np.uint8)
    taps = torch.from_numpy(near.reshape(height, width + 3, kind.itemsize)).float()
    d = torch.from_numpy(offsets - first).float()[:, None, None]
    weights = (-d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, d**3 - d**2)
    total = taps[:, :width] * weights[0] + 1e-3  # Pillow truncates; the sum of rounded weights may be below 1
    for tap in (1, 2, 3):
        total.addcmul_(taps[:, tap : tap + width], weights[tap])
    moved = total.clamp_(0, 255).to(torch.uint8).numpy().view(kind)[..., 0]
    position = offsets[:, None] + np.arange(width) + 0.5
    colour = fill if image.mode == "L" else int.from_bytes((*fill, 0), sys.byteorder)
    moved[(position < 0) | (position >= width)] = colour
    moved = np.ascontiguousarray(moved.T) if transpose else moved
    return Image.frombytes(image.mode, image.size, moved.data, "raw", raw)
