"""Which part of an image a sample shows, and its resampling to the training size.

Crops follow torchvision's RandomResizedCrop (Szegedy et al., 2015), but every draw is keyed by (seed, epoch, sample
id), so a crop does not depend on the batch or the process that makes it.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

from dmjd.data.dataset import Pixels
from dmjd.ops.philox import Domain, keyed_uniform

Range = tuple[float, float]
Box = tuple[int, int, int, int]

ATTEMPTS = 10


def draw_crops(
    heights: Tensor,
    widths: Tensor,
    sample_ids: Tensor,
    key: Tensor,
    scale: Range = (0.2, 1.0),
    ratio: Range = (3 / 4, 4 / 3),
) -> Tensor:
    """One random box per sample: area uniform in ``scale``, log aspect ratio uniform in ``ratio``, position uniform.

    The first of ten attempts that fits is taken; if none fits, the largest central box whose ratio is allowed. Attempt
    ``a`` uses words ``4 a .. 4 a + 3`` of the sample: area, ratio, top, left.

    Args:
        heights, widths: int64 ``[B]``, sizes of the images in pixels, at least 1.
        sample_ids: int64 ``[B]``.
        key: from :func:`dmjd.ops.philox.make_key`.
        scale: least and greatest area, as parts of the image's.
        ratio: least and greatest width / height.

    Returns:
        int64 ``[B, 4]``: top, left, height, width; always inside the image.
    """
    uniform = keyed_uniform(sample_ids, 4 * ATTEMPTS, key=key, domain=Domain.CROP).view(-1, ATTEMPTS, 4)
    u_area, u_ratio, u_top, u_left = uniform.permute(2, 0, 1).contiguous().unbind(0)

    area = (heights * widths).double().unsqueeze(1) * (scale[0] + u_area * (scale[1] - scale[0]))
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = torch.exp(low + u_ratio * (high - low))
    width = (area * aspect).sqrt().round().long()
    height = (area / aspect).sqrt().round().long()
    room_y, room_x = heights.unsqueeze(1) - height, widths.unsqueeze(1) - width
    fits = (width > 0) & (height > 0) & (room_y >= 0) & (room_x >= 0)

    top, left = (u_top * (room_y + 1)).floor().long(), (u_left * (room_x + 1)).floor().long()
    attempts = torch.stack((top, left, height, width), dim=-1)
    first = fits.byte().argmax(dim=1)
    chosen = attempts[torch.arange(len(attempts)), first]
    return torch.where(fits.any(dim=1, keepdim=True), chosen, _central_boxes(heights, widths, ratio))


def _central_boxes(heights: Tensor, widths: Tensor, ratio: Range) -> Tensor:
    """int64 ``[B, 4]``: the largest centred boxes whose width / height lies in ``ratio``."""
    height = torch.minimum(heights, (widths.double() / ratio[0]).round().long()).clamp(min=1)
    width = torch.minimum(widths, (heights.double() * ratio[1]).round().long()).clamp(min=1)
    return torch.stack(((heights - height) // 2, (widths - width) // 2, height, width), dim=-1)


def crop_and_resize(image: Pixels, box: Box, size: tuple[int, int]) -> Tensor:
    """The pixels of ``box`` resampled to ``size`` by antialiased bicubic interpolation.

    Args:
        image: uint8 ``[H, W, C]``.
        box: top, left, height, width, inside the image.
        size: (height, width) of the result.

    Returns:
        uint8 ``[h, w, C]``; shares memory with ``image`` if nothing had to be resampled.
    """
    top, left, height, width = box
    crop = torch.from_numpy(image[top : top + height, left : left + width])
    if (height, width) == size:
        return crop
    # The batch axis comes before the permutation, so that strides say channels_last: torch's uint8 kernel is 3x faster.
    resized = F.interpolate(crop.unsqueeze(0).permute(0, 3, 1, 2), size, mode="bicubic", antialias=True)
    return resized.permute(0, 2, 3, 1).squeeze(0)


def evaluation_view(image: Pixels, size: tuple[int, int], crop_pct: float = 1.0) -> Tensor:
    """The central ``size`` of the image, resized so that ``size`` spans ``crop_pct`` of its shorter side.

    Args:
        image: uint8 ``[H, W, C]``.
        size: (height, width) of the result.
        crop_pct: in (0, 1]; 0.875 is ImageNet's 224 of 256.

    Returns:
        uint8 ``[h, w, C]``; the image itself if it has that size and ``crop_pct`` is 1.

    Raises:
        ValueError: if ``crop_pct`` is outside (0, 1].
    """
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct must be in (0, 1], got {crop_pct}")
    height, width = image.shape[:2]
    part = Fraction(str(crop_pct))  # exact, so that 224 / 0.875 never becomes 257
    cover_h, cover_w = (math.ceil(side / part) for side in size)
    factor = max(Fraction(cover_h, height), Fraction(cover_w, width))
    resized = crop_and_resize(image, (0, 0, height, width), (round(height * factor), round(width * factor)))
    top, left = (resized.shape[0] - size[0]) // 2, (resized.shape[1] - size[1]) // 2
    return resized[top : top + size[0], left : left + size[1]]
