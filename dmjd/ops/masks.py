"""The disjoint sampler: K masked views per image, each hiding new ground (the paper's Sec. III-B).

Which units a view hides is decided by sorting random words, one per (sample, view, unit), from ``philox.keyed_bits``:
the hidden units are those of lowest rank within their quota, ties going to the lower unit. The result is a pure
function of (seed, epoch, sample id, plan), so the same bits come out on every device and for every batch split.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmjd.ops._lib import define
from dmjd.ops.mask_plan import MaskPlan, mask_plan
from dmjd.ops.philox import WORD_RANGE, Domain, keyed_bits, make_key
from dmjd.ops.views import Views


def _lowest(scores: Tensor, count: int) -> Tensor:
    """Bool mask of the ``count`` lowest scores of each row, ties to the lower index."""
    chosen = scores.argsort(dim=-1, stable=True)[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)


def _hidden_units(words: list[Tensor], hidden: int, fresh: Sequence[int], regulation: str) -> Tensor:
    """bool ``[K, B, U]`` from one ``[B, U]`` tensor of random words per view."""
    if regulation == "none":
        return torch.stack([_lowest(view_words, hidden) for view_words in words])
    if regulation == "complementary":
        order = words[0].argsort(dim=-1, stable=True)
        kept = order.shape[-1] - hidden
        keep_sets = [order[:, view * kept : (view + 1) * kept] for view in range(len(fresh))]
        return torch.stack([torch.ones_like(order, dtype=torch.bool).scatter(-1, ids, False) for ids in keep_sets])
    covered = torch.zeros_like(words[0], dtype=torch.bool)
    views = []
    for view_words, new in zip(words, fresh, strict=True):
        # Adding 2**32 ranks the other class behind every candidate; words themselves stay below it.
        view = _lowest(view_words + covered * WORD_RANGE, new) | _lowest(
            view_words + ~covered * WORD_RANGE, hidden - new
        )
        covered = covered | view
        views.append(view)
    return torch.stack(views)


def units_to_tokens(units: Tensor, unit_grid: Sequence[int], block: Sequence[int]) -> Tensor:
    """``[..., U]`` per unit -> ``[..., N]`` per token in raster order."""
    per_unit = units.unflatten(-1, tuple(unit_grid))
    return per_unit.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1).flatten(-2)


def _split_sizes(sample_ids: Tensor, grid: Sequence[int], block: Sequence[int], hidden: int) -> tuple[int, int, int]:
    tokens = grid[0] * grid[1]
    masked = hidden * block[0] * block[1]
    return sample_ids.shape[0], tokens - masked, masked


def _fake(
    sample_ids: Tensor, key: Tensor, grid: list[int], block: list[int], hidden: int, fresh: list[int], regulation: str
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
    "disjoint_masks(Tensor sample_ids, Tensor key, int[2] grid, int[2] block, int hidden, int[] fresh, str regulation)"
    " -> (Tensor visible, Tensor masked, Tensor restore, Tensor mask)",
    fake=_fake,
)
def _reference(
    sample_ids: Tensor, key: Tensor, grid: list[int], block: list[int], hidden: int, fresh: list[int], regulation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    unit_grid = (grid[0] // block[0], grid[1] // block[1])
    units = unit_grid[0] * unit_grid[1]
    words = [keyed_bits(sample_ids, units, key=key, domain=Domain.MASK, lane=view) for view in range(len(fresh))]
    mask = units_to_tokens(_hidden_units(words, hidden, fresh, regulation), unit_grid, block)
    visible = _split_sizes(sample_ids, grid, block, hidden)[1]
    order = mask.long().argsort(dim=-1, stable=True)  # visible tokens first, each part in raster order
    restore = torch.where(mask, visible + mask.cumsum(-1) - 1, (~mask).cumsum(-1) - 1)
    # Clones: an op's outputs must not share storage, and contiguous() copies nothing where a batch is empty or single.
    contiguous = torch.contiguous_format
    shown = order[..., :visible].clone(memory_format=contiguous)
    return shown, order[..., visible:].clone(memory_format=contiguous), restore, mask


def draw_masks(sample_ids: Tensor, plan: MaskPlan, *, seed: int | Tensor, epoch: int | Tensor) -> Views:
    """Draw the views of ``plan`` for a batch of samples.

    Args:
        sample_ids: int64 ``[B]``; its device is where the masks are made.
        plan: from :func:`~dmjd.ops.mask_plan.mask_plan`.
        seed, epoch: integers in ``[0, 2**32)``, or 0-d int64 tensors.

    Raises:
        TypeError: if ``sample_ids`` is not int64. ValueError: if it is not one-dimensional, or a key is out of range.
    """
    if sample_ids.dtype != torch.int64:
        raise TypeError(f"sample_ids must be int64, got {sample_ids.dtype}")
    if sample_ids.ndim != 1:
        raise ValueError(f"sample_ids must be one-dimensional [B], got shape {tuple(sample_ids.shape)}")
    key = make_key(seed, epoch)
    return Views(
        *torch.ops.dmjd.disjoint_masks(sample_ids, key, plan.grid, plan.block, plan.hidden, plan.fresh, plan.regulation)
    )


def disjoint_masks(
    sample_ids: Tensor,
    *,
    grid: tuple[int, int],
    views: int,
    mask_ratio: float,
    pred_ratio: float | None = None,
    pattern: str = "uniform",
    block: tuple[int, int] = (2, 2),
    regulation: str = "disjoint",
    count: int | None = None,
    rounding: str = "exact",
    seed: int | Tensor,
    epoch: int | Tensor,
) -> Views:
    """K masked views of each sample, under the paper's disjoint regulation (Eq. 3).

    Every view hides exactly the same number of units; the units that views after the first hide for the first time are
    split evenly over them, the remainder going to the earlier ones, and chosen uniformly at random. With ``views=2``
    and ``pred_ratio=None`` this is the official behaviour (at m_corr .6 on 49 units, view 2 hides all 19 units that
    view 1 shows and 11 of the 30 it hid).

    Args:
        sample_ids: int64 ``[B]``, stable names of the samples; masks of a sample do not depend on its batch.
        seed, epoch: integers in ``[0, 2**32)``, or 0-d int64 tensors.
        Every other argument: see :func:`~dmjd.ops.mask_plan.mask_plan`.

    Returns:
        :class:`~dmjd.ops.views.Views` on ``sample_ids``' device.

    Raises:
        ValueError: on a combination that cannot be, saying which numbers would work. TypeError: on a wrong dtype.
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
