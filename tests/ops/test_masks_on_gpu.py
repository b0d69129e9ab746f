"""The CUDA sampler draws the CPU's bits, for every plan, in graphs, and on the card that holds the ids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dmjd.ops import MaskPlan, Views, draw_masks, make_key, mask_plan, status

pytestmark = pytest.mark.gpu

IDS = torch.tensor([0, 1, 77, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**63), *range(1000, 1300)])
GRIDS = {(14, 14): (2, 2), (16, 16): (4, 2), (24, 24): (2, 2), (12, 20): (3, 5), (1, 2): (1, 1), (5, 9): (1, 3)}


def plans() -> Iterator[Any]:
    for grid, pattern, regulation, views, ratio in itertools.product(
        GRIDS, ("uniform", "block", "beit"), ("disjoint", "none", "complementary"), range(1, 5), (0.3, 0.75)
    ):
        request: dict[str, Any] = {"views": views, "mask_ratio": ratio, "pattern": pattern, "regulation": regulation}
        try:
            plan = mask_plan(grid, block=GRIDS[grid], **request)
        except ValueError:
            continue
        yield pytest.param(plan, id=f"{grid[0]}x{grid[1]}-{pattern}-{regulation}-K{views}-{ratio}")


def op(ids: Tensor, key: Tensor, plan: MaskPlan) -> Views:
    return Views(*torch.ops.dmjd.disjoint_masks(ids, key, *plan.op_arguments))


def assert_same(actual: Views, expected: Views) -> None:
    for name, left, right in zip(Views._fields, actual, expected, strict=True):
        assert torch.equal(left.cpu(), right.cpu()), name


def test_native_kernel_serves_cuda() -> None:
    assert status()["disjoint_masks"]["CUDA"] == "native"


@pytest.mark.parametrize("plan", list(plans()))
def test_cuda_equals_cpu(plan: MaskPlan) -> None:
    key = make_key(2**32 - 1, 5)
    expected = op(IDS, key, plan)
    for key_device in ("cpu", "cuda"):
        drawn = op(IDS.cuda(), key.to(key_device), plan)
        assert_same(drawn, expected)
        assert all(field.is_cuda and field.is_contiguous() for field in drawn)


@pytest.mark.parametrize("side", [32, 33, 64, 96, 97, 128])
@pytest.mark.parametrize("pattern", ["uniform", "beit"])
def test_large_grids(side: int, pattern: Any) -> None:
    """More tokens than threads; 96 x 96 units are the most that shared memory holds, beyond it is global memory."""
    plan, key, ids = mask_plan((side, side), views=2, mask_ratio=0.4, pattern=pattern), make_key(1, 2), IDS[:7]
    assert_same(op(ids.cuda(), key, plan), op(ids, key, plan))


def test_more_samples_than_scratch_blocks() -> None:
    plan, key, ids = mask_plan((97, 97), views=1, mask_ratio=0.75), make_key(1, 2), torch.arange(1100)
    assert_same(op(ids.cuda(), key, plan), op(ids, key, plan))


@pytest.mark.parametrize("sample", [90429002, 151956588, 153131561])
def test_equal_words_fall_to_the_lower_unit(sample: int) -> None:
    """Samples found by search, whose 147th and 148th lowest words of 196 are equal."""
    plan, key, ids = mask_plan((14, 14), views=1, mask_ratio=0.75), make_key(0, 0), torch.tensor([sample])
    assert_same(op(ids.cuda(), key, plan), op(ids, key, plan))


def test_batches() -> None:
    plan, key = mask_plan((14, 14), views=2, mask_ratio=0.6, pattern="block"), make_key(3, 1)
    ids = (torch.arange(5000) * 7919).cuda()
    whole = op(ids, key, plan)
    assert_same(op(ids, key, plan), whole)
    for part in (slice(0, 0), slice(7, 8), slice(3, None, 9)):
        assert_same(op(ids[part], key, plan), Views(*(field[:, part] for field in whole)))


def test_a_key_on_another_device_is_refused() -> None:
    plan = mask_plan((14, 14), views=1, mask_ratio=0.6)
    with pytest.raises(ValueError, match="seed and epoch must be on the CPU or on sample_ids' device"):
        draw_masks(IDS, plan, seed=torch.tensor(0, device="cuda"), epoch=0)


@pytest.mark.parametrize("pattern", ["uniform", "block", "beit"])
def test_cuda_graph_follows_a_key_on_the_device(pattern: Any) -> None:
    plan, key, ids = mask_plan((14, 14), views=2, mask_ratio=0.6, pattern=pattern), make_key(1, 0).cuda(), IDS.cuda()
    op(ids, key, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(ids, key, plan)
    for epoch in (1, 2):
        key.copy_(make_key(1, epoch))
        graph.replay()
        assert_same(result, op(IDS, make_key(1, epoch), plan))


def test_compiled_graphs_follow_an_epoch_on_the_device() -> None:
    """An op precedes the sampler, so that a launch on any stream but the current one would read too early."""
    plan = mask_plan((14, 14), views=2, mask_ratio=0.6, pattern="block")

    def draw(ids: Tensor, epoch: Tensor) -> Views:
        return draw_masks(ids + 1, plan, seed=1, epoch=epoch)

    compiled = torch.compile(draw, fullgraph=True, mode="reduce-overhead")
    for epoch in range(4):
        ids = torch.arange(512) + epoch
        assert_same(compiled(ids.cuda(), torch.tensor(epoch).cuda()), draw(ids, torch.tensor(epoch)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_second_card_while_the_first_is_current() -> None:
    plan, key = mask_plan((14, 14), views=2, mask_ratio=0.4, count=75, pattern="beit"), make_key(1, 0)
    with torch.cuda.device(0):
        drawn = op(IDS.to("cuda:1"), key, plan)
    assert drawn.mask.device == torch.device("cuda:1")
    assert_same(drawn, op(IDS, key, plan))
