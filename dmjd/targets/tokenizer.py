"""What every target of masked image modelling is: the paper's tkn(.)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Tokenizer(Protocol):
    """Maps images to one target vector, or one code, per patch, and either to a picture."""

    @property
    def dim(self) -> int:
        """Values per patch; of codes, how many there are. What a head has to give for a patch."""

    @property
    def codes(self) -> bool:
        """Whether a target is a code, the number of an entry in a codebook, rather than a vector."""

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 ``[B, H, W, C]``, values 0..255 -> float32 ``[B, N, dim]``, or int64 ``[B, N, 1]`` of codes; patches in
        raster order, no gradient."""

    def render(self, values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        """A picture for people of one image's targets or predictions.

        Args:
            values: floating ``[N, dim]`` on any device; ``[N, 1]`` of codes.
            grid: (h, w) with ``h * w == N``.

        Returns:
            uint8 RGB ``[H, W, 3]``, the image's height and width or an integer multiple of both. NaN is drawn as zero.

        Raises:
            ValueError: if ``values`` has another shape.
        """
