"""Training classifiers on frozen features.

MAE's (He et al., CVPR'22, A.1) has BatchNorm without affine parameters, one linear layer, and LARS; BEiT's a linear
layer on each block's output. The features are computed once, or anew in each epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from timm.optim.lars import Lars
from torch import Tensor, nn

from dmjd.builders.schedules import REFERENCE_BATCH, cosine
from dmjd.data.batch import Batch
from dmjd.evaluate.features import Features, accuracies, require_labels
from dmjd.ops.philox import Domain, keyed_bits, make_key
from dmjd.progress import Progress, track

_CHUNK = 4096


class ProbeResult(NamedTuple):
    """top1: per cent of the test images. balanced_top1: mean of the classes' top-1. final_loss: mean training
    cross-entropy of the last epoch. lr: the peak."""

    top1: float
    balanced_top1: float
    final_loss: float
    lr: float


class Recipe(NamedTuple):
    """Optimisation of a probe.

    batch_size: images per step, whatever the source's chunks.
    base_lr: per 256 images.
    epochs: passes over the training images.
    warmup_epochs: of linear warm-up.
    """

    batch_size: int
    base_lr: float
    epochs: int
    warmup_epochs: int

    @property
    def peak(self) -> float:
        """The learning rate after warm-up."""
        return self.base_lr * self.batch_size / REFERENCE_BATCH


def recipe_for(images: int) -> Recipe:
    """The recipe for ``images`` per epoch: MAE's on ImageNet, and as many steps at the same peak rate on fewer images.

    MAE's batch of 16384 divides ImageNet's epoch into 78 steps. Fewer images have the power of two that gives at least
    as many, but no less than 64 images (or all there are), the same peak learning rate of 6.4, and at least 1000 steps.
    """
    least, greatest, steps_per_epoch, fewest_steps = 64, 16384, 78, 1000
    fitting = 1 << max(images // steps_per_epoch, 1).bit_length() - 1
    batch_size = min(max(fitting, least), greatest, images)
    epochs = max(90, -(-fewest_steps // (images // batch_size)))
    return Recipe(batch_size, 0.1 * greatest / batch_size, epochs, epochs // 9)


def make_head(dim: int, num_classes: int, *, seed: int) -> nn.Sequential:
    """The probe ``[B, dim] -> [B, num_classes]``, initialised on the CPU: the same bits on every device."""
    # skip_init: the default initialisation would draw from the global generator, which a run in training may depend on.
    linear = nn.utils.skip_init(nn.Linear, dim, num_classes)
    nn.init.trunc_normal_(linear.weight, std=0.01, generator=torch.Generator().manual_seed(seed))
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.BatchNorm1d(dim, affine=False, eps=1e-6), linear)


def make_lars(linear: nn.Linear) -> Lars:
    """MAE's LARS without weight decay: momentum 0.9, trust coefficient 0.001, and plain SGD for the bias.

    timm's always_adapt scales every parameter of a group, and without it none at zero weight decay: hence two groups.
    """
    groups = [
        {"params": [linear.weight], "always_adapt": True},
        {"params": [linear.bias], "always_adapt": False},
    ]
    return Lars(groups, lr=0.0, momentum=0.9, weight_decay=0.0, trust_coeff=0.001, eps=0.0)


class LayerHeads(nn.Module):
    """BEiT's linear classifiers of L layers, trained at once: ``[B, L, D] -> [L, B, num_classes]``.

    Each starts as if it were trained alone, with normal weights of deviation 0.01, drawn layer by layer on the CPU.
    """

    def __init__(self, layers: int, dim: int, num_classes: int, *, seed: int) -> None:
        super().__init__()
        weight = torch.empty(layers, num_classes, dim)
        self.weight = nn.Parameter(weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(seed)))
        self.bias = nn.Parameter(torch.zeros(layers, 1, num_classes))

    def forward(self, values: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, values.transpose(0, 1), self.weight.mT)

    def optimizer(self) -> torch.optim.AdamW:
        """BEiT's: AdamW with weight decay 0.0001. It treats every value by itself, and so every layer."""
        return torch.optim.AdamW(self.parameters(), lr=0.0, weight_decay=1e-4)


def linear_probe(
    train_source: FeatureSource,
    test: Features,
    num_classes: int,
    *,
    epochs: int,
    batch_size: int,
    base_lr: float,
    warmup_epochs: int,
    seed: int,
    device: torch.device,
) -> ProbeResult:
    """Train MAE's linear classifier on frozen features and test it; the same arguments give the same bits.

    Args:
        train_source: the training features; the incomplete last batch of an epoch is dropped.
        test: features of the test images.
        num_classes: labels are in ``[0, num_classes)``.
        epochs, batch_size, base_lr, warmup_epochs: see :class:`Recipe`.
        seed: of the initial weights. The order of the images is the source's.
        device: where to train.

    Raises:
        DataError: if labels are out of range.
    """
    require_labels(test.labels, num_classes)
    head = make_head(test.values.shape[1], num_classes, seed=seed).to(device)
    linear = head[1]
    assert isinstance(linear, nn.Linear)
    recipe = Recipe(batch_size, base_lr, epochs, warmup_epochs)
    chunks = zip(test.values.split(batch_size), test.labels.split(batch_size), strict=True)
    (result,) = train_and_test(head, make_lars(linear), train_source, chunks, num_classes, recipe, device=device)
    return result


def train_and_test(
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_source: FeatureSource,
    test: Iterable[tuple[Tensor, Tensor]],
    num_classes: int,
    recipe: Recipe,
    *,
    device: torch.device,
    constant_epochs: bool = False,
    clip: float | None = None,
    micro_batch: int | None = None,
) -> list[ProbeResult]:
    """Train the head of a probe, or several at once, and test it.

    Args:
        head: on ``device``: values of a batch -> logits ``[B, num_classes]``, or of H heads ``[H, B, num_classes]``.
        optimizer: of its parameters; the learning rate is set here.
        train_source: the training features; the incomplete last batch of an epoch is dropped.
        test: chunks of (values, labels) of the test images, read once training has ended.
        num_classes: labels are in ``[0, num_classes)``.
        recipe: linear warm-up from 0 and half a cosine to 0, set per step.
        device: where to train.
        constant_epochs: the learning rate of an epoch is that of its first step.
        clip: largest norm of the gradient. None: it is not clipped.
        micro_batch: images per forward pass of the head, whose gradients are accumulated. None: the whole batch, which
            batch normalisation needs.

    Returns:
        The result of each head.

    Raises:
        DataError: if labels are out of range.
    """
    epochs, batch_size, warmup_epochs = recipe.epochs, recipe.batch_size, recipe.warmup_epochs
    micro_batch = micro_batch or batch_size
    steps_per_epoch = len(train_source) // batch_size
    total, warmup = epochs * steps_per_epoch, warmup_epochs * steps_per_epoch
    step = 0
    for epoch in track(range(epochs), "probe epoch", epochs):
        epoch_loss = torch.zeros((), device=device)
        for values, labels in _regroup(train_source.epoch_features(epoch), batch_size):
            require_labels(labels, num_classes)
            dated = epoch * steps_per_epoch if constant_epochs else step
            for group in optimizer.param_groups:
                group["lr"] = cosine(dated, total=total, warmup=warmup, peak=recipe.peak)
            optimizer.zero_grad()
            for part, expected in zip(values.split(micro_batch), labels.split(micro_batch), strict=True):
                losses = _losses(head(part.to(device).float()), expected.to(device)) * (len(expected) / batch_size)
                losses.sum().backward()
                epoch_loss = epoch_loss + losses.detach()
            if clip is not None:
                nn.utils.clip_grad_norm_(head.parameters(), clip)
            optimizer.step()
            step += 1
        assert step == (epoch + 1) * steps_per_epoch, "a source yields len(source) images in every epoch"
    hits, labels = _hits(head, test, num_classes, device)
    scores = [accuracies(each, labels) for each in hits]
    return [
        ProbeResult(*score, loss / steps_per_epoch, recipe.peak)
        for score, loss in zip(scores, epoch_loss.tolist(), strict=True)
    ]


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each head, ``[H]``."""
    heads = logits if logits.ndim == 3 else logits.unsqueeze(0)
    return torch.stack([F.cross_entropy(each, labels) for each in heads])


class FeatureSource(Protocol):
    """Labelled features, epoch by epoch; the probe does not depend on how they are cut into chunks."""

    def __len__(self) -> int:
        """Images per epoch."""

    def epoch_features(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of (values float32 ``[n, D]``, labels int64 ``[n]``), in the order of this epoch."""


class CachedFeatures:
    """Features computed once, without augmentation; their order is a function of (seed, epoch)."""

    def __init__(self, features: Features, *, seed: int) -> None:
        self._features = features
        self._seed = seed

    def __len__(self) -> int:
        return len(self._features)

    def epoch_features(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every image once, in the order of ``epoch``."""
        rows = torch.arange(len(self))
        bits = keyed_bits(rows, 2, key=make_key(self._seed, epoch), domain=Domain.ORDER)
        order = (bits[:, 0] << 31 | bits[:, 1] >> 1).argsort()  # 63 bits: no ties, even among a billion images
        for chunk in order.split(_CHUNK):
            yield self._features.values[chunk], self._features.labels[chunk]


class RecomputedFeatures:
    """Features of newly augmented images in each epoch, as in the published recipes.

    Args:
        epoch_batches: epoch -> its batches, in the loader's order.
        encode: (batch, epoch) -> float32 ``[B, D]``; it flips, normalises, encodes and pools.
        images_per_epoch: images in an epoch's batches.
    """

    def __init__(
        self,
        epoch_batches: Callable[[int], Iterable[Batch]],
        encode: Callable[[Batch, int], Tensor],
        *,
        images_per_epoch: int,
    ) -> None:
        self._epoch_batches = epoch_batches
        self._encode = encode
        self._images_per_epoch = images_per_epoch

    def __len__(self) -> int:
        return self._images_per_epoch

    def epoch_features(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One chunk per batch. Raises DataError if an image has no label."""
        with Progress("images", self._images_per_epoch, images=1) as bar:
            for batch in self._epoch_batches(epoch):
                require_labels(batch.labels)
                yield self._encode(batch, epoch), batch.labels
                bar.advance(len(batch.labels))


def _regroup(chunks: Iterable[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of exactly ``size`` rows, in order, from chunks of any size; an incomplete last one is dropped."""
    held: list[tuple[Tensor, Tensor]] = []
    rows = 0
    for chunk in chunks:
        held.append(chunk)
        rows += chunk[1].shape[0]
        while rows >= size:
            values, labels = (torch.cat(parts) for parts in zip(*held, strict=True))
            # Cloned, or the rest would keep the memory of the batch until the next one is complete.
            held, rows = [(values[size:].clone(), labels[size:])], rows - size
            yield values[:size], labels[:size]


@torch.no_grad()
def _hits(
    head: nn.Module, test: Iterable[tuple[Tensor, Tensor]], num_classes: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Whether each test image's class is predicted, bool ``[H, N]``, with the batch norm's running statistics, and the
    labels ``[N]``; on the CPU."""
    head.eval()
    predicted, labels = [], []
    for values, expected in test:
        require_labels(expected, num_classes)
        classes = head(values.to(device).float()).argmax(dim=-1).cpu()
        predicted.append(classes if classes.ndim == 2 else classes.unsqueeze(0))
        labels.append(expected.cpu())
    every = torch.cat(labels)
    return torch.cat(predicted, dim=1) == every, every
