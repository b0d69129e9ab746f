"""What the official code and ours are both given: sizes, parameters, images, masks, targets, learning rates.

Every number is a function of a name, made of integers, so that both sides agree to the last bit on any machine and no
tensor has to be stored. Parameters go by their official names, in the order and shape of the official tensor.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BATCH = 2
IMAGE = 224
PATCH = 16
GRID = IMAGE // PATCH
"""The official code has grids of 14, 28 and 56 as literals."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

STEPS, WARMUP = 20, 5
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.05


@dataclass(frozen=True)
class Case:
    """A method at a size that a test can afford.

    embed_dims, depths, mlp_ratios: of the three stages of a ConvViT, or of a ViT's only one.
    unit: side of a mask unit in tokens; ``shown`` units are visible in each view, others in each.
    base_lr, unique_batch, m_corr, m_pred: of the paper's Eq. 4. This batch stands for the recipe's: a learning rate for
        2 images would hardly move the curve.
    """

    name: str
    embed_dims: tuple[int, ...]
    depths: tuple[int, ...]
    mlp_ratios: tuple[int, ...]
    decoder_mlp_ratio: int
    views: int
    unit: int
    shown: int
    pixels: bool
    target_dim: int
    visible_branch: bool
    base_lr: float
    unique_batch: int
    m_corr: float
    m_pred: float
    num_heads: int = 4
    decoder_dim: int = 32
    decoder_depth: int = 2
    decoder_heads: int = 4


CASES = (
    # K = 2, blocks of 2 x 2 tokens at .6: 19 of 49 units shown. Features stand for HOG, 2 * 2 * 9 * 3 values.
    Case(
        "dmjd", (32, 48, 64), (2, 2, 2), (8, 8, 4), 8, 2, 2, 19, False, 108, True,
        base_lr=1.5e-4, unique_batch=1024, m_corr=0.6, m_pred=1.0,
    ),
    # ConvMAE's widths of the MLPs, pixels and no visible branch; K = 2 at .75 since the official code always makes two.
    Case(
        "convmae", (32, 48, 64), (2, 2, 2), (4, 4, 4), 4, 2, 1, 49, True, 768, False,
        base_lr=1.5e-4, unique_batch=1024, m_corr=0.75, m_pred=1.0,
    ),
    Case(
        "mae", (64,), (2,), (4,), 4, 1, 1, 49, True, 768, False,
        base_lr=1.5e-4, unique_batch=4096, m_corr=0.75, m_pred=0.75,
    ),
)  # fmt: skip


def words(name: str, count: int) -> NDArray[np.uint64]:
    """splitmix64 of a counter that starts at the first 8 bytes (little-endian) of the name's SHA-256."""
    start = np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], "<u8").astype(np.uint64)
    z = start + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, count + 1, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def noise(name: str, *shape: int) -> Floats:
    """Uniform in [-1, 1), exact multiples of 2^-52, in C order."""
    return ((words(name, math.prod(shape)) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1).reshape(shape)


def parameter(name: str, shape: tuple[int, ...]) -> Floats:
    """The value of the official parameter ``name``, of a scale that keeps activations near 1.

    Vectors: near 1 for the weight of a LayerNorm, near 0 for a bias. Tokens: up to .5. Others: variance 1 / fan-in.
    """
    values = noise(name, *shape)
    if name.endswith("_token"):
        return 0.5 * values
    if len(shape) == 1:
        return float(name.endswith(".weight")) + 0.1 * values
    return math.sqrt(3 / math.prod(shape[1:])) * values


def images(case: Case, step: int) -> NDArray[np.uint8]:
    """``[B, H, W, 3]``."""
    shape = (BATCH, IMAGE, IMAGE, 3)
    return (words(f"{case.name} images {step}", math.prod(shape)) >> np.uint64(56)).astype(np.uint8).reshape(shape)


def visible(case: Case, step: int) -> NDArray[np.int64]:
    """Token ids ``[K, B, V]`` in raster order: of the units in random order the first ``shown``, the next, ..."""
    side = GRID // case.unit
    order = words(f"{case.name} masks {step}", BATCH * side * side).reshape(BATCH, -1).argsort()
    tokens = np.arange(GRID * GRID).reshape(side, case.unit, side, case.unit).transpose(0, 2, 1, 3).reshape(side**2, -1)
    views = [order[:, k * case.shown : (k + 1) * case.shown] for k in range(case.views)]
    return np.stack([np.sort(tokens[units].reshape(BATCH, -1)) for units in views])


def features(case: Case, step: int) -> Floats:
    """Targets that are not pixels, ``[B, N, target_dim]``: far enough from predictions for both sides of smooth L1."""
    return 3 * noise(f"{case.name} features {step}", BATCH, GRID * GRID, case.target_dim)


def summary(values: Floats) -> dict[str, Any]:
    """Some 50 of the values and three statistics of all."""
    flat = values.reshape(-1)
    stride = flat.size // 50 | 1  # odd, to come by every channel
    return {
        "shape": list(values.shape),
        "mean": float(flat.mean()),
        "rms": float(np.sqrt((flat**2).mean())),
        "largest": float(np.abs(flat).max()),
        "sample": flat[::stride].tolist(),
    }
