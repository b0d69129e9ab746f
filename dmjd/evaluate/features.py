"""Frozen features: what a trained encoder says about every image of a data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dmjd.data.batch import Batch
from dmjd.errors import DataError, UserError
from dmjd.evaluate.pooling import pool
from dmjd.ops.images import normalise

_HALF_PRECISIONS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Features:
    """One row per image, in the order of the data.

    values: float32 ``[N, D]``.
    labels: int64 ``[N]``, never negative.
    """

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return self.labels.shape[0]


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; outside, every submodule gets its own mode back (a frozen part keeps being frozen)."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def encode(
    encoder: nn.Module,
    images: Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    pooling: str,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Frozen features of one batch.

    Args:
        encoder: ``images [B,C,H,W] -> tokens [B, prefix + N, D]``, with an attribute ``num_prefix_tokens``. It runs in
            evaluation mode and without gradients, and is handed back in the mode it came in.
        images: uint8 ``[B, H, W, C]`` on the encoder's device.
        mean, std: per channel, of images scaled to [0, 1].
        pooling: one of :data:`dmjd.evaluate.pooling.POOLINGS`.
        precision: of the forward pass; bfloat16 and float16 run under autocast.

    Returns:
        float32 ``[B, D]``.

    Raises:
        ConfigError: for a pooling that the encoder cannot give.
    """
    autocast = torch.autocast(images.device.type, dtype=precision, enabled=precision in _HALF_PRECISIONS)
    # no_grad, not inference_mode: a probe trains on these tensors, and autograd refuses to save inference tensors.
    with _evaluating(encoder), torch.no_grad(), autocast:
        tokens = encoder(normalise(images, mean, std, precision))
    # Pooled in float32: a bfloat16 mean of 196 tokens would round away most of what tells two images apart.
    return pool(tokens.float(), cast(int, encoder.num_prefix_tokens), pooling)


def require_labels(labels: Tensor, num_classes: int | None = None) -> None:
    """Refuse labels that no classifier can use.

    Raises:
        DataError: if a label is negative (the data set has none) or not below ``num_classes``.
    """
    if labels.numel() == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        raise DataError("this data set has no labels, and kNN and linear probes need a class for every image")
    if num_classes is not None and high >= num_classes:
        raise DataError(f"labels must be below num_classes={num_classes}, got {high}")


def extract_features(
    encoder: nn.Module,
    loader: Iterable[Batch],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    pooling: str,
    device: torch.device,
    precision: torch.dtype = torch.float32,
) -> Features:
    """The frozen features of every image that ``loader`` yields, in its order, on the CPU.

    Args:
        encoder, mean, std, pooling, precision: see :func:`encode`; the encoder is on ``device``.
        loader: batches with labels.
        device: where to encode.

    Raises:
        DataError: if the loader is empty or an image has no label.
        UserError: if a feature is not finite, since every score computed from it would be meaningless.
    """
    values: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in loader:
        require_labels(batch.labels)
        images = batch.images.to(device, non_blocking=True)
        values.append(encode(encoder, images, mean=mean, std=std, pooling=pooling, precision=precision).cpu())
        labels.append(batch.labels.cpu())
    if not values:
        raise DataError("the data to evaluate on holds no images")
    features = Features(torch.cat(values), torch.cat(labels))
    if not bool(features.values.isfinite().all()):
        raise UserError("the encoder's features hold NaN or infinity: evaluate an earlier checkpoint, or in float32")
    return features
