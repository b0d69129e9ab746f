"""BEiT's rectangles: equality with the definition on Python integers, exact counts, masks that are in fact clustered.

Attempt a of view k reads four words (area, aspect, top, left). The area is uniform between the smallest rectangle and
what the view has still to hide, the aspect one of 64 ratios, the corner uniform; a rectangle is taken if it adds
something and not too much. Its units are hidden in raster order while the quota of their kind (never hidden, hidden
before) lasts, and after ten failures in a row lowest words fill what is left.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from dmjd.ops import Domain, MaskPlan, disjoint_masks, draw_masks, keyed_bits, make_key, mask_plan

BEIT: dict[str, Any] = {"grid": (14, 14), "mask_ratio": 0.4, "count": 75, "pattern": "beit"}


# ---- the definition, on integers ----


def nearest_root(square: Fraction) -> int:
    """sqrt(square) to the nearest integer, halves up: the largest n with n - 1/2 <= sqrt(square)."""
    n = math.isqrt(math.floor(square))
    return n + 1 if Fraction(2 * n + 1, 2) ** 2 <= square else n


def pick(word: int, choices: int) -> int:
    """A 32-bit word as one of ``choices``."""
    return word * choices // 2**32


def oracle_view(
    units: tuple[int, int],
    before: set[int],
    quota: dict[bool, int],
    plan: MaskPlan,
    attempts: list[int],
    rank: list[int],
) -> set[int]:
    """What one view hides. ``quota[seen]`` units are taken among those that were (not) hidden ``before``."""
    rows, columns = units
    quota, hidden, failures = dict(quota), set[int](), 0
    for attempt in range(len(attempts) // 4):
        if failures == 10:
            break
        area_word, aspect_word, top_word, left_word = attempts[4 * attempt : 4 * attempt + 4]
        remaining = sum(quota.values())
        bounds = sorted((plan.smallest, remaining))
        area = Fraction(256 * bounds[0] + pick(area_word, 256 * (bounds[1] - bounds[0]) + 1), 256)
        level = pick(aspect_word, len(plan.aspects))
        height = nearest_root(area * Fraction(plan.aspects[level], 2**16))
        width = nearest_root(area * Fraction(plan.aspects[len(plan.aspects) - 1 - level], 2**16))
        failures += 1
        if not (0 < height < rows and 0 < width < columns):
            continue
        top, left = pick(top_word, rows - height + 1), pick(left_word, columns - width + 1)
        inside = [row * columns + column for row in range(top, top + height) for column in range(left, left + width)]
        added = [unit for unit in inside if unit not in hidden]
        if not 0 < len(added) <= remaining:
            continue
        for unit in added:
            if quota[unit in before]:
                quota[unit in before] -= 1
                hidden.add(unit)
                failures = 0
    for seen in (False, True):
        rest = [unit for unit in rank if unit not in hidden and (unit in before) == seen]
        hidden |= set(rest[: quota[seen]])
    return hidden


def oracle(sample: int, plan: MaskPlan, seed: int, epoch: int) -> list[list[int]]:
    """The masked tokens of each view."""

    def words(count: int, domain: Domain, view: int) -> list[int]:
        drawn = keyed_bits(torch.tensor([sample]), count, key=make_key(seed, epoch), domain=domain, lane=view)
        return [int(word) for word in drawn[0]]

    views: list[set[int]] = []
    for view, new in enumerate(plan.fresh):
        before = set[int]() if plan.regulation == "none" else set[int]().union(*views)
        quota = {False: plan.hidden if plan.regulation == "none" else new}
        quota[True] = plan.hidden - quota[False]
        mask_words = words(plan.units, Domain.MASK, view)
        rank = [unit for _, unit in sorted(zip(mask_words, range(plan.units), strict=True))]
        views.append(oracle_view(plan.grid, before, quota, plan, words(4 * 128, Domain.RECTANGLE, view), rank))
    return [sorted(hidden) for hidden in views]


IDS = (0, 1, 2, 77, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**63))


@pytest.mark.parametrize(
    ("grid", "request_"),
    [
        ((14, 14), {"views": 1, "mask_ratio": 0.4, "count": 75}),
        ((14, 14), {"views": 2, "mask_ratio": 0.4, "count": 75}),
        ((14, 14), {"views": 3, "mask_ratio": 0.6}),
        ((14, 14), {"views": 2, "mask_ratio": 0.4, "pred_ratio": 0.6}),
        ((16, 16), {"views": 2, "mask_ratio": 0.4, "regulation": "none"}),
        ((24, 24), {"views": 2, "mask_ratio": 0.75}),
        ((12, 20), {"views": 4, "mask_ratio": 0.3}),
        ((5, 7), {"views": 2, "mask_ratio": 0.5}),
        ((2, 2), {"views": 2, "mask_ratio": 0.5}),
        ((1, 9), {"views": 2, "mask_ratio": 0.5}),  # no rectangle is lower than one row
    ],
)
def test_equals_the_definition(grid: tuple[int, int], request_: dict[str, Any]) -> None:
    plan = mask_plan(grid, pattern="beit", **request_)
    drawn = draw_masks(torch.tensor(IDS), plan, seed=7, epoch=3)
    for column, sample in enumerate(IDS):
        assert drawn.masked[:, column].tolist() == oracle(sample, plan, seed=7, epoch=3)


def test_every_attempt_reads_its_own_words() -> None:
    """More samples, one per seed, so that rare ways of ending a view occur (both quotas met; ten failures)."""
    plan = mask_plan((6, 6), views=2, mask_ratio=0.6, pattern="beit")
    for seed in range(40):
        drawn = draw_masks(torch.tensor([5]), plan, seed=seed, epoch=0)
        assert drawn.masked[:, 0].tolist() == oracle(5, plan, seed, 0)


# ---- what the method promises ----


@pytest.mark.parametrize("views", [1, 2, 3])
def test_counts_are_exact_and_views_disjoint(views: int) -> None:
    """75 of 196 tokens a view, always; two views of BEiT's masks reach 150 tokens, three all of them."""
    mask = disjoint_masks(torch.arange(300), views=views, seed=1, epoch=0, **BEIT).mask
    assert (mask.sum(-1) == 75).all()
    union = torch.zeros_like(mask[0])
    for view, new in zip(mask, mask_plan(views=views, **BEIT).fresh, strict=True):
        assert ((view & ~union).sum(-1) == new).all()
        union |= view
    assert (union.sum(-1) == min(196, 75 * views)).all()


def touching_pairs(mask: Tensor) -> Tensor:
    """Hidden tokens with a hidden neighbour to the right or below, counted per mask [..., 14, 14]."""
    across = (mask[..., :, 1:] & mask[..., :, :-1]).sum((-1, -2))
    return across + (mask[..., 1:, :] & mask[..., :-1, :]).sum((-1, -2))


def test_masks_are_made_of_rectangles() -> None:
    """75 tokens in a few rectangles touch far more often than 75 single ones; also what the second view adds."""
    ids = torch.arange(300)
    beit = disjoint_masks(ids, views=2, seed=1, epoch=0, **BEIT).mask.view(2, -1, 14, 14)
    uniform = disjoint_masks(ids, views=2, seed=1, epoch=0, **BEIT | {"pattern": "uniform"}).mask.view(2, -1, 14, 14)
    for clustered, scattered in zip(beit, uniform, strict=True):
        assert touching_pairs(clustered).double().mean() > 1.5 * touching_pairs(scattered).double().mean()


def test_the_first_view_is_beits() -> None:
    """BEiT's own generator, simulated on 20,000 masks, hides 74.47 tokens by rectangles, a corner in 4 % of the masks
    and the centre in 72 %; here rectangles are followed by single tokens for the other half a token."""
    mask = disjoint_masks(torch.arange(4000), views=1, seed=2, epoch=0, **BEIT).mask[0].view(-1, 14, 14).double()
    share = mask.mean(0)
    corner = share[[0, 0, -1, -1], [0, -1, 0, -1]].mean().item()
    centre = share[6:8, 6:8].mean().item()
    assert corner == pytest.approx(0.04, abs=0.01)
    assert centre == pytest.approx(0.72, abs=0.02)


def test_aspect_ratios_are_symmetric_log_uniform_levels() -> None:
    aspects = mask_plan(views=1, **BEIT).aspects
    logs = [math.log(aspect / 2**16) for aspect in aspects]
    step = -2 * math.log(0.3) / 64
    assert len(aspects) == 64
    assert logs[0] == pytest.approx(math.log(0.3) + step / 2, abs=1e-4)
    assert [b - a for a, b in itertools.pairwise(logs)] == pytest.approx([step] * 63, abs=1e-4)
    assert [a + b for a, b in zip(logs, reversed(logs), strict=True)] == pytest.approx([0] * 64, abs=1e-4)


@pytest.mark.parametrize(("hidden", "smallest"), [(75, 16), (64, 16), (62, 15), (14, 3), (3, 1), (1, 1)])
def test_smallest_rectangle_shrinks_with_the_mask(hidden: int, smallest: int) -> None:
    assert mask_plan((14, 14), views=1, mask_ratio=0.5, count=hidden, pattern="beit").smallest == smallest


def test_keep_sets_cannot_be_rectangles() -> None:
    with pytest.raises(ValueError, match=r"pattern='beit' needs regulation='disjoint' or 'none'"):
        mask_plan((14, 14), views=2, mask_ratio=0.75, pattern="beit", regulation="complementary")


def test_grid_beyond_the_integer_arithmetic_is_refused() -> None:
    with pytest.raises(ValueError, match=r"grid of at most 4194304 tokens, got \(4096, 2048\)"):
        mask_plan((4096, 2048), views=1, mask_ratio=0.4, pattern="beit")


def test_compiles_whole_and_is_registered_soundly() -> None:
    plan = mask_plan(views=2, **BEIT)
    ids, epoch = torch.arange(3), torch.tensor(2)
    compiled = torch.compile(
        lambda ids, epoch: draw_masks(ids, plan, seed=1, epoch=epoch), fullgraph=True, backend="eager"
    )
    assert all(
        torch.equal(a, b) for a, b in zip(compiled(ids, epoch), draw_masks(ids, plan, seed=1, epoch=epoch), strict=True)
    )
    torch.library.opcheck(torch.ops.dmjd.disjoint_masks.default, (ids, make_key(3, 4), *plan.op_arguments))
