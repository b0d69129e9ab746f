"""The disjoint mask sampler: K masked views per image, each of which masks new units (the paper's Sec. III-B).

Each (sample, view, unit) has a random 32-bit word from ``philox.keyed_bits``; a view masks the units with the lowest
words within a quota, ties going to the lower unit. There are two quotas: one for units that no earlier view masked, and
one for the others. Under BEiT's pattern (Bao et al., ICLR 2022, Algorithm 1) rectangles are masked first, unit by unit
in raster order until a quota is used up, and the lowest words fill the rest. All arithmetic is on integers. The result
is a pure function of (seed, epoch, sample id, plan), bitwise equal on every device and for every batch split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmjd.ops._lib import define
from dmjd.ops.arguments import require_tensors, shown
from dmjd.ops.mask_plan import MaskPlan, Pattern, Regulation, Rounding, mask_plan
from dmjd.ops.philox import WORD_RANGE, Domain, keyed_bits, make_key
from dmjd.ops.views import Views

MAX_FAILURES = 10
"""As in BEiT, a view gets no more rectangles after this many consecutive attempts without a masked unit."""

MAX_ATTEMPTS = 128
"""Limit of the attempts of a view, whose random words the CUDA kernel draws in advance. Observed: below 100."""


def _lowest(words: Tensor, eligible: Tensor, count: int | Tensor) -> Tensor:
    """Bool mask of the ``count`` lowest eligible words of each row, ties to the lower index; ``count`` is an integer or
    ``[B, 1]``."""
    # Adding 2**32 ranks ineligible words after all others.
    order = (words + ~eligible * WORD_RANGE).argsort(dim=-1, stable=True)
    leading = (torch.arange(words.shape[-1], device=words.device) < count).expand_as(order)
    return torch.zeros_like(eligible).scatter(-1, order, leading)


def _rounded_root(area: Tensor, aspect: Tensor) -> Tensor:
    """sqrt(area * aspect) to the nearest integer; ``area`` has 8 fractional bits and ``aspect`` 16.

    With s = isqrt(floor(4 x)) it is (s + 1) // 2. The double root of an integer below 2**52 never crosses an integer.
    """
    return ((area * aspect >> 22).double().sqrt().long() + 1) // 2


def _rectangles(
    words: Tensor, unit_grid: tuple[int, int], quota: tuple[int, int], covered: Tensor, smallest: int, aspects: Tensor
) -> Tensor:
    """Bool ``[B, U]``: units of one view masked by BEiT's rectangles.

    Args:
        words: ``[B, attempts, 4]``, random words for area, aspect, top and left of each attempt.
        quota: numbers of units to mask among those that no earlier view masked, and among the others.
        covered: bool ``[B, U]``, units masked by earlier views.
    """
    rows = torch.arange(unit_grid[0], device=words.device).unsqueeze(-1)
    columns = torch.arange(unit_grid[1], device=words.device)
    kinds = torch.stack((~covered, covered), dim=1)
    hidden = torch.zeros_like(covered)
    quotas = torch.tensor(quota, device="cpu").to(covered.device, non_blocking=True).expand(len(covered), 2)
    failures = torch.zeros_like(quotas[:, 0])
    for area_word, aspect_word, top_word, left_word in words.permute(1, 2, 0):
        if failures.device.type == "cpu" and bool(
            (failures >= MAX_FAILURES).all()
        ):  # on a device this would synchronise
            break
        remaining = quotas.sum(-1)
        low, high = remaining.clamp(max=smallest), remaining.clamp(min=smallest)
        area = (low << 8) + (area_word * ((high - low << 8) + 1) >> 32)
        level = aspect_word * len(aspects) >> 32
        height, width = _rounded_root(area, aspects[level]), _rounded_root(area, aspects[-1 - level])
        # Strictly smaller than the grid, as in BEiT.
        fits = (height >= 1) & (width >= 1) & (height < unit_grid[0]) & (width < unit_grid[1])
        top = (top_word * (unit_grid[0] - height + 1).clamp(min=1) >> 32).view(-1, 1, 1)
        left = (left_word * (unit_grid[1] - width + 1).clamp(min=1) >> 32).view(-1, 1, 1)
        inside = (rows >= top) & (rows < top + height.view(-1, 1, 1))
        inside = inside & (columns >= left) & (columns < left + width.view(-1, 1, 1))
        candidates = inside.flatten(1) & ~hidden
        added = candidates.sum(-1)
        accepted = fits & (added > 0) & (added <= remaining) & (failures < MAX_FAILURES)
        by_kind = kinds & (candidates & accepted.unsqueeze(-1)).unsqueeze(1)
        taken = by_kind & (by_kind.cumsum(-1) <= quotas.unsqueeze(-1))  # in raster order, while the quota lasts
        quotas = quotas - taken.sum(-1)
        hidden = hidden | taken.any(1)
        # A view that reached MAX_FAILURES stays there.
        failures = torch.where(taken.flatten(1).any(-1), 0, failures + 1)
    return hidden


def _complementary_views(words: Tensor, hidden: int, views: int) -> Tensor:
    """bool ``[K, B, U]``: each view keeps the units with the lowest words that no earlier view kept."""
    order = words.argsort(dim=-1, stable=True)
    kept = order.shape[-1] - hidden
    keep_sets = [order[:, view * kept : (view + 1) * kept] for view in range(views)]
    return torch.stack([torch.ones_like(order, dtype=torch.bool).scatter(-1, ids, False) for ids in keep_sets])


def units_to_tokens(units: Tensor, unit_grid: Sequence[int], block: Sequence[int]) -> Tensor:
    """Expand ``[..., U]`` per unit to ``[..., N]`` per token in raster order."""
    per_unit = units.unflatten(-1, tuple(unit_grid))
    return per_unit.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1).flatten(-2)


def _split_sizes(sample_ids: Tensor, grid: Sequence[int], block: Sequence[int], hidden: int) -> tuple[int, int, int]:
    tokens = grid[0] * grid[1]
    masked = hidden * block[0] * block[1]
    return sample_ids.shape[0], tokens - masked, masked


def _fake(
    sample_ids: Tensor,
    key: Tensor,
    grid: list[int],
    block: list[int],
    hidden: int,
    fresh: list[int],
    regulation: str,
    smallest: int = 1,
    aspects: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, visible, masked = _split_sizes(sample_ids, grid, block, hidden)
    views = len(fresh)
    return (
        sample_ids.new_empty(views, batch, visible),
        sample_ids.new_empty(views, batch, masked),
        sample_ids.new_empty(views, batch, visible + masked),
        sample_ids.new_empty(views, batch, visible + masked, dtype=torch.bool),
    )


@define(
    "disjoint_masks(Tensor sample_ids, Tensor key, int[2] grid, int[2] block, int hidden, int[] fresh, str regulation,"
    " int smallest=1, int[] aspects=[]) -> (Tensor visible, Tensor masked, Tensor restore, Tensor mask)",
    fake=_fake,
)
def _reference(
    sample_ids: Tensor,
    key: Tensor,
    grid: list[int],
    block: list[int],
    hidden: int,
    fresh: list[int],
    regulation: str,
    smallest: int = 1,
    aspects: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    unit_grid = (grid[0] // block[0], grid[1] // block[1])
    units = unit_grid[0] * unit_grid[1]

    def draw(words: int, domain: Domain, view: int) -> Tensor:
        return keyed_bits(sample_ids, words, key=key, domain=domain, lane=view)

    def hide(view: int, covered: Tensor, new: int) -> Tensor:
        """bool ``[B, U]``: mask ``new`` units outside ``covered`` and the rest inside, rectangles first."""
        chosen = torch.zeros_like(covered)
        if aspects:
            words = draw(4 * MAX_ATTEMPTS, Domain.RECTANGLE, view).unflatten(-1, (MAX_ATTEMPTS, 4))
            ratios = torch.tensor(aspects, device="cpu").to(covered.device, non_blocking=True)
            chosen = _rectangles(words, unit_grid, (new, hidden - new), covered, smallest, ratios)
        words = draw(units, Domain.MASK, view)
        for kind, quota in ((~covered, new), (covered, hidden - new)):
            left = quota - (chosen & kind).sum(-1, keepdim=True)
            chosen = chosen | _lowest(words, kind & ~chosen, left)
        return chosen

    nothing = torch.zeros(sample_ids.shape[0], units, dtype=torch.bool, device=sample_ids.device)
    if regulation == "complementary":
        hides = _complementary_views(draw(units, Domain.MASK, 0), hidden, len(fresh))
    elif regulation == "none":
        hides = torch.stack([hide(view, nothing, hidden) for view in range(len(fresh))])
    else:
        hides = torch.empty(0, *nothing.shape, dtype=torch.bool, device=sample_ids.device)
        for view, new in enumerate(fresh):
            hides = torch.cat((hides, hide(view, hides.any(0), new).unsqueeze(0)))

    mask = units_to_tokens(hides, unit_grid, block)
    visible = _split_sizes(sample_ids, grid, block, hidden)[1]
    order = mask.long().argsort(dim=-1, stable=True)  # visible tokens first, each part in raster order
    restore = torch.where(mask, visible + mask.cumsum(-1) - 1, (~mask).cumsum(-1) - 1)
    # clone: outputs of an op must not share storage, and contiguous() does not copy an empty or single batch.
    contiguous = torch.contiguous_format
    shown = order[..., :visible].clone(memory_format=contiguous)
    return shown, order[..., visible:].clone(memory_format=contiguous), restore, mask


def draw_masks(sample_ids: Tensor, plan: MaskPlan, *, seed: int | Tensor, epoch: int | Tensor) -> Views:
    """Draw the views of ``plan`` for a batch of samples.

    Args:
        sample_ids: int64 ``[B]``, on the device of the result.
        plan: from :func:`~dmjd.ops.mask_plan.mask_plan`.
        seed, epoch: integers in ``[0, 2**32)``, or 0-d int64 tensors.

    Raises:
        TypeError: if ``sample_ids`` is not an int64 tensor, or seed or epoch not an integer.
        ValueError: if it is not one-dimensional, or seed or epoch is out of range or on a third device.
    """
    require_tensors("disjoint_masks", sample_ids=sample_ids)
    if not isinstance(plan, MaskPlan):
        raise TypeError(f"draw_masks: plan must be a MaskPlan, as mask_plan(...) returns it, got {shown(plan)}")
    if sample_ids.dtype != torch.int64:
        raise TypeError(f"sample_ids must be int64, got {sample_ids.dtype}")
    if sample_ids.ndim != 1:
        raise ValueError(f"sample_ids must be one-dimensional [B], got shape {tuple(sample_ids.shape)}")
    key = make_key(seed, epoch)
    if key.device.type != "cpu" and key.device != sample_ids.device:
        raise ValueError(
            f"seed and epoch must be on the CPU or on sample_ids' device, got {key.device}, {sample_ids.device}"
        )
    return Views(*torch.ops.dmjd.disjoint_masks(sample_ids, key, *plan.op_arguments))


def disjoint_masks(
    sample_ids: Tensor,
    *,
    grid: tuple[int, int] | int,
    views: int,
    mask_ratio: float,
    pred_ratio: float | None = None,
    pattern: Pattern = "uniform",
    block: tuple[int, int] | int = (2, 2),
    regulation: Regulation = "disjoint",
    count: int | None = None,
    rounding: Rounding = "exact",
    seed: int | Tensor,
    epoch: int | Tensor,
) -> Views:
    """K masked views of each sample, under the paper's disjoint regulation (Eq. 3).

    Every view masks the same number of units. The newly masked units are split evenly over the views after the first,
    the remainder going to the earlier ones, and chosen uniformly at random. ``views=2`` with ``pred_ratio=None`` is the
    official behaviour (at m_corr .6 of 49 units, view 2 masks all 19 visible units of view 1 and 11 of its 30 masked
    ones).

    Args:
        sample_ids: int64 ``[B]``, stable ids; the masks of a sample do not depend on its batch.
        seed, epoch: integers in ``[0, 2**32)``, or 0-d int64 tensors.
        Other arguments: see :func:`~dmjd.ops.mask_plan.mask_plan`.

    Returns:
        :class:`~dmjd.ops.views.Views` on ``sample_ids``' device.

    Raises:
        TypeError: on a wrong type or dtype.
        ValueError: if no mask meets the arguments; the message names values that work.
    """
    plan = mask_plan(
        grid,
        views=views,
        mask_ratio=mask_ratio,
        pred_ratio=pred_ratio,
        pattern=pattern,
        block=block,
        regulation=regulation,
        count=count,
        rounding=rounding,
    )
    return draw_masks(sample_ids, plan, seed=seed, epoch=epoch)
