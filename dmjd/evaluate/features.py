"""Frozen features: one vector per image of a data set, pooled from the tokens of a trained encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmjd.data.batch import Batch
from dmjd.errors import BadFeatures, DataError
from dmjd.ops.images import normalise
from dmjd.progress import Progress

FEATURE_BATCH = 256
"""Images per forward pass; results do not depend on it."""

OF_BLOCKS = ("fc_norm", "layers")
"""Values of ``pooling`` that read the outputs of blocks, before the final norm."""


@dataclass(frozen=True, eq=False)
class Features:
    """One row per image, in the order of the data.

    values: float32 ``[N, D]``, or of another pooling ``[N, ...]``.
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


@contextmanager
def _pooled_outputs(blocks: Iterable[nn.Module], num_prefix_tokens: int) -> Iterator[list[tuple[torch.Size, Tensor]]]:
    """A list to which each of ``blocks`` adds its output's shape ``[B, prefix + N, D]`` and :func:`_cls_and_mean`."""
    outputs: list[tuple[torch.Size, Tensor]] = []

    def keep(block: nn.Module, arguments: object, output: Tensor) -> None:
        tokens = output.flatten(1, -2)  # maps of ConvViT and Swin have their channels last
        outputs.append((tokens.shape, _cls_and_mean(tokens, num_prefix_tokens)))

    handles = [block.register_forward_hook(keep) for block in blocks]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


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
        encoder: ``images [B,C,H,W] -> tokens [B, prefix + N, D]``, with an attribute ``num_prefix_tokens``, and
            ``blocks`` for a pooling of their outputs. It runs in evaluation mode and without gradients; its training
            mode is restored.
        images: uint8 ``[B, H, W, C]`` on the encoder's device.
        mean, std: per channel, of images scaled to [0, 1].
        pooling: as for :func:`pool`. "fc_norm": the mean of the last block's patch tokens, before the encoder's final
            norm, followed by a LayerNorm without trained values. "layers": of each block, before that norm, the class
            token beside the mean of the patch tokens, or the mean if there is no class token; blocks whose tokens
            differ in width or number from the last one's (the first stages of ConvViT and Swin) are left out.
            "tokens": all.

    Returns:
        float32 ``[B, D]``; layers: ``[B, L, 2 D]``, or ``[B, L, D]`` without a class token; tokens:
        ``[B, prefix + N, D]``.
    """
    prefix = cast(int, encoder.num_prefix_tokens)
    hooks: AbstractContextManager[list[tuple[torch.Size, Tensor]]] = nullcontext([])
    if pooling in OF_BLOCKS:
        hooks = _pooled_outputs(cast(Iterable[nn.Module], encoder.blocks), prefix)
    # no_grad, not inference_mode: a probe trains on these tensors, and autograd cannot save inference tensors.
    with _evaluating(encoder), torch.no_grad(), hooks as outputs:
        tokens: Tensor = encoder(normalise(images, mean, std))
    if pooling == "tokens":
        return tokens
    if pooling == "layers":
        return torch.stack([pooled for shape, pooled in outputs if shape == tokens.shape], dim=1)
    if pooling == "fc_norm":
        dim = tokens.shape[-1:]
        return F.layer_norm(outputs[-1][1][:, -dim[0] :], dim, eps=1e-6)
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
        tokens: ``[B, prefix + N, D]``.
        num_prefix_tokens: leading tokens that are not patches; the first of them is the class token.
        how: ``"mean"`` of the patch tokens (ConvMAE, DMJD), or ``"cls"``, the class token (MAE).

    Returns:
        ``[B, D]`` in ``tokens``' dtype.
    """
    assert how == "mean" or num_prefix_tokens, "token 0 would be the top-left patch"
    return tokens[:, 0] if how == "cls" else tokens[:, num_prefix_tokens:].mean(dim=1)


def _cls_and_mean(tokens: Tensor, num_prefix_tokens: int) -> Tensor:
    """BEiT's feature of a layer: the class token beside the mean of the patch tokens, ``[B, 2 D]``; without a class
    token the mean, ``[B, D]``."""
    mean = pool(tokens, num_prefix_tokens, "mean")
    return torch.cat((pool(tokens, num_prefix_tokens, "cls"), mean), dim=1) if num_prefix_tokens else mean


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


def encoded(
    encoder: nn.Module,
    loader: Iterable[Batch],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    pooling: str,
    device: torch.device,
    total: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The frozen features and the labels of each batch of ``loader``, on ``device``. Arguments and errors as for
    :func:`extract_features`; an empty loader yields nothing."""
    with Progress("features of images", total, images=1) as bar:
        for batch in loader:
            require_labels(batch.labels)
            values = encode(encoder, batch.images.to(device, non_blocking=True), mean=mean, std=std, pooling=pooling)
            if not bool(values.isfinite().all()):
                raise BadFeatures("the encoder's features hold NaN or infinity: evaluate an earlier checkpoint")
            yield values, batch.labels
            bar.advance(len(batch.labels))


def extract_features(
    encoder: nn.Module,
    loader: Iterable[Batch],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    pooling: str,
    device: torch.device,
    total: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Features:
    """The frozen features of every image that ``loader`` yields, in its order, on the CPU.

    Args:
        encoder, mean, std, pooling: see :func:`encode`; the encoder is on ``device``.
        loader: batches with labels.
        device: where to encode.
        total: images of the loader, for the progress bar.
        dtype: of the values that are kept.

    Raises:
        DataError: if the loader is empty or an image has no label.
        BadFeatures: if a feature is not finite.
    """
    chunks = [
        (values.to("cpu", dtype), labels.cpu())
        for values, labels in encoded(encoder, loader, mean=mean, std=std, pooling=pooling, device=device, total=total)
    ]
    if not chunks:
        raise DataError("the data set to evaluate on has no images")
    values, labels = zip(*chunks, strict=True)
    return Features(torch.cat(values), torch.cat(labels))
