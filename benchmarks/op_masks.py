"""The disjoint sampler against the official code's formulation, numpy's, and a copy of its outputs.

    python benchmarks/op_masks.py [--device cuda|cpu] [--json FOLDER]

On the CPU everything runs on one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from timing import BUFFERS, Table, copy_bytes_per_us, device_name, device_us, host_us
from torch import Tensor

from dmjd.ops import MaskPlan, Views, make_key, mask_plan, reference

BATCH, GRID, TOKENS = 256, (14, 14), 196
CASES: dict[str, dict[str, Any]] = {
    "block .6, K=2": {"views": 2, "mask_ratio": 0.6, "pattern": "block"},
    "uniform .75, K=2": {"views": 2, "mask_ratio": 0.75},
    "beit 75, K=2": {"views": 2, "mask_ratio": 0.4, "count": 75, "pattern": "beit"},
}


def official(batch: int, plan: MaskPlan, device: str) -> Callable[[], tuple[Tensor, ...]]:
    """Two views as the official code draws them: noise is sorted for the first, and one permutation for the whole batch
    takes the second's units from the two parts of the first."""
    units, keep, extra = plan.units, plan.units - plan.hidden, plan.fresh[1]

    def outputs(order: Tensor) -> tuple[Tensor, ...]:
        restore = order.argsort(dim=1)
        mask = torch.ones(batch, units, device=device)
        mask[:, :keep] = 0
        mask = mask.gather(1, restore)
        if plan.tokens_per_unit == 1:
            return order[:, :keep], order[:, keep:], restore, mask
        rows, columns = plan.unit_grid
        tokens = mask.view(batch, rows, columns)
        tokens = tokens.repeat_interleave(plan.block[0], 1).repeat_interleave(plan.block[1], 2).flatten(1)
        kept = keep * plan.tokens_per_unit
        order = tokens.argsort(dim=1, stable=True)
        return order[:, :kept], order[:, kept:], order.argsort(dim=1), tokens

    def draw() -> tuple[Tensor, ...]:
        order = torch.rand(batch, units, device=device).argsort(dim=1)
        first = outputs(order)
        shown, hidden = order[:, :keep], order[:, keep:]
        shown = shown[:, torch.randperm(keep, device=device)]
        hidden = hidden[:, torch.randperm(plan.hidden, device=device)]
        again = plan.hidden - extra
        second = outputs(torch.cat((shown[:, extra:], hidden[:, again:], shown[:, :extra], hidden[:, :again]), dim=1))
        return tuple(torch.stack(pair) for pair in zip(first, second, strict=True))

    return draw


def numpy_sort(views: int, keep: int) -> Callable[[], tuple[Any, ...]]:
    """Independent views by numpy: noise, its order, the order's order, and the mask through it."""
    generator = np.random.default_rng(0)

    def draw() -> tuple[Any, ...]:
        order = generator.random((views, BATCH, TOKENS)).argsort(axis=-1)
        restore = order.argsort(axis=-1)
        mask = np.ones((views, BATCH, TOKENS), bool)
        mask[..., :keep] = False
        return order[..., :keep], order[..., keep:], restore, np.take_along_axis(mask, restore, -1)

    return draw


def ours(ids: Tensor, key: Tensor, plan: MaskPlan) -> Views:
    return Views(*torch.ops.dmjd.disjoint_masks(ids, key, *plan.op_arguments))


def by_reference(ids: Tensor, key: Tensor, plan: MaskPlan) -> Views:
    return Views(*reference("disjoint_masks")(ids, key, *plan.op_arguments))


def output_bytes(plan: MaskPlan) -> int:
    """int64 visible, masked and restore, and bool mask, of every view."""
    return plan.views * BATCH * TOKENS * (8 + 8 + 1)


def on_cuda(table: Table) -> None:
    speed = copy_bytes_per_us()
    compiled = torch.compile(by_reference, fullgraph=True)
    batches = [torch.arange(BATCH, device="cuda") + BATCH * index for index in range(BUFFERS)]
    key = make_key(1, 2).cuda()
    for case, request in CASES.items():
        plan = mask_plan(GRID, **request)
        floor = output_bytes(plan) / speed  # a write alone: there is next to nothing to read
        if request.get("pattern") != "beit":
            draw = official(BATCH, plan, "cuda")
            time, how = device_us([draw] * BUFFERS)
            table.add(case, "official formulation", time, floor, how)
            table.add(case, "official, eager host", host_us([synchronised(draw)]), None, "wall time")
        if request.get("pattern") == "block":  # one will do: it takes a minute to compile, and BEiT's many
            time, how = device_us([lambda ids=ids, plan=plan: compiled(ids, key, plan) for ids in batches])
            table.add(case, "compiled reference", time, floor, how)
        calls = [lambda ids=ids, plan=plan: ours(ids, key, plan) for ids in batches]
        time, how = device_us(calls)
        table.add(case, "ours", time, floor, how)
        table.add(case, "ours, eager host", host_us([synchronised(calls[0])]), None, "wall time")
        outputs = [ours(ids, key, plan) for ids in batches]
        targets = [torch.empty_like(field) for field in outputs[0]]

        def copy(views: Views, targets: list[Tensor] = targets) -> None:
            for target, field in zip(targets, views, strict=True):
                target.copy_(field)

        time, how = device_us([lambda views=views: copy(views) for views in outputs])
        table.add(case, "copy of the outputs", time, floor, f"{how}, four copies")


def synchronised(call: Callable[..., Any]) -> Callable[[], None]:
    def wait() -> None:
        call()
        torch.cuda.synchronize()

    return wait


def on_cpu(table: Table) -> None:
    key = make_key(1, 2)
    batches = [torch.arange(BATCH) + BATCH * index for index in range(BUFFERS)]
    for case, request in CASES.items():
        plan = mask_plan(GRID, **request)
        visible = TOKENS - plan.hidden * plan.tokens_per_unit
        baseline = table.add(case, "numpy argsort", host_us([numpy_sort(plan.views, visible)]))
        if request.get("pattern") != "beit":
            table.add(case, "official formulation", host_us([official(BATCH, plan, "cpu")]))
        table.add(
            case, "reference", host_us([lambda ids=ids, plan=plan: by_reference(ids, key, plan) for ids in batches])
        )
        time = host_us([lambda ids=ids, plan=plan: ours(ids, key, plan) for ids in batches])
        table.add(case, "ours", time, None, f"{baseline.median_us / time:.1f} x numpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", help="folder for the table as JSON")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    table = Table("op_masks", device_name(options.device))
    (on_cuda if options.device == "cuda" else on_cpu)(table)
    if options.json:
        table.save(options.json)


if __name__ == "__main__":
    main()
