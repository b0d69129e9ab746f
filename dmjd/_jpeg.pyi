import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def header(data: Buffer) -> tuple[int, int, bool]: ...
def decode_region(
    data: Buffer, top: int, left: int, height: int, width: int, channels: int, scale: int = 1
) -> NDArray[np.uint8]: ...
