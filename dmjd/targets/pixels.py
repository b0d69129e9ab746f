"""The pixels themselves as the target: MAE, ConvMAE and SimMIM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmjd.config import PretrainConfig
from dmjd.ops.images import normalise, patchify, unpatchify
from dmjd.targets.tokenizer import TargetSpec, register

_SHOWN_SIGMA = 2.5


@dataclass(frozen=True)
class PixelTarget:
    """Pixels of the mean/std-normalised image, in the order (row, column, channel) within a patch.

    patch: side of a patch in pixels.
    channels: of the images.
    mean, std: ``channels`` numbers on the 0..1 scale.
    norm: ``"none"`` (SimMIM), or ``"patch"``: ``(x - mean) / sqrt(var + eps)`` over all values of a patch (MAE's
        ``norm_pix_loss``).
    unbiased: whether that variance divides by ``n - 1``, as MAE's does.
    eps: added to that variance.
    """

    patch: int
    channels: int
    mean: Sequence[float]
    std: Sequence[float]
    norm: str = "none"
    unbiased: bool = True
    eps: float = 1e-6

    codes = False

    def __post_init__(self) -> None:
        if self.norm == "patch" and self.unbiased and self.dim < 2:
            raise ValueError(
                "PixelTarget: the unbiased variance of norm patch needs at least 2 values per patch, got 1"
            )

    @property
    def dim(self) -> int:
        """Values per patch."""
        return self.patch**2 * self.channels

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 ``[B, H, W, C]`` -> float32 ``[B, N, dim]``.

        Raises:
            TypeError: if ``images`` is not uint8. ValueError: if its channels or size do not fit this target.
        """
        values = patchify(normalise(images, self.mean, self.std), self.patch)
        if self.norm == "none":
            return values
        mean, deviation = self._statistics(values)
        return (values - mean) / deviation

    def denormalise(self, values: Tensor, images: Tensor) -> Tensor:
        """Undo ``norm="patch"`` with the mean and standard deviation of the patches of ``images``, as MAE's demo does.

        values: targets or predictions ``[..., B, N, dim]``. images: uint8 ``[B, H, W, C]``. Returns values in the scale
        of ``norm="none"``.
        """
        mean, deviation = self._statistics(patchify(normalise(images, self.mean, self.std), self.patch))
        return values * deviation + mean

    def _statistics(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, ``[B, N, 1]``, of patches ``[B, N, dim]``."""
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True, correction=int(self.unbiased))
        return mean, (variance + self.eps).sqrt()

    def render(self, values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        """The picture of ``values`` ``[N, dim]`` as uint8 RGB ``[H, W, 3]``.

        ``norm="none"`` undoes mean and std. ``norm="patch"`` has lost both, so it maps +-2.5 standard deviations to
        0..255; the range is fixed so that a target and its prediction can be compared. Of more than three channels the
        first three are shown, fewer are averaged to grey.
        """
        tokens = values.detach().float().cpu().nan_to_num()
        image = unpatchify(tokens[None], grid, self.patch)[0].permute(1, 2, 0)
        if self.norm == "none":
            image = image * torch.tensor(self.std) + torch.tensor(self.mean)
        else:
            image = image / (2 * _SHOWN_SIGMA) + 0.5
        rgb = image[..., :3] if self.channels >= 3 else image.mean(-1, keepdim=True).expand(-1, -1, 3)
        return (rgb * 255).round().clamp(0, 255).to(torch.uint8).numpy()


def _build(config: PretrainConfig) -> PixelTarget:
    target, data = config.target, config.data
    mean, std = tuple(data.mean), tuple(data.std)
    return PixelTarget(config.backbone.patch_size, data.channels, mean, std, target.norm, target.unbiased)


register("pixels", TargetSpec(_build, norms=("patch", "none"), one_graph=True))
