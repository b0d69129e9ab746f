"""The mask sampler: equality with a slow oracle, structure, purity, and statistics that are shown to have power.

Unit = the thing that is hidden as a whole: one token ("uniform") or one block of tokens ("block").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from dmjd.ops import Views, disjoint_masks, draw_masks, make_key, mask_plan

# ---- the documented rule, in plain Python integers ----

LOW32 = 0xFFFFFFFF
MASK_DOMAIN = 1


def philox4x32_10(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = product1 >> 32 ^ c1 ^ k0, product1 & LOW32, product0 >> 32 ^ c3 ^ k1, product0 & LOW32
        k0, k1 = k0 + 0x9E3779B9 & LOW32, k1 + 0xBB67AE85 & LOW32
    return c0, c1, c2, c3


def ranked(sample: int, view: int, units: int, seed: int, epoch: int) -> list[int]:
    """The units of one view from lowest to highest (word, unit)."""

    def word(unit: int) -> int:
        counter = (unit // 4, MASK_DOMAIN << 24 | view, sample & LOW32, sample >> 32 & LOW32)
        return philox4x32_10(counter, (seed, epoch))[unit % 4]

    return sorted(range(units), key=lambda unit: (word(unit), unit))


def oracle_units(
    sample: int, *, units: int, hidden: int, fresh: tuple[int, ...], regulation: Any, seed: int, epoch: int
) -> list[set[int]]:
    """The hidden units of each view of one sample."""
    if regulation == "complementary":
        order, keep = ranked(sample, 0, units, seed, epoch), units - hidden
        return [set(order) - set(order[view * keep : (view + 1) * keep]) for view in range(len(fresh))]
    views: list[set[int]] = []
    for view, new in enumerate(fresh):
        order = ranked(sample, view, units, seed, epoch)
        before = set().union(*views)
        if regulation == "none":
            views.append(set(order[:hidden]))
        else:
            never, again = ([u for u in order if (u in before) == seen] for seen in (False, True))
            views.append(set(never[:new] + again[: hidden - new]))
    return views


def tokens_of(units: set[int], grid: tuple[int, int], block: tuple[int, int]) -> list[int]:
    """The tokens, in raster order, that lie in some block of ``units`` (blocks are numbered in raster order too)."""
    width = grid[1] // block[1]
    cells = itertools.product(range(grid[0]), range(grid[1]))
    return [row * grid[1] + column for row, column in cells if row // block[0] * width + column // block[1] in units]


def test_oracle_words_are_random123s() -> None:
    """Known answers published with Random123 (kat_vectors, philox4x32 10)."""
    assert philox4x32_10((0,) * 4, (0,) * 2) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32_10((LOW32,) * 4, (LOW32,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


IDS = (0, 1, 2, 77, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 12345 << 32 | 1, 2**63 - 1, -1)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (42, 2**32 - 1), (2**32 - 1, 1)])
@pytest.mark.parametrize(
    ("grid", "request_", "units", "hidden", "fresh"),
    [
        ((14, 14), {"mask_ratio": 0.75}, 196, 147, (147,)),
        ((14, 14), {"mask_ratio": 0.6, "pattern": "block"}, 49, 30, (30, 19)),
        ((4, 6), {"mask_ratio": 0.25, "pred_ratio": 0.5}, 24, 6, (6, 3, 3)),
        ((12, 20), {"mask_ratio": 0.3, "pattern": "block", "block": (3, 5), "pred_ratio": 0.75}, 16, 5, (5, 3, 2, 2)),
        ((1, 5), {"mask_ratio": 0.6}, 5, 3, (3, 1, 1)),
        ((16, 16), {"mask_ratio": 0.6, "regulation": "none"}, 256, 154, (154, 154, 154)),
        ((14, 14), {"mask_ratio": 0.75, "pattern": "block", "regulation": "complementary"}, 49, 37, (37, 12, 0, 0)),
        ((1, 5), {"mask_ratio": 0.8, "regulation": "complementary"}, 5, 4, (4, 1, 0, 0, 0)),
    ],
)
def test_equals_the_oracle(
    grid: tuple[int, int],
    request_: dict[str, Any],
    units: int,
    hidden: int,
    fresh: tuple[int, ...],
    seed: int,
    epoch: int,
) -> None:
    drawn = disjoint_masks(torch.tensor(IDS), grid=grid, views=len(fresh), seed=seed, epoch=epoch, **request_)
    block = request_.get("block", (2, 2)) if request_.get("pattern") == "block" else (1, 1)
    regulation = request_.get("regulation", "disjoint")
    for column, sample in enumerate(IDS):
        expected = oracle_units(
            sample, units=units, hidden=hidden, fresh=fresh, regulation=regulation, seed=seed, epoch=epoch
        )
        for view, view_units in enumerate(expected):
            assert drawn.masked[view, column].tolist() == tokens_of(view_units, grid, block)


@pytest.mark.parametrize("sample", [90429002, 151956588, 153131561])
def test_equal_words_fall_to_the_lower_unit(sample: int) -> None:
    """Samples found by search, whose 147th and 148th lowest words of 196 are equal: the unit index must decide."""
    order = ranked(sample, 0, 196, 0, 0)
    last, first_out = order[146], order[147]
    words = [philox4x32_10((unit // 4, 1 << 24, sample, 0), (0, 0))[unit % 4] for unit in (last, first_out)]
    assert words[0] == words[1]
    mask = disjoint_masks(torch.tensor([sample]), grid=(14, 14), views=1, mask_ratio=0.75, seed=0, epoch=0).mask
    assert mask[0, 0, min(last, first_out)]
    assert not mask[0, 0, max(last, first_out)]


# ---- structure, for every kind of request ----

GRIDS = {(14, 14): (2, 2), (16, 16): (4, 2), (12, 20): (3, 5), (4, 6): (2, 3), (1, 5): (1, 1)}


def structures() -> Iterator[Any]:
    rates = {"disjoint": (0.3, 0.6), "none": (0.6,), "complementary": (0.75,)}  # four keep-sets of a quarter fit
    for grid, pattern, (regulation, ratios), views in itertools.product(
        GRIDS, ("uniform", "block"), rates.items(), range(1, 5)
    ):
        if regulation == "complementary" and views == 1:
            continue
        for ratio in ratios:
            rows, columns = GRIDS[grid] if pattern == "block" else (1, 1)
            units = grid[0] * grid[1] // (rows * columns)
            if regulation == "disjoint" and units - math.ceil(round(ratio * units, 9)) < views - 1:
                continue  # no new unit is left for the last view
            yield pytest.param(
                grid,
                {"views": views, "mask_ratio": ratio, "pattern": pattern, "regulation": regulation},
                id=f"{grid[0]}x{grid[1]}-{pattern}-{regulation}-K{views}-{ratio}",
            )


@pytest.mark.parametrize(("grid", "request_"), list(structures()))
def test_structure(grid: tuple[int, int], request_: dict[str, Any]) -> None:
    block = GRIDS[grid]
    batch, tokens, views = 33, grid[0] * grid[1], request_["views"]
    rows, columns = block if request_["pattern"] == "block" else (1, 1)
    units = tokens // (rows * columns)
    hidden = math.ceil(round(request_["mask_ratio"] * units, 9))
    plan = mask_plan(grid, block=block, **request_)
    drawn = disjoint_masks(torch.arange(batch), grid=grid, block=block, seed=3, epoch=5, **request_)
    visible, masked, restore, mask = drawn

    assert [field.dtype for field in drawn] == [torch.int64, torch.int64, torch.int64, torch.bool]
    assert masked.shape == (views, batch, hidden * rows * columns)
    assert visible.shape == (views, batch, tokens - masked.shape[-1])
    assert restore.shape == mask.shape == (views, batch, tokens)

    everything = torch.arange(tokens).expand(views, batch, tokens)
    slots = torch.cat((visible, masked), dim=-1)
    for ids in (visible, masked):
        assert (ids.diff(dim=-1) > 0).all(), "ids are unique and ascending"
    assert torch.equal(slots.sort(dim=-1).values, everything), "visible and masked partition the tokens"
    assert torch.equal(slots.gather(-1, restore), everything), "restore finds each token's slot"
    assert torch.equal(mask, restore >= visible.shape[-1])

    by_block = mask.view(views, batch, grid[0] // rows, rows, grid[1] // columns, columns)
    units_hidden = by_block.amax(dim=(3, 5)).flatten(2)
    assert torch.equal(units_hidden, by_block.amin(dim=(3, 5)).flatten(2)), "a block is hidden as a whole or not at all"
    assert (units_hidden.sum(-1) == hidden).all()

    if request_["regulation"] != "none":
        before = torch.zeros(batch, units, dtype=torch.bool)
        for view, fresh in zip(units_hidden, plan.fresh, strict=True):
            assert ((view & ~before).sum(-1) == fresh).all()
            before |= view
        assert (before.sum(-1) == sum(plan.fresh)).all()
    if request_["regulation"] == "complementary":
        assert ((~mask).sum(0) <= 1).all(), "no token is kept twice"


@pytest.mark.parametrize("union", range(9, 13))
def test_union_is_what_pred_ratio_asks_for(union: int) -> None:
    mask = disjoint_masks(
        torch.arange(50), grid=(3, 4), views=3, mask_ratio=0.5, count=7, pred_ratio=union / 12, seed=1, epoch=1
    ).mask
    assert (mask.any(0).sum(-1) == union).all()


# ---- purity: a mask depends on (seed, epoch, sample id, view) and on nothing else ----

DMJD: dict[str, Any] = {"grid": (14, 14), "views": 2, "mask_ratio": 0.6, "pattern": "block"}


def assert_same(actual: Views, expected: Views) -> None:
    for name, left, right in zip(Views._fields, actual, expected, strict=True):
        assert torch.equal(left, right), name


def test_masks_do_not_depend_on_the_batch() -> None:
    ids = torch.tensor(IDS)
    whole = disjoint_masks(ids, seed=7, epoch=3, **DMJD)
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(0))
    assert_same(disjoint_masks(ids[order], seed=7, epoch=3, **DMJD), Views(*(field[:, order] for field in whole)))
    for sizes in ([1] * len(IDS), [5, 0, 7], [2, 10]):
        parts = [disjoint_masks(part, seed=7, epoch=3, **DMJD) for part in ids.split(sizes)]
        assert_same(Views(*(torch.cat(fields, dim=1) for fields in zip(*parts, strict=True))), whole)
    strided = torch.stack((ids, -ids), dim=1)[:, 0]
    assert_same(disjoint_masks(strided, seed=7, epoch=3, **DMJD), whole)


def test_repeated_id_gets_the_same_mask() -> None:
    mask = disjoint_masks(torch.tensor([5, 9, 5]), seed=7, epoch=3, **DMJD).mask
    assert torch.equal(mask[:, 0], mask[:, 2])


def test_empty_batch() -> None:
    drawn = disjoint_masks(torch.empty(0, dtype=torch.int64), seed=0, epoch=0, **DMJD)
    assert [tuple(field.shape) for field in drawn] == [(2, 0, 76), (2, 0, 120), (2, 0, 196), (2, 0, 196)]


def test_tensor_keys_equal_integers() -> None:
    ids, seed, epoch = torch.arange(20), 2**32 - 1, 2**31
    expected = disjoint_masks(ids, seed=seed, epoch=epoch, **DMJD)
    assert_same(disjoint_masks(ids, seed=torch.tensor(seed), epoch=torch.tensor(epoch), **DMJD), expected)
    assert_same(disjoint_masks(ids, seed=seed, epoch=torch.tensor(epoch), **DMJD), expected)
    assert_same(disjoint_masks(ids, seed=torch.tensor(seed), epoch=epoch, **DMJD), expected)


def test_a_plan_drawn_equals_the_single_call() -> None:
    ids = torch.arange(20)
    plan = mask_plan(DMJD["grid"], views=2, mask_ratio=0.6, pattern="block")
    assert_same(draw_masks(ids, plan, seed=7, epoch=3), disjoint_masks(ids, seed=7, epoch=3, **DMJD))


def test_seed_epoch_view_and_both_words_of_the_id_matter() -> None:
    """No two of these 7 x 2 x 64 masks of 118 out of 196 tokens may be equal."""
    ids = torch.arange(64)
    request: dict[str, Any] = {"grid": (14, 14), "views": 2, "mask_ratio": 0.6, "regulation": "none"}
    masks = [
        disjoint_masks(ids + (high << 32), seed=seed, epoch=epoch, **request).mask
        for seed, epoch, high in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (2, 3, 0), (3, 2, 0), (0, 0, 1), (0, 0, 2)]
    ]
    rows = torch.cat(masks).flatten(0, 1)
    assert rows.unique(dim=0).shape == rows.shape == (7 * 2 * 64, 196)


# ---- statistics: each helper returns a p-value and is shown to catch a 2 % bias ----

BIAS, CAUGHT, FAIR = 0.02, 1e-6, 1e-4
SAMPLES = 200_000
UNITS, HIDDEN, FRESH = 12, 3, (3, 2, 1)  # few units, so that each is met often


@lru_cache
def chosen_units(regulation: Any, seed: int = 11, epoch: int = 0) -> Tensor:
    """bool [3, SAMPLES, UNITS]: the three units of twelve that each view hides ("complementary": keeps)."""
    mask_ratio, pred_ratio = {"disjoint": (0.25, 0.5), "none": (0.25, None), "complementary": (0.75, None)}[regulation]
    mask = disjoint_masks(
        torch.arange(SAMPLES),
        grid=(3, 4),
        views=3,
        mask_ratio=mask_ratio,
        pred_ratio=pred_ratio,
        regulation=regulation,
        seed=seed,
        epoch=epoch,
    ).mask
    return ~mask if regulation == "complementary" else mask


def biased_rows(samples: int) -> Tensor:
    return torch.rand(samples, 1, generator=torch.Generator().manual_seed(0)) < BIAS


def favour(masks: Tensor, wanted: Tensor) -> Tensor:
    """The masks [..., B, UNITS], a share BIAS of the samples replaced by random ``wanted`` (bool [B]) ones."""
    pool = wanted.nonzero().squeeze(1)
    pick = pool[torch.randint(len(pool), (len(wanted),), generator=torch.Generator().manual_seed(1))]
    return torch.where(biased_rows(len(wanted)), masks[..., pick, :], masks)


def smallest_p(z: Tensor) -> float:
    """Two-sided p-value of the most extreme of many standard normal scores (Bonferroni)."""
    return min(1.0, 2 * z.numel() * float(stats.norm.sf(z.abs().max().item())))


def p_uniform(chosen: Tensor, eligible: Tensor) -> float:
    """Is each unit chosen equally often among the samples where it is ``eligible``? Both bool [B, UNITS].

    Every sample chooses the same number of the same number of eligible units, so the rate is known exactly.
    """
    trials = eligible.sum(0).double()
    rate = (chosen.sum() / eligible.sum()).double()
    return smallest_p((chosen.sum(0) - trials * rate) / (trials * rate * (1 - rate)).sqrt())


def p_pairs(hidden: Tensor) -> float:
    """Is each pair of units hidden together as often as drawing without replacement says (hypergeometric)?"""
    samples, units = hidden.shape
    count = hidden[0].sum().item()
    rate = count * (count - 1) / (units * (units - 1))
    first, second = torch.triu_indices(units, units, offset=1)
    pairs = (hidden.double().T @ hidden.double())[first, second]
    return smallest_p((pairs - samples * rate) / math.sqrt(samples * rate * (1 - rate)))


def p_independent(left: Tensor, right: Tensor) -> float:
    """Do two draws per sample know of each other? Every pair (unit of left, unit of right), and the overlap's size."""
    samples, units = left.shape
    a, b = left[0].sum().item() / units, right[0].sum().item() / units
    cells = left.double().T @ right.double()
    overlap_variance = units * a * b * (1 - a) * (1 - b) * units / (units - 1)
    overlap = (cells.trace() - samples * units * a * b) / math.sqrt(samples * overlap_variance)
    cell_scores = (cells - samples * a * b) / math.sqrt(samples * a * b * (1 - a * b))
    return smallest_p(torch.cat((cell_scores.flatten(), overlap.unsqueeze(0))))


def p_law(masks: Tensor, hidden: int, legal: Callable[..., bool]) -> float:
    """Chi-square: are all legal outcomes of the views, bool [K, B, U], equally likely? The others must not occur."""
    views, samples, units = masks.shape
    subsets = [sum(1 << unit for unit in chosen) for chosen in itertools.combinations(range(units), hidden)]
    outcomes = [
        sum(subset << view * units for view, subset in enumerate(outcome))
        for outcome in itertools.product(subsets, repeat=views)
        if legal(*outcome)
    ]
    bits = (1 << torch.arange(views * units)).view(views, 1, units)
    seen = torch.bincount((masks * bits).sum(dim=(0, 2)), minlength=1 << views * units)[outcomes]
    assert seen.sum() == samples, "some sample is not a legal outcome"
    return float(stats.chisquare(seen.numpy()).pvalue)


@pytest.mark.parametrize("regulation", ["disjoint", "none", "complementary"])
def test_every_view_chooses_every_unit_equally_often(regulation: Any) -> None:
    anywhere = torch.ones(SAMPLES, UNITS, dtype=torch.bool)
    for view in chosen_units(regulation):
        assert p_uniform(view, anywhere) > FAIR
        assert p_uniform(favour(view, view[:, 0]), anywhere) < CAUGHT


@pytest.mark.parametrize("regulation", ["disjoint", "none", "complementary"])
def test_every_view_chooses_every_pair_of_units_equally_often(regulation: Any) -> None:
    for view in chosen_units(regulation):
        assert p_pairs(view) > FAIR
        assert p_pairs(favour(view, view[:, 0] & view[:, 1])) < CAUGHT


def test_blocks_of_dmjd_are_uniform() -> None:
    mask = disjoint_masks(torch.arange(20_000), seed=1, epoch=0, **DMJD).mask
    for view in mask.view(2, -1, 7, 2, 7, 2)[:, :, :, 0, :, 0].flatten(2):
        assert p_uniform(view, torch.ones_like(view)) > FAIR
        assert p_pairs(view) > FAIR


@pytest.mark.parametrize("view", [1, 2])
@pytest.mark.parametrize("seen", [False, True], ids=["new", "rehidden"])
def test_new_and_rehidden_units_are_uniform_given_earlier_views(view: int, seen: bool) -> None:
    masks = chosen_units("disjoint")
    eligible = masks[:view].any(0) == seen
    chosen = masks[view] & eligible
    assert (chosen.sum(-1) == (HIDDEN - FRESH[view] if seen else FRESH[view])).all()
    assert p_uniform(chosen, eligible) > FAIR
    assert p_uniform(*favour(torch.stack((chosen, eligible)), chosen[:, 0])) < CAUGHT


def assert_independent(left: Tensor, right: Tensor) -> None:
    """As p_independent, and it would notice if right repeated left for BIAS of the samples."""
    assert p_independent(left, right) > FAIR
    assert p_independent(left, torch.where(biased_rows(len(left)), left, right)) < CAUGHT


def test_neighbouring_sample_ids_are_independent() -> None:
    for view in chosen_units("disjoint"):
        assert_independent(view[0::2], view[1::2])  # pairs that share no sample


def test_views_without_regulation_are_independent() -> None:
    for first, second in itertools.combinations(chosen_units("none"), 2):
        assert_independent(first, second)


@pytest.mark.parametrize(("seed", "epoch"), [(11, 1), (12, 0)])
def test_epochs_and_seeds_are_independent(seed: int, epoch: int) -> None:
    assert_independent(chosen_units("none")[0], chosen_units("none", seed, epoch)[0])


@pytest.mark.parametrize(
    ("regulation", "hidden", "legal"),
    [
        pytest.param("disjoint", 2, lambda a, b: (b & ~a).bit_count() == 1, id="disjoint"),
        pytest.param("none", 2, lambda a, b: True, id="none"),
        pytest.param("complementary", 3, lambda a, b: a | b == 0b11111, id="complementary"),
    ],
)
def test_every_legal_pair_of_views_is_equally_likely(
    regulation: Any, hidden: int, legal: Callable[[int, int], bool]
) -> None:
    """The whole law on five units, two views: disjoint with one new unit has 10 x 3 x 2 outcomes, and so on."""
    masks = disjoint_masks(
        torch.arange(SAMPLES),
        grid=(1, 5),
        views=2,
        mask_ratio=0.5,
        count=hidden,
        pred_ratio=0.6 if regulation == "disjoint" else None,
        regulation=regulation,
        seed=5,
        epoch=9,
    ).mask
    assert p_law(masks, hidden, legal) > FAIR
    assert p_law(favour(masks, masks[:, :, 0].all(0)), hidden, legal) < CAUGHT


# ---- torch.compile, the operator's registration, and bad input ----


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("regulation", ["disjoint", "none", "complementary"])
def test_compiles_whole_and_equals_eager(regulation: Any, dynamic: bool) -> None:
    def draw(ids: Tensor, epoch: Tensor) -> Views:
        return disjoint_masks(
            ids, grid=(4, 6), views=2, mask_ratio=0.6, pattern="block", regulation=regulation, seed=1, epoch=epoch
        )

    torch.compiler.reset()  # the limit on recompilations counts over all calls of this test
    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    ids, epoch = torch.arange(5), torch.tensor(0)
    assert_same(compiled(ids, epoch), draw(ids, epoch))
    ids, epoch = torch.arange(8), torch.tensor(1)
    with torch.compiler.set_stance("fail_on_recompile" if dynamic else "default"):
        assert_same(compiled(ids, epoch), draw(ids, epoch))


@pytest.mark.parametrize(
    ("block", "hidden", "fresh", "regulation"),
    [
        ((2, 3), 3, [3, 1], "disjoint"),
        ((1, 1), 7, [7], "disjoint"),
        ((1, 1), 7, [7, 7, 7], "none"),
        ((1, 1), 18, [18, 6, 0], "complementary"),
    ],
)
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_operator_is_registered_soundly(
    batch: int, block: tuple[int, int], hidden: int, fresh: list[int], regulation: Any
) -> None:
    torch.library.opcheck(
        torch.ops.dmjd.disjoint_masks.default,
        (torch.arange(batch), make_key(3, 4), (4, 6), block, hidden, fresh, regulation),
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_sample_ids_must_be_int64(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="sample_ids must be int64"):
        disjoint_masks(torch.arange(3, dtype=dtype), seed=0, epoch=0, **DMJD)


@pytest.mark.parametrize("shape", [(), (3, 1)])
def test_sample_ids_must_be_one_dimensional(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sample_ids must be one-dimensional"):
        disjoint_masks(torch.zeros(shape, dtype=torch.int64), seed=0, epoch=0, **DMJD)


@pytest.mark.parametrize("name", ["seed", "epoch"])
@pytest.mark.parametrize("value", [-1, 2**32])
def test_keys_must_fit_32_bits(name: str, value: int) -> None:
    keys: dict[str, Any] = {"seed": 0, "epoch": 0, name: value}
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 2\*\*32\), got {value}"):
        disjoint_masks(torch.arange(3), **keys, **DMJD)


@pytest.mark.parametrize("name", ["seed", "epoch"])
@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5), torch.tensor([1, 2])], ids=["float", "float tensor", "1-d"])
def test_keys_must_be_single_integers(name: str, value: Any) -> None:
    """A fractional epoch must not be cut to a whole one in silence: two epochs would share their masks."""
    keys: dict[str, Any] = {"seed": 0, "epoch": 0, name: value}
    with pytest.raises((TypeError, ValueError), match=name):
        disjoint_masks(torch.arange(3), **keys, **DMJD)


def test_impossible_requests_are_refused_as_in_mask_plan() -> None:
    with pytest.raises(ValueError, match=r"pred_ratio=0\.3 asks for 15 of 49 units"):
        disjoint_masks(torch.arange(3), seed=0, epoch=0, pred_ratio=0.3, **DMJD)
