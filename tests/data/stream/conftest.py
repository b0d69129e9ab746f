"""Tars as webdataset writes them, of small images that tell their number."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

SIZES = (5, 15, 10, 10, 8, 12)
"""Images of each tar."""


def image(number: int) -> bytes:
    """16 x 16 pixels, all of them ``number``."""
    buffer = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), number, dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def write_tar() -> Callable[..., Path]:
    """``write_tar(path, numbers, spoil={})``: samples with a class and an image each; ``spoil`` gives other bytes."""

    def write(path: Path, numbers: range, spoil: dict[int, bytes] | None = None) -> Path:
        with webdataset.TarWriter(str(path)) as tar:
            for number in numbers:
                content = (spoil or {}).get(number, image(number))
                tar.write({"__key__": f"{number:05d}", "png": content, "cls": str(number % 2)})
        return path

    return write


@pytest.fixture(scope="session")
def tars(tmp_path_factory: pytest.TempPathFactory, write_tar: Callable[..., Path]) -> Path:
    """A folder of six tars, ``0.tar`` of images 0 to 4 and so on, 60 in all."""
    folder, first = tmp_path_factory.mktemp("tars"), 0
    for number, count in enumerate(SIZES):
        write_tar(folder / f"{number}.tar", range(first, first + count))
        first += count
    return folder
