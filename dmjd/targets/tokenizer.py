"""The contract of a target (the paper's tkn(.)), and the record by which a configuration finds one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dmjd.config import PretrainConfig
from dmjd.config.model import TARGETS as NAMES
from dmjd.errors import ConfigError


class Tokenizer(Protocol):
    """Maps images to one target vector, or one code, per patch, and either to a picture."""

    @property
    def dim(self) -> int:
        """Values per patch; the number of codes for codes. The width of the head's output."""

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
        """


@dataclass(frozen=True)
class TargetSpec:
    """All that the rest of the code knows about a target.

    build: from a configuration that fits this record to the tokenizer, with its weights where it has any.
    norms: values of ``target.norm`` that it supports.
    codes: whether targets are codes, which cross-entropy learns, or vectors.
    colour: whether it needs ``data.channels=3``.
    second_size: whether it may read the crop at ``data.second_size``; others read the student's crop.
    input_patch: pixels of its input per token side, where that is known without its weights.
    dim: :attr:`Tokenizer.dim` without weights; None if ``build`` reads none.
    one_graph: whether torch.compile makes one graph of the tokenizer, as the run does where it compiles the model.
    blocks: modules of the tokenizer, to be compiled one by one likewise; None without a network.
    average: whether it computes with the run's own average of the encoder (``ema_decay``).
    parameters: of the frozen network that it keeps on the GPU, without reading them; 0 for none.
    """

    build: Callable[[PretrainConfig], Tokenizer]
    norms: tuple[str, ...] = ("none",)
    codes: bool = False
    colour: bool = False
    second_size: bool = False
    input_patch: int | None = None
    dim: Callable[[PretrainConfig], int] | None = None
    one_graph: bool = False
    blocks: Callable[[Any], Iterable[nn.Module]] | None = None
    average: bool = False
    parameters: Callable[[PretrainConfig], int] = lambda config: 0


TARGETS: dict[str, TargetSpec] = {}
"""``target.name`` -> its record."""


def register(name: str, spec: TargetSpec) -> None:
    """Make ``target.name=NAME`` build ``spec``'s tokenizer."""
    TARGETS[name] = spec
    if name not in NAMES:
        NAMES.append(name)


def input_size(config: PretrainConfig) -> tuple[int, int]:
    """(height, width) pixels of the images that the target reads."""
    height, width = config.data.second_size or config.data.image_size
    return height, width


def check_grid(config: PretrainConfig, patch: int) -> None:
    """Raise ConfigError unless a target with patches of ``patch`` pixels has as many tokens as the student."""
    height, width = (side // config.backbone.patch_size for side in config.data.image_size)
    read, needed = input_size(config), (height * patch, width * patch)
    if read != needed:
        cure = "null" if needed == tuple(config.data.image_size) else f"[{needed[0]},{needed[1]}]"
        raise ConfigError(
            f"target.name={config.target.name} has patches of {patch} pixels, so for the student's {height}x{width} "
            f"tokens it must read {needed[0]}x{needed[1]} pixels, not {read[0]}x{read[1]}; set data.second_size={cure}"
        )
