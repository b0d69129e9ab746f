"""Frozen features: one vector per image of a data set, pooled from the tokens of a trained encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from dmjd.data.batch import Batch
from dmjd.errors import BadFeatures, DataError
from dmjd.ops.images import normalise
from dmjd.progress import Progress

FEATURE_BATCH = 256
"""Images per forward pass; results do not depend on it."""


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
    """Evaluation mode inside; every submodule's own mode is restored afterwards."""
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
) -> Tensor:
    """Frozen features of one batch.

    Args:
        encoder: ``images [B,C,H,W] -> tokens [B, prefix + N, D]``, with an attribute ``num_prefix_tokens``. It runs in
            evaluation mode and without gradients; its training mode is restored.
        images: uint8 ``[B, H, W, C]`` on the encoder's device.
        mean, std: per channel, of images scaled to [0, 1].
        pooling: see :func:`pool`.

    Returns:
        float32 ``[B, D]``.
    """
    # no_grad, not inference_mode: a probe trains on these tensors, and autograd cannot save inference tensors.
    with _evaluating(encoder), torch.no_grad():
        tokens = encoder(normalise(images, mean, std))
    return pool_features(encoder, tokens, pooling)


def pool_features(encoder: nn.Module, tokens: Tensor, how: str) -> Tensor:
    """:func:`pool` of the tokens of ``encoder``, and its ``fc_norm`` after that if it is of a classifier that
    normalises pooled features."""
    pooled = pool(tokens, cast(int, encoder.num_prefix_tokens), how)
    norm = getattr(encoder, "fc_norm", None)
    return pooled if norm is None else cast(Tensor, norm(pooled))


def pool(tokens: Tensor, num_prefix_tokens: int, how: str) -> Tensor:
    """One vector per image.

    Args:
        tokens: ``[B, prefix + N, D]``, after the encoder's final norm.
        num_prefix_tokens: leading tokens that are not patches; the first of them is the cls token.
        how: ``"mean"`` of the patch tokens (ConvMAE, DMJD), or ``"cls"``, the cls token (MAE).

    Returns:
        ``[B, D]`` in ``tokens``' dtype.
    """
    assert how == "mean" or num_prefix_tokens, "token 0 would be the top-left patch"
    return tokens[:, 0] if how == "cls" else tokens[:, num_prefix_tokens:].mean(dim=1)


def require_labels(labels: Tensor, num_classes: int | None = None) -> None:
    """Raise DataError if a label is negative (the data set has no labels) or not below ``num_classes``."""
    if labels.numel() == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        raise DataError("this data set has no labels; kNN and linear probes need a class for every image")
    if num_classes is not None and high >= num_classes:
        raise DataError(f"labels must be below num_classes={num_classes}, got {high}")


def accuracies(hits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Top-1 in per cent: of all images, and the mean over the classes that have any.

    Args:
        hits: bool ``[N]``, whether an image's class was predicted.
        labels: int64 ``[N]``, on the same device.
    """
    counts, right = labels.bincount().cpu(), labels[hits].bincount(minlength=int(labels.max()) + 1).cpu()
    present = counts > 0
    return 100 * int(right.sum()) / len(labels), 100 * float((right[present] / counts[present].double()).mean())


def extract_features(
    encoder: nn.Module,
    loader: Iterable[Batch],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    pooling: str,
    device: torch.device,
    total: int | None = None,
) -> Features:
    """The frozen features of every image that ``loader`` yields, in its order, on the CPU.

    Args:
        encoder, mean, std, pooling: see :func:`encode`; the encoder is on ``device``.
        loader: batches with labels.
        device: where to encode.
        total: images of the loader, for the progress bar.

    Raises:
        DataError: if the loader is empty or an image has no label.
        BadFeatures: if a feature is not finite.
    """
    values: list[Tensor] = []
    labels: list[Tensor] = []
    with Progress("images", total, images=1) as bar:
        for batch in loader:
            require_labels(batch.labels)
            images = batch.images.to(device, non_blocking=True)
            values.append(encode(encoder, images, mean=mean, std=std, pooling=pooling).cpu())
            labels.append(batch.labels.cpu())
            bar.advance(len(batch.labels))
    if not values:
        raise DataError("the data set to evaluate on has no images")
    features = Features(torch.cat(values), torch.cat(labels))
    if not bool(features.values.isfinite().all()):
        raise BadFeatures("the encoder's features hold NaN or infinity: evaluate an earlier checkpoint")
    return features
