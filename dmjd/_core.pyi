from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

class BuildInfo(TypedDict):
    compiler: str
    torch_target: str
    cuda: str | None
    cuda_archs: list[str]

def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]: ...
def disjoint_masks(
    sample_ids: NDArray[np.int64],
    seed: int,
    epoch: int,
    grid: Sequence[int],
    block: Sequence[int],
    hidden: int,
    fresh: Sequence[int],
    regulation: str,
    smallest: int = 1,
    aspects: Sequence[int] = (),
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]: ...
def hog(
    images: NDArray[Any],
    cell: int = 8,
    bins: int = 9,
    patch: int = 16,
    flavour: str = "dmjd",
    norm: str = "layernorm",
    layout: str = "nhwc",
) -> NDArray[np.float32]: ...
def build_info() -> BuildInfo: ...
