"""Every sampler against the PyTorch reference, bit for bit: the op's kernel, and numpy's through ``dmjd._core``."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dmjd import _core
from dmjd.ops import MaskPlan, Views, make_key, mask_plan, reference

IDS = torch.tensor([0, 1, 77, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**63), *range(1000, 1030)])
GRIDS = {(14, 14): (2, 2), (16, 16): (4, 2), (24, 24): (2, 2), (12, 20): (3, 5), (1, 2): (1, 1), (5, 9): (1, 3)}


def plans() -> Iterator[Any]:
    """Every plan that exists among these grids, patterns, regulations, views and ratios."""
    for grid, pattern, regulation, views, ratio in itertools.product(
        GRIDS, ("uniform", "block", "beit"), ("disjoint", "none", "complementary"), range(1, 5), (0.3, 0.75)
    ):
        if grid == (24, 24) and views in (3, 4):
            continue  # nothing new, and the reference is slow
        request: dict[str, Any] = {"views": views, "mask_ratio": ratio, "pattern": pattern, "regulation": regulation}
        try:
            plan = mask_plan(grid, block=GRIDS[grid], **request)
        except ValueError:
            continue
        yield pytest.param(plan, id=f"{grid[0]}x{grid[1]}-{pattern}-{regulation}-K{views}-{ratio}")


def op(ids: Tensor, key: Tensor, plan: MaskPlan) -> Views:
    return Views(*torch.ops.dmjd.disjoint_masks(ids, key, *plan.op_arguments))


def by_reference(ids: Tensor, key: Tensor, plan: MaskPlan) -> Views:
    return Views(*reference("disjoint_masks")(ids, key, *plan.op_arguments))


def by_numpy(ids: Tensor, key: Tensor, plan: MaskPlan) -> Views:
    seed, epoch = key.tolist()
    arrays = _core.disjoint_masks(ids.numpy(), seed, epoch, *plan.op_arguments)
    return Views(*(torch.from_numpy(array) for array in arrays))


def assert_same(actual: Views, expected: Views) -> None:
    for name, left, right in zip(Views._fields, actual, expected, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right), name


@pytest.mark.parametrize("plan", list(plans()))
def test_all_samplers_agree(plan: MaskPlan) -> None:
    key = make_key(2**32 - 1, 5)
    expected = by_reference(IDS, key, plan)
    assert_same(op(IDS, key, plan), expected)
    assert_same(by_numpy(IDS, key, plan), expected)


@pytest.mark.parametrize("pattern", ["uniform", "beit"])
def test_large_grid(pattern: Any) -> None:
    plan, key = mask_plan((64, 64), views=2, mask_ratio=0.4, pattern=pattern), make_key(0, 0)
    expected = by_reference(IDS[:3], key, plan)
    assert_same(op(IDS[:3], key, plan), expected)
    assert_same(by_numpy(IDS[:3], key, plan), expected)


@pytest.mark.parametrize("sampler", [op, by_numpy])
@pytest.mark.parametrize("sample", [90429002, 151956588, 153131561])
def test_equal_words_fall_to_the_lower_unit(sample: int, sampler: Any) -> None:
    """Samples found by search, whose 147th and 148th lowest words of 196 are equal."""
    plan, key, ids = mask_plan((14, 14), views=1, mask_ratio=0.75), make_key(0, 0), torch.tensor([sample])
    assert_same(sampler(ids, key, plan), by_reference(ids, key, plan))


@pytest.mark.parametrize("sampler", [op, by_numpy])
@pytest.mark.parametrize("pattern", ["uniform", "block", "beit"])
def test_batches(sampler: Any, pattern: Any) -> None:
    """Empty, single, strided, and large enough for several threads: a sample's masks are its own."""
    plan, key = mask_plan((14, 14), views=2, mask_ratio=0.6, pattern=pattern), make_key(3, 1)
    ids = torch.arange(200) * 7919
    whole = sampler(ids, key, plan)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert_same(sampler(ids, key, plan), whole)
    finally:
        torch.set_num_threads(threads)
    for part in (slice(0, 0), slice(7, 8), slice(150, 200), slice(3, None, 9)):
        assert_same(sampler(ids[part], key, plan), Views(*(field[:, part] for field in whole)))
    strided_key = torch.stack((key, key + 1), dim=1)[:, 0]
    assert not strided_key.is_contiguous()
    assert_same(sampler(ids, strided_key, plan), whole)


# ---- the numpy face ----

GOOD: dict[str, Any] = {
    "sample_ids": np.arange(3),
    "seed": 0,
    "epoch": 0,
    "grid": (4, 6),
    "block": (1, 1),
    "hidden": 12,
    "fresh": (12, 12),
    "regulation": "disjoint",
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sample_ids": np.arange(3, dtype=np.int32)}, TypeError, "sample_ids must be int64, got int32"),
        ({"sample_ids": np.zeros((3, 1), np.int64)}, ValueError, r"sample_ids must be one-dimensional"),
        ({"seed": -1}, ValueError, r"seed must be in \[0, 2\*\*32\), got -1"),
        ({"epoch": 2**32}, ValueError, r"epoch must be in \[0, 2\*\*32\), got 4294967296"),
        ({"epoch": 0.5}, TypeError, "epoch"),
        ({"grid": (4, 0)}, ValueError, "grid must be"),
        ({"grid": (2**20, 2**20)}, ValueError, "grid must be"),
        ({"block": (3, 1)}, ValueError, "block must be"),
        ({"hidden": 24}, ValueError, "hidden must leave"),
        ({"fresh": ()}, ValueError, "fresh must have"),
        ({"fresh": (12, 13)}, ValueError, "fresh asks"),
        ({"fresh": (11, 12)}, ValueError, "fresh asks"),
        ({"regulation": "complementary", "fresh": (12, 12, 0)}, ValueError, "fresh has more views"),
        ({"regulation": "complementary", "aspects": (1 << 16,)}, ValueError, "aspects must be empty"),
        ({"regulation": "nonesuch"}, ValueError, "regulation must be one of"),
        ({"aspects": (1 << 16,), "smallest": 0}, ValueError, "smallest area"),
        ({"aspects": (0,)}, ValueError, "aspects must be above 0"),
    ],
)
def test_numpy_refuses_what_it_cannot_draw(change: dict[str, Any], error: type[Exception], message: str) -> None:
    _core.disjoint_masks(**GOOD)
    with pytest.raises(error, match=message):
        _core.disjoint_masks(**GOOD | change)


def test_numpy_releases_the_gil() -> None:
    plan, ids = mask_plan((14, 14), views=2, mask_ratio=0.6), np.arange(20_000)
    entered, finished = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        _core.disjoint_masks(ids, 0, 0, *plan.op_arguments)
        finished.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the worker keeps the GIL unless the call itself lets go of it
    try:
        worker = threading.Thread(target=work)
        worker.start()
        entered.wait()
        assert not finished.is_set()
        worker.join()
    finally:
        sys.setswitchinterval(interval)
