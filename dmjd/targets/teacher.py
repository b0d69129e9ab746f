"""Features of an average of the student itself as the target: data2vec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmjd.config import PretrainConfig
from dmjd.ops.images import normalise
from dmjd.targets.features import NORMS, normalise_features, render_features
from dmjd.targets.tokenizer import TargetSpec, register


class Teacher(Protocol):
    """float ``[B, C, H, W]``, normalised -> what its last blocks give for the patches, ``[B, N, dim]`` each."""

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """Of its network."""

    def __call__(self, images: Tensor) -> Sequence[Tensor]: ...


class LayerMean(nn.Module):
    """The mean of the teacher's last blocks, each normalised, and then the mean once more, as in data2vec.

    ``forward(layers [B, N, D] each) -> float32 [B, N, D]``. A module, so that it is compiled as the blocks are: in
    eager mode each norm and the mean are passes over memory of their own.
    """

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, layers: Sequence[Tensor]) -> Tensor:
        mean = torch.stack([normalise_features(layer, self.norm) for layer in layers]).mean(0)
        return normalise_features(mean, self.norm)


@dataclass
class TeacherTarget:
    """:class:`LayerMean` of the teacher's last blocks.

    dim: the student's width. patch: side of a patch in pixels. mean, std: the student's.
    norm: "layernorm", of each block and of the mean, or "none".
    teacher: set by the run before its first step, since a target imports no models.
    """

    dim: int
    patch: int
    mean: Sequence[float]
    std: Sequence[float]
    norm: str = "layernorm"
    teacher: Teacher | None = field(default=None, compare=False)

    codes = False

    def __post_init__(self) -> None:
        self.layer_mean = LayerMean(self.norm)

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 ``[B, H, W, C]`` -> float32 ``[B, N, dim]``."""
        assert self.teacher is not None, "the run sets the teacher before its first step"
        found: Tensor = self.layer_mean(self.teacher(normalise(images, self.mean, self.std)))
        return found

    def render(self, values: Tensor, grid: tuple[int, int]) -> NDArray[np.uint8]:
        """See :func:`dmjd.targets.features.render_features`."""
        return render_features(values, grid, self.patch)


def _build(config: PretrainConfig) -> TeacherTarget:
    backbone, mean, std = config.backbone, tuple(config.data.mean), tuple(config.data.std)
    return TeacherTarget(backbone.embed_dim, backbone.patch_size, mean, std, config.target.norm)


register(
    "teacher",
    TargetSpec(_build, norms=NORMS, blocks=lambda target: [*target.teacher.blocks, target.layer_mean], average=True),
)
