"""JPEG files of ImageNet's size (500 x 375 or 375 x 500, about 110 kB): scikit-image's photographs, cut anew each time,
with the noise of a sensor added.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from skimage import data

from dmjd.data.shards.build import build_shards
from dmjd.data.shards.pool import available_workers, each

NOISE, QUALITY = 10.0, 95
DIFFERENT = 512
"""Photographs of which :func:`write_shards` makes all: each takes a core 40 ms, and thousands would take minutes."""


def photograph(rng: np.random.Generator) -> bytes:
    height, width = (375, 500) if rng.random() < 0.75 else (500, 375)
    source = Image.fromarray(getattr(data, str(rng.choice(["astronaut", "coffee", "chelsea", "rocket"])))())
    scale = max(height / source.height, width / source.width) * rng.uniform(1, 1.4)
    source = source.resize((int(source.width * scale) + 1, int(source.height * scale) + 1), Image.Resampling.LANCZOS)
    left, top = (int(rng.integers(0, room + 1)) for room in (source.width - width, source.height - height))
    pixels = np.asarray(source.crop((left, top, left + width, top + height)))
    file = io.BytesIO()
    noisy = np.clip(pixels + rng.normal(0, NOISE, pixels.shape), 0, 255).astype(np.uint8)
    Image.fromarray(noisy).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def photograph_of(number: int) -> bytes:
    return photograph(np.random.default_rng(number))


def write_shards(folder: Path, images: int) -> None:
    """Shards of ``images`` photographs at ``folder``; of more than :data:`DIFFERENT`, many are the same."""
    workers = min(16, available_workers())  # each of which has modules to import before it is of any use
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        source = Path(scratch, "photograph")
        source.mkdir()
        for number, file in each(photograph_of, range(min(images, DIFFERENT)), workers, "photographs"):
            (source / f"{number:06d}.jpg").write_bytes(file)
        for number in range(DIFFERENT, images):
            os.link(source / f"{number % DIFFERENT:06d}.jpg", source / f"{number:06d}.jpg")
        build_shards(scratch, str(folder), workers, shard_mb=64)
