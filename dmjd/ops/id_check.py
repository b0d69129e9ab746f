"""A debug switch for token ids: ``DMJD_CHECK_IDS=1`` finds ids that are out of range or named twice within a view.

The ops trust their ids, since looking at them would cost a pass over them and, on a CUDA device, a wait. The switch is
read once, when ``dmjd.ops`` is imported. Without it a wrong id gives wrong values, though kernels never leave a tensor.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

ENABLED = os.environ.get("DMJD_CHECK_IDS", "0") not in ("", "0")


def check_ids(argument: str, ids: Tensor, size: int) -> None:
    """Does nothing unless the switch is on.

    Args:
        argument: how messages call ``ids``, as in ``"gather_tokens: ids"``.
        ids: int64 ``[K, B, V]``.
        size: ids must be in ``[0, size)``.

    Raises:
        ValueError: if ids are wrong, on the CPU. On a CUDA device an assertion fails there, of which the host hears
            when it next waits; it never waits for the check itself. In a compiled graph it is a RuntimeError.
            Ids that torch.vmap maps over, fake ones and those on "meta" are not checked.
    """
    if not ENABLED or torch._C._functorch.is_batchedtensor(ids):
        return
    # Elsewhere, on a device, in a graph or of a fake tensor, an assertion is all that can be made.
    readable = type(ids) is Tensor and ids.device.type == "cpu" and not torch.compiler.is_compiling()
    ascending = ids.sort(dim=-1).values
    for holds, problem in (
        (((ids >= 0) & (ids < size)).all(), "must be in range(number of tokens)"),
        ((ascending[..., 1:] > ascending[..., :-1]).all(), "must be unique within a view"),
    ):
        if not readable:
            torch._assert_async(holds, f"{argument} {problem}")
        elif not holds:
            found = f"ids from {int(ids.min())} to {int(ids.max())} for {size} tokens"
            raise ValueError(f"{argument} {tuple(ids.shape)} {problem}, got {found}")
