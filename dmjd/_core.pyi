from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

class BuildInfo(TypedDict):
    compiler: str
    torch_target: str
    cuda: str | None
    cuda_archs: list[str]

def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]: ...
def build_info() -> BuildInfo: ...
