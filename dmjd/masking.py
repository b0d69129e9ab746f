"""Masking of a method: number of views, pattern, rates, and the tokens that the loss is taken on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dmjd.ops.mask_plan import MaskPlan, Pattern, Regulation, Rounding, mask_plan, nearest_count
from dmjd.ops.masks import draw_masks, units_to_tokens
from dmjd.ops.philox import WORD_RANGE, Domain, keyed_bits, make_key
from dmjd.ops.views import Views


class Rates(NamedTuple):
    """m_corr: share of tokens that a view masks. m_pred: share of tokens that L_mim supervises over all views."""

    m_corr: float
    m_pred: float


class MaskedViews(NamedTuple):
    """Views, and the tokens on which L_mim is taken: ``predicted`` int64 ``[K, B, P]``, ascending token ids."""

    views: Views
    predicted: Tensor


@dataclass(frozen=True)
class MaskSpec:
    """Masks and predicted tokens of a method; :meth:`draw` draws them for a batch.

    ``loss_ratio`` is the paper's Fig. 1 (b, c) and needs a single view: below m_corr the loss is taken on a random
    subset of the masked units, above it on all masked and some visible units; None takes it on the masked tokens. The
    other fields are the arguments of :func:`dmjd.ops.mask_plan.mask_plan`.
    """

    views: int = 2
    mask_ratio: float = 0.6
    pred_ratio: float | None = None
    pattern: Pattern = "block"
    block: tuple[int, int] = (2, 2)
    regulation: Regulation = "disjoint"
    count: int | None = None
    rounding: Rounding = "exact"
    loss_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.loss_ratio is None:
            return
        if self.views != 1:
            raise ValueError(f"loss_ratio needs views=1, got views={self.views}; with more views use pred_ratio")
        if not 0 < self.loss_ratio <= 1:
            raise ValueError(f"loss_ratio must be above 0 and at most 1, got {self.loss_ratio}")

    def plan(self, grid: tuple[int, int]) -> MaskPlan:
        """Exact counts on a token grid. Raises ValueError where the rates cannot be met."""
        requested = {name: value for name, value in vars(self).items() if name != "loss_ratio"}
        return mask_plan(grid, **requested)

    def predicted_units(self, plan: MaskPlan) -> int:
        """Units per view on which L_mim is taken."""
        if self.loss_ratio is None or self.loss_ratio == self.mask_ratio:
            return plan.hidden  # equal rates mean the masked units, even if the two counts would round differently
        return max(1, nearest_count(self.loss_ratio, plan.units))

    def true_rates(self, grid: tuple[int, int]) -> Rates:
        """The rates that the integer counts give on ``grid`` (for regulation "none", m_pred is the expectation)."""
        plan = self.plan(grid)
        if self.loss_ratio is not None:
            return Rates(plan.m_corr, self.predicted_units(plan) / plan.units)
        return Rates(plan.m_corr, plan.m_pred)

    def nominal_rates(self, grid: tuple[int, int]) -> Rates:
        """The rates as configured, before rounding to whole units: .6 and 1 where 30 of 49 units are masked."""
        true = self.true_rates(grid)
        if self.count is not None:
            return true
        ratio = self.mask_ratio
        if self.loss_ratio is not None:
            return Rates(ratio, self.loss_ratio)
        if self.regulation == "none":
            return Rates(ratio, 1.0 - (1.0 - ratio) ** self.views)
        if self.regulation == "complementary":
            return Rates(ratio, 1.0)
        return Rates(ratio, self.pred_ratio if self.pred_ratio is not None else min(1.0, self.views * ratio))

    def effective_epochs(self, epochs: float) -> float:
        """The paper's ETE = K x epochs."""
        return self.views * epochs

    def draw(
        self, sample_ids: Tensor, grid: tuple[int, int], *, seed: int | Tensor, epoch: int | Tensor
    ) -> MaskedViews:
        """Views and predicted tokens of a batch, on ``sample_ids``' device; pure in (seed, epoch, sample id)."""
        plan = self.plan(grid)
        views = draw_masks(sample_ids, plan, seed=seed, epoch=epoch)
        if self.loss_ratio is None:
            return MaskedViews(views, views.masked)
        key = make_key(seed, epoch)
        words = keyed_bits(sample_ids, plan.units, key=key, domain=Domain.PREDICT)
        rows, columns = plan.block
        visible = ~views.mask[0].unflatten(-1, plan.grid)[:, ::rows, ::columns].flatten(-2)
        # Masked units rank first, so one rule gives a subset of them, or all of them and some visible ones.
        count = self.predicted_units(plan)
        chosen = (words + visible * WORD_RANGE).argsort(dim=-1, stable=True)[:, :count]
        units = torch.zeros_like(visible).scatter(-1, chosen, True)
        tokens = units_to_tokens(units, plan.unit_grid, plan.block)
        predicted = (~tokens).long().argsort(dim=-1, stable=True)[:, : count * plan.tokens_per_unit]
        return MaskedViews(views, predicted.unsqueeze(0))


def measured_rates(masked_views: MaskedViews) -> Tensor:
    """float32 ``[2]`` on the device: m_corr and m_pred of this batch."""
    mask = masked_views.views.mask
    supervised = torch.zeros_like(mask).scatter(-1, masked_views.predicted, True).any(dim=0)
    return torch.stack((mask.float().mean(), supervised.float().mean()))
