"""The training objective of a task: a model with its losses. Here that of pre-training, with the paper's two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmjd.masking import MaskedViews
from dmjd.models.masked_image_model import MaskedImageModel, Model
from dmjd.ops.tokens import gather_tokens

TOKEN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "cosine": lambda prediction, target: (1 - F.cosine_similarity(prediction, target, dim=-1)).mean(),
    "cross_entropy": lambda logits, codes: F.cross_entropy(logits.flatten(0, -2), codes.flatten()),
}
"""L_mim by name: the mean over tokens and, if the loss is per channel, over channels. Targets are codes for
"cross_entropy", vectors for the others. :class:`Objective` sets the beta of "smooth_l1"."""


class Losses(NamedTuple):
    """0-d float32 tensors; ``visible`` is None without VDB."""

    total: Tensor
    masked: Tensor
    visible: Tensor | None


def mean_losses(parts: Sequence[Losses]) -> Losses:
    """The detached mean over micro-batches of equal size."""
    visible = [part.visible for part in parts if part.visible is not None]
    return Losses(
        torch.stack([part.total.detach() for part in parts]).mean(),
        torch.stack([part.masked.detach() for part in parts]).mean(),
        torch.stack(visible).detach().mean() if visible else None,
    )


class Trainable(nn.Module):
    """A model with its losses: all that an engine knows of a task.

    A call returns a named tuple, whose ``total`` is the loss to minimise.

    Attributes:
        model: the blocks of its ``encoder`` and ``decoder`` are recomputed, compiled and sharded as units.
        lr_scales: name of a parameter -> factor of its learning rate; 1 for a name that is missing.
    """

    model: Model
    lr_scales: Mapping[str, float]

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.lr_scales = {}


class Objective(Trainable):
    """L = L_vis + lambda * L_mim (the paper's Eq. 6), both in float32 at any precision of the model.

    Predictions and targets have the same token ids. The official code pairs shuffled predictions with raster-order
    targets, from which its visible branch learns little more than the image mean.

    Args:
        mim_loss: a key of :data:`TOKEN_LOSSES`.
        mim_weight: lambda.
        beta: the difference at which smooth L1 changes from quadratic to linear (the paper's Eq. 5), in L_vis and in
            L_mim "smooth_l1".
    """

    model: MaskedImageModel

    def __init__(
        self, model: MaskedImageModel, *, mim_loss: str = "mse", mim_weight: float = 1.0, beta: float = 2.0
    ) -> None:
        super().__init__(model)
        if mim_loss not in TOKEN_LOSSES:
            raise ValueError(f"mim_loss must be one of {', '.join(TOKEN_LOSSES)}, got {mim_loss!r}")
        if mim_loss == "cross_entropy" and model.visible_branch is not None:
            raise ValueError("mim_loss='cross_entropy' has codes as targets, but the visible branch predicts vectors")
        self.visible_loss = partial(F.smooth_l1_loss, beta=beta)
        self.mim_loss = self.visible_loss if mim_loss == "smooth_l1" else TOKEN_LOSSES[mim_loss]
        self.mim_weight = mim_weight

    def forward(
        self, images: Tensor, masked_views: MaskedViews, targets: Tensor, branch_scales: Tensor | None = None
    ) -> Losses:
        """
        Args:
            images: float ``[B, C, H, W]``, normalised.
            targets: float32 ``[B, N, target_dim]``, raster order; codes, int64 ``[B, N, 1]``, for "cross_entropy".
            branch_scales: the encoder's stochastic depth, ``[depth, 2, K*B]``, or None.
        """
        prediction = self.model(images, masked_views, branch_scales)
        masked = self.mim_loss(prediction.masked.float(), _select(targets, masked_views.predicted))
        if prediction.visible is None:
            return Losses(self.mim_weight * masked, masked, None)
        visible_targets = gather_tokens(targets, masked_views.views.visible)
        visible = self.visible_loss(prediction.visible.float(), visible_targets)
        return Losses(visible + self.mim_weight * masked, masked, visible)


def _select(targets: Tensor, ids: Tensor) -> Tensor:
    """``[B, N, C]`` at ``ids [K, B, P]`` -> ``[K*B, P, C]``."""
    if targets.is_floating_point():
        return gather_tokens(targets, ids)
    return targets.expand(ids.shape[0], -1, -1, -1).gather(2, ids.unsqueeze(-1)).flatten(0, 1)
