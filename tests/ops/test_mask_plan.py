"""Rates to exact counts: the published methods, brute force over small cases, and error sentences that help."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import pytest

from dmjd.ops import MaskPlan, mask_plan
from dmjd.ops.mask_plan import ROUNDINGS

PERCENTS = [percent / 100 for percent in range(1, 100)]


def numbers(sentence: str) -> list[float]:
    """Every number a sentence names, in order."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", sentence)]


def refusal(grid: tuple[int, int], **request: Any) -> str:
    """The sentence with which a request is refused."""
    with pytest.raises(ValueError, match=r"\w+") as error:
        mask_plan(grid, **request)
    return str(error.value)


def allowed(grid: tuple[int, int], **request: Any) -> bool:
    try:
        mask_plan(grid, **request)
    except (ValueError, TypeError):
        return False
    return True


def reachable_unions(units: int, hidden: int, views: int) -> set[int]:
    """Union sizes that ``views`` views can have under Eq. 3, by trying every legal number of new units view by view."""
    unions = {hidden}
    for _ in range(views - 1):
        unions = {union + new for union in unions for new in range(hidden + 1) if union + new <= units and new >= 1}
    return unions


@pytest.mark.parametrize(
    ("request_", "units", "hidden", "fresh"),
    [
        pytest.param({"views": 1, "mask_ratio": 0.75}, 196, 147, (147,), id="MAE"),
        pytest.param({"views": 2, "mask_ratio": 0.75}, 196, 147, (147, 49), id="MAE+DM"),
        pytest.param({"views": 1, "mask_ratio": 0.6, "pattern": "block"}, 49, 30, (30,), id="SimMIM"),
        pytest.param({"views": 2, "mask_ratio": 0.6, "pattern": "block"}, 49, 30, (30, 19), id="DMJD"),
        pytest.param({"views": 1, "mask_ratio": 0.4, "count": 75}, 196, 75, (75,), id="BEiT"),
        pytest.param({"views": 2, "mask_ratio": 0.4, "count": 78}, 196, 78, (78, 78), id="MaskFeat+DM"),
    ],
)
def test_published_methods_on_14x14_tokens(
    request_: dict[str, Any], units: int, hidden: int, fresh: tuple[int, ...]
) -> None:
    plan = mask_plan((14, 14), **request_)
    assert (plan.units, plan.hidden, plan.fresh) == (units, hidden, fresh)
    assert plan.m_corr == hidden / units
    assert plan.m_pred == sum(fresh) / units


@pytest.mark.parametrize(("units", "official", "exact"), [(60, 49, 48), (100, 81, 80)])
def test_official_rounding_hides_one_unit_too_many_at_80_percent(units: int, official: int, exact: int) -> None:
    assert mask_plan((1, units), views=1, mask_ratio=0.8, rounding="official").hidden == official
    assert mask_plan((1, units), views=1, mask_ratio=0.8).hidden == exact


@pytest.mark.parametrize("units", [49, 60, 64, 100, 196, 256])
def test_hidden_units_of_every_percent(units: int) -> None:
    for ratio in PERCENTS:
        exact = math.ceil(Fraction(str(ratio)) * units)
        official = units - int(units * (1 - ratio))  # MAE's and DMJD's len_keep, in binary floating point
        for rounding, hidden in zip(ROUNDINGS, (exact, official), strict=True):
            if hidden < units:  # at 49 units, .99 would leave nothing to see
                assert mask_plan((1, units), views=1, mask_ratio=ratio, rounding=rounding).hidden == hidden


def test_count_overrides_mask_ratio_and_rounding() -> None:
    plans = {
        mask_plan((14, 14), views=2, mask_ratio=ratio, count=75, rounding=rounding)
        for ratio in (0.1, 0.9)
        for rounding in ("exact", "official")
    }
    assert len(plans) == 1
    assert plans.pop().fresh == (75, 75)


def test_blocks_divide_the_grid_into_units() -> None:
    plan = mask_plan((12, 20), views=1, mask_ratio=0.5, pattern="block", block=(3, 5))
    assert (plan.units, plan.hidden) == (16, 8)
    assert mask_plan((12, 20), views=1, mask_ratio=0.5, block=(7, 7)).units == 240, "'uniform' has no blocks"


def test_union_is_valid_exactly_where_the_regulation_can_be_met() -> None:
    """Every (units, hidden, views, union) up to 9 units and 4 views against reachable_unions."""
    for units in range(2, 10):
        for hidden in range(1, units):
            for views in range(1, 5):
                request: dict[str, Any] = {"views": views, "mask_ratio": 0.5, "count": hidden}
                unions = reachable_unions(units, hidden, views)
                assert allowed((1, units), **request) == bool(unions)
                if unions:
                    assert sum(mask_plan((1, units), **request).fresh) == max(unions)
                for union in range(1, units + 1):
                    case = f"{union} of {units} units by {views} views of {hidden}"
                    assert allowed((1, units), **request, pred_ratio=union / units) == (union in unions), case


def test_new_units_are_split_evenly_with_the_remainder_to_earlier_views() -> None:
    for units in range(2, 13):
        for hidden in range(1, units):
            for views in range(2, 5):
                for union in reachable_unions(units, hidden, views):
                    plan = mask_plan((1, units), views=views, mask_ratio=0.5, count=hidden, pred_ratio=union / units)
                    later = plan.fresh[1:]
                    assert plan.fresh[0] == hidden
                    assert sum(plan.fresh) == union
                    assert list(later) == sorted(later, reverse=True)
                    assert max(later) - min(later) <= 1
                    assert plan.m_pred == union / units


@pytest.mark.parametrize(
    ("pred_ratio", "fresh"),
    [(0.9, (30, 14)), (0.95, (30, 17)), (0.64, (30, 1)), (1.0, (30, 19))],  # 44.1, 46.55, 31.36 and 49 units
)
def test_pred_ratio_rounds_to_the_nearest_unit(pred_ratio: float, fresh: tuple[int, ...]) -> None:
    assert mask_plan((7, 7), views=2, mask_ratio=0.6, pred_ratio=pred_ratio).fresh == fresh


def test_complementary_views_hide_the_first_keep_set_second_and_nothing_new_after() -> None:
    plan = mask_plan((14, 14), views=4, mask_ratio=0.75, regulation="complementary")
    assert (plan.fresh, plan.m_pred) == ((147, 49, 0, 0), 1.0)


def test_independent_views_report_the_expected_union() -> None:
    plan = mask_plan((7, 7), views=3, mask_ratio=0.6, regulation="none")
    assert plan.m_pred == pytest.approx(1 - (19 / 49) ** 3, rel=1e-12)


def test_plan_is_a_value() -> None:
    """Plans key caches and travel in closures, so equal requests must be equal and hash alike."""
    first, second = (mask_plan((14, 14), views=2, mask_ratio=0.6) for _ in range(2))
    assert isinstance(first, MaskPlan)
    assert first == second
    assert hash(first) == hash(second)
    assert first != mask_plan((14, 14), views=2, mask_ratio=0.61)


# ---- error sentences: whoever follows them must succeed ----


def pred_ratios_offered(sentence: str) -> list[float]:
    return numbers(sentence.rsplit("pred_ratio of", 1)[1])


def test_every_refused_pred_ratio_names_the_smallest_and_largest_that_work() -> None:
    for units in range(2, 10):
        for hidden in range(1, units):
            for views in range(1, 5):
                unions = reachable_unions(units, hidden, views)
                for union in set(range(1, units + 1)) - unions if unions else ():
                    request: dict[str, Any] = {"views": views, "mask_ratio": 0.5, "count": hidden}
                    offered = pred_ratios_offered(refusal((1, units), **request, pred_ratio=union / units))
                    followed = {sum(mask_plan((1, units), **request, pred_ratio=ratio).fresh) for ratio in offered}
                    assert followed == {min(unions), max(unions)}


@pytest.mark.parametrize("side", [14, 16, 24, 32, 64, 128, 224])
@pytest.mark.parametrize("views", [1, 2, 3])
def test_offered_pred_ratios_are_exact_enough_for_large_grids(side: int, views: int) -> None:
    request: dict[str, Any] = {"views": views, "mask_ratio": 0.2718}
    for ratio in pred_ratios_offered(refusal((side, side), **request, pred_ratio=0.99)):
        assert allowed((side, side), **request, pred_ratio=ratio), f"pred_ratio={ratio} was offered on {side}x{side}"


@pytest.mark.parametrize(
    ("argument", "request_"),
    [
        ("views", {"views": 0, "mask_ratio": 0.6}),
        ("views", {"views": 1, "mask_ratio": 0.75, "regulation": "complementary"}),
        ("views", {"views": 5, "mask_ratio": 0.75, "regulation": "complementary"}),
        ("mask_ratio", {"views": 2, "mask_ratio": 0.3, "regulation": "complementary"}),
        ("mask_ratio", {"views": 2, "mask_ratio": 0.999}),
        ("count", {"views": 2, "mask_ratio": 0.6, "count": 0}),
        ("count", {"views": 2, "mask_ratio": 0.6, "count": 196}),
    ],
)
def test_refusal_names_a_number_that_works(argument: str, request_: dict[str, Any]) -> None:
    """On 14x14 tokens, some number of the sentence, given to the argument at fault, must be accepted."""
    sentence = refusal((14, 14), **request_)
    asked = request_[argument]
    cast = float if argument == "mask_ratio" else int
    offers = [cast(number) for number in numbers(sentence) if cast(number) == number]
    assert argument in sentence
    assert any(allowed((14, 14), **request_ | {argument: offer}) for offer in offers if offer != asked), sentence


@pytest.mark.parametrize("ratio", [0, 1, 1.0, -0.1, 60, math.nan, math.inf])
def test_mask_ratio_outside_zero_and_one(ratio: float) -> None:
    assert re.search(r"mask_ratio.*\b0\b.*\b1\b", refusal((14, 14), views=2, mask_ratio=ratio))


@pytest.mark.parametrize("ratio", [0, 1.1, -0.5, math.nan])
def test_pred_ratio_outside_zero_and_one(ratio: float) -> None:
    assert re.search(r"pred_ratio.*\b0\b.*\b1\b", refusal((14, 14), views=2, mask_ratio=0.6, pred_ratio=ratio))


@pytest.mark.parametrize("regulation", ["none", "complementary"])
def test_pred_ratio_belongs_to_the_disjoint_regulation(regulation: Any) -> None:
    sentence = refusal((14, 14), views=2, mask_ratio=0.75, pred_ratio=0.9, regulation=regulation)
    assert "pred_ratio" in sentence
    assert "disjoint" in sentence


@pytest.mark.parametrize(
    ("argument", "choices"),
    [
        ("pattern", ["uniform", "block"]),
        ("regulation", ["disjoint", "none", "complementary"]),
        ("rounding", ["exact", "official"]),
    ],
)
def test_unknown_word_lists_the_choices(argument: str, choices: list[str]) -> None:
    sentence = refusal((14, 14), views=2, mask_ratio=0.6, **{argument: "nonesuch"})
    assert argument in sentence
    for choice in choices:
        assert choice in sentence
        assert allowed((14, 14), views=2, mask_ratio=0.6, **{argument: choice})


@pytest.mark.parametrize(("grid", "block"), [((15, 14), (2, 2)), ((14, 14), (2, 3)), ((14, 14), (0, 2))])
def test_block_that_does_not_divide_the_grid(grid: tuple[int, int], block: tuple[int, int]) -> None:
    sentence = refusal(grid, views=2, mask_ratio=0.6, pattern="block", block=block)
    assert f"{block[0]}x{block[1]}" in sentence
    assert f"{grid[0]}x{grid[1]}" in sentence


@pytest.mark.parametrize("grid", [(0, 14), (14, -1)])
def test_empty_grid(grid: tuple[int, int]) -> None:
    assert "grid" in refusal(grid, views=2, mask_ratio=0.6)


@pytest.mark.parametrize(("argument", "value"), [("views", 1.5), ("count", 2.5), ("grid", (14.0, 14)), ("grid", (14,))])
def test_counts_must_be_integers(argument: str, value: Any) -> None:
    """A fraction of a unit or of a view must not slip through into a plan."""
    request: dict[str, Any] = {"grid": (14, 14), "views": 2, "mask_ratio": 0.6, argument: value}
    with pytest.raises((TypeError, ValueError), match=argument):
        mask_plan(request.pop("grid"), **request)
