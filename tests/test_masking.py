"""MaskSpec: the rates it reports are those of the masks it draws, and L_mim falls on the tokens that were asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from dmjd.masking import MaskedViews, MaskSpec
from dmjd.ops import disjoint_masks, mask_plan

GRID = (14, 14)
MAE = MaskSpec(views=1, mask_ratio=0.75, pattern="uniform")
SIMMIM = MaskSpec(views=1)
BEIT = MaskSpec(views=2, mask_ratio=0.38, pattern="beit")
DMJD = MaskSpec()


def draw(spec: MaskSpec, samples: int = 40, grid: tuple[int, int] = GRID) -> MaskedViews:
    return spec.draw(torch.arange(samples), grid, seed=4, epoch=2)


def membership(ids: Tensor, tokens: int) -> Tensor:
    """Token ids [..., P] -> bool [..., tokens], true where a token is listed."""
    return torch.zeros(*ids.shape[:-1], tokens, dtype=torch.bool).scatter(-1, ids, True)


# ---- plans and rates ----


def test_plan_is_mask_plans() -> None:
    request: dict[str, Any] = {
        "views": 3,
        "mask_ratio": 0.3,
        "pred_ratio": 0.75,
        "pattern": "block",
        "block": (3, 5),
        "regulation": "disjoint",
        "count": 6,
        "rounding": "official",
    }
    assert MaskSpec(**request).plan((12, 20)) == mask_plan((12, 20), **request)


@pytest.mark.parametrize(
    ("spec", "true", "nominal"),
    [
        pytest.param(MAE, (147 / 196, 147 / 196), (0.75, 0.75), id="MAE"),
        pytest.param(SIMMIM, (30 / 49, 30 / 49), (0.6, 0.6), id="SimMIM"),
        pytest.param(DMJD, (30 / 49, 1), (0.6, 1), id="DMJD"),
        pytest.param(BEIT, (75 / 196, 150 / 196), (0.38, 0.76), id="BEiT with two views"),
        pytest.param(MaskSpec(pred_ratio=0.9), (30 / 49, 44 / 49), (0.6, 0.9), id="DMJD at m_pred .9"),
        pytest.param(MaskSpec(views=3, mask_ratio=0.2), (10 / 49, 30 / 49), (0.2, 0.6), id="three views cannot cover"),
        pytest.param(MaskSpec(views=4, mask_ratio=0.3), (15 / 49, 1), (0.3, 1), id="four views cover more than all"),
        pytest.param(
            MaskSpec(regulation="none"), (30 / 49, 1 - (19 / 49) ** 2), (0.6, 1 - 0.4**2), id="independent views"
        ),
        pytest.param(
            MaskSpec(views=4, mask_ratio=0.75, regulation="complementary"), (37 / 49, 1), (0.75, 1), id="complementary"
        ),
        pytest.param(replace(MAE, loss_ratio=0.5), (0.75, 0.5), (0.75, 0.5), id="Fig. 1b"),
        pytest.param(replace(SIMMIM, loss_ratio=0.9), (30 / 49, 44 / 49), (0.6, 0.9), id="Fig. 1c"),
    ],
)
def test_rates(spec: MaskSpec, true: tuple[float, float], nominal: tuple[float, float]) -> None:
    assert spec.true_rates(GRID) == pytest.approx(true, rel=1e-12)
    assert spec.nominal_rates(GRID) == pytest.approx(nominal, rel=1e-12)


@pytest.mark.parametrize("mask_ratio", [0.1, 0.6])
def test_count_is_what_was_asked_for(mask_ratio: float) -> None:
    """With a count there is no other nominal rate: BEiT's 75 of 196 tokens, twice, cover 150."""
    spec = MaskSpec(pattern="uniform", mask_ratio=mask_ratio, count=75)
    assert spec.true_rates(GRID) == spec.nominal_rates(GRID) == pytest.approx((75 / 196, 150 / 196), rel=1e-12)


@pytest.mark.parametrize(
    "spec",
    [
        MAE,
        DMJD,
        MaskSpec(views=3, mask_ratio=0.3, pred_ratio=0.7),
        BEIT,
        replace(BEIT, pred_ratio=0.5),
        replace(BEIT, views=1, loss_ratio=0.2),
        replace(BEIT, views=1, loss_ratio=0.8),
        MaskSpec(views=2, mask_ratio=0.75, regulation="complementary"),
        replace(MAE, loss_ratio=0.31),
        replace(SIMMIM, loss_ratio=0.83),
    ],
)
def test_true_rates_are_those_of_the_drawn_masks(spec: MaskSpec) -> None:
    views, predicted = draw(spec)
    rates = spec.true_rates(GRID)
    supervised = membership(predicted, 196).any(0)
    assert (views.mask.sum(-1) == round(rates.m_corr * 196)).all()
    assert (supervised.sum(-1) == round(rates.m_pred * 196)).all()
    assert rates.m_corr * 196 == pytest.approx(round(rates.m_corr * 196), abs=1e-9), "a whole number of tokens"
    assert rates.m_pred * 196 == pytest.approx(round(rates.m_pred * 196), abs=1e-9), "a whole number of tokens"


def test_independent_views_cover_what_is_expected() -> None:
    """The mean union of 3 x 20,000 independent views, to four standard errors; K - 1 views are nowhere near."""
    spec = MaskSpec(views=3, mask_ratio=0.3, pattern="uniform", regulation="none")
    grid, samples = (4, 6), 20_000
    union = draw(spec, samples, grid).views.mask.any(0).double().mean(-1)
    standard_error = union.std().item() / samples**0.5
    assert abs(union.mean().item() - spec.true_rates(grid).m_pred) < 4 * standard_error
    assert abs(union.mean().item() - replace(spec, views=2).true_rates(grid).m_pred) > 100 * standard_error


@pytest.mark.parametrize(("views", "epochs", "effective"), [(1, 1600, 1600), (2, 400, 800), (3, 0.5, 1.5)])
def test_effective_epochs_are_views_times_epochs(views: int, epochs: float, effective: float) -> None:
    assert MaskSpec(views=views).effective_epochs(epochs) == effective


# ---- which tokens are predicted ----


@pytest.mark.parametrize(
    "spec",
    [MAE, DMJD, MaskSpec(regulation="none"), MaskSpec(views=4, mask_ratio=0.75, regulation="complementary")],
)
def test_hidden_tokens_are_predicted_unless_told_otherwise(spec: MaskSpec) -> None:
    views, predicted = draw(spec)
    assert torch.equal(predicted, views.masked)


def test_views_are_those_of_disjoint_masks_whatever_is_predicted() -> None:
    expected = disjoint_masks(
        torch.arange(40), grid=GRID, views=1, mask_ratio=0.6, pattern="block", block=(2, 2), seed=4, epoch=2
    )
    for loss_ratio in (None, 0.1, 0.5, 0.9, 1.0):
        views = draw(replace(SIMMIM, loss_ratio=loss_ratio)).views
        assert all(torch.equal(left, right) for left, right in zip(views, expected, strict=True))


@pytest.mark.parametrize("spec", [MAE, SIMMIM], ids=["tokens", "blocks"])
@pytest.mark.parametrize("loss_ratio", [0.02, 0.25, 0.51, 0.8, 0.99, 1.0])
def test_predicted_units_are_a_subset_or_a_superset_of_the_hidden_ones(spec: MaskSpec, loss_ratio: float) -> None:
    side = 2 if spec.pattern == "block" else 1
    units = 196 // side**2
    views, predicted = draw(replace(spec, loss_ratio=loss_ratio))
    chosen, hidden = membership(predicted, 196), views.mask

    assert predicted.shape == (1, 40, round(loss_ratio * units) * side**2)
    assert predicted.dtype == torch.int64
    assert (predicted.diff(dim=-1) > 0).all(), "ids are unique and ascending"
    if loss_ratio < spec.mask_ratio:
        assert not (chosen & ~hidden).any()
    else:
        assert not (hidden & ~chosen).any()
    by_block = chosen.view(1, 40, 14 // side, side, 14 // side, side)
    assert torch.equal(by_block.amax(dim=(3, 5)), by_block.amin(dim=(3, 5))), "whole blocks"


def test_predicting_as_much_as_is_hidden_predicts_the_hidden_tokens() -> None:
    for spec in (MAE, SIMMIM):
        views, predicted = draw(replace(spec, loss_ratio=spec.true_rates(GRID).m_corr))
        assert torch.equal(predicted, views.masked)


@pytest.mark.parametrize("loss_ratio", [0.3, 0.9])
def test_predicted_tokens_are_a_pure_function_of_the_sample(loss_ratio: float) -> None:
    spec = replace(SIMMIM, loss_ratio=loss_ratio)
    ids = torch.tensor([3, 2**32 + 3, 8, 2**40, 3])
    whole = spec.draw(ids, GRID, seed=4, epoch=2).predicted
    parts = [
        spec.draw(part, GRID, seed=torch.tensor(4), epoch=torch.tensor(2)).predicted for part in ids.split([1, 0, 4])
    ]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert torch.equal(whole[:, 0], whole[:, 4])
    others = [spec.draw(ids, GRID, seed=seed, epoch=epoch).predicted for seed, epoch in ((4, 3), (5, 2), (2, 4))]
    assert torch.cat([whole[0, :4], *(other[0, :4] for other in others)]).unique(dim=0).shape[0] == 16


def p_law(hidden: Tensor, predicted: Tensor, counts: tuple[int, int]) -> float:
    """Chi-square: are all pairs of nested sets (hidden, predicted), bool [B, U], of these sizes equally likely?"""
    units = hidden.shape[-1]
    families = [
        [sum(1 << unit for unit in chosen) for chosen in itertools.combinations(range(units), count)]
        for count in counts
    ]
    nested = [a << units | b for a, b in itertools.product(*families) if a & b in (a, b)]
    bits = 1 << torch.arange(units)
    outcomes = ((hidden * bits).sum(-1) << units) + (predicted * bits).sum(-1)
    seen = torch.bincount(outcomes, minlength=1 << 2 * units)[nested]
    assert seen.sum() == len(hidden), "some sample predicts neither a subset nor a superset"
    return float(stats.chisquare(seen.numpy()).pvalue)


@pytest.mark.parametrize(("loss_ratio", "count"), [(0.2, 1), (0.4, 2), (0.8, 4)])
def test_every_choice_of_predicted_units_is_equally_likely(loss_ratio: float, count: int) -> None:
    """The whole law on five units, three hidden: 10 x 3 subsets of one or two, 10 x 2 supersets of four."""
    samples = 200_000
    spec = MaskSpec(views=1, mask_ratio=0.6, pattern="uniform", loss_ratio=loss_ratio)
    views, predicted = draw(spec, samples, (1, 5))
    hidden, chosen = views.mask[0], membership(predicted[0], 5)
    assert p_law(hidden, chosen, (3, count)) > 1e-4

    # The power of this test: 2 % of the samples replaced by ones in which unit 0 is predicted or hidden, not both.
    uneven = (hidden[:, 0] ^ chosen[:, 0]).nonzero().squeeze(1)
    generator = torch.Generator().manual_seed(0)
    pick = uneven[torch.randint(len(uneven), (samples,), generator=generator)]
    rows = torch.where(torch.rand(samples, generator=generator) < 0.02, pick, torch.arange(samples))
    assert p_law(hidden[rows], chosen[rows], (3, count)) < 1e-6


# ---- requests that cannot be met ----


@pytest.mark.parametrize("loss_ratio", [0, -0.1, 1.01, float("nan")])
def test_loss_ratio_outside_zero_and_one(loss_ratio: float) -> None:
    with pytest.raises(ValueError, match=r"loss_ratio.*\b0\b.*\b1\b"):
        MaskSpec(views=1, loss_ratio=loss_ratio).plan(GRID)


def test_loss_ratio_needs_a_single_view() -> None:
    with pytest.raises(ValueError, match=r"loss_ratio needs views=1.*pred_ratio"):
        MaskSpec(views=2, loss_ratio=0.5).plan(GRID)


def test_a_rate_that_cannot_be_met_is_refused_before_anything_is_drawn() -> None:
    spec = MaskSpec(pred_ratio=0.5)
    for refuse in (spec.plan, spec.true_rates, lambda grid: draw(spec, grid=grid)):
        with pytest.raises(ValueError, match=r"pred_ratio=0\.5"):
            refuse(GRID)
