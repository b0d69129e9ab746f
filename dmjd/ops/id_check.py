"""A debug check of token ids: ``DMJD_CHECK_IDS=1`` finds ids that are out of range or repeated within a view.

By default the ops do not check ids, which would cost a pass over them and a synchronisation on CUDA. The variable is
read once, on import of ``dmjd.ops``. Without the check wrong ids give wrong values, but no out-of-bounds access.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

ENABLED = os.environ.get("DMJD_CHECK_IDS", "0") not in ("", "0")


def check_ids(argument: str, ids: Tensor, size: int) -> None:
    """Check ``ids`` if ``DMJD_CHECK_IDS`` is set.

    Args:
        argument: name of ``ids`` in errors, as in ``"gather_tokens: ids"``.
        ids: int64 ``[K, B, V]``.
        size: ids must be in ``[0, size)``.

    Raises:
        ValueError: if ids are wrong, on the CPU. On CUDA a device-side assertion fails, which is reported at the next
            synchronisation; the check itself does not synchronise. In a compiled graph a RuntimeError is raised. Ids
            under torch.vmap, fake ids and ids on "meta" are not checked.
    """
    if not ENABLED or torch._C._functorch.is_batchedtensor(ids):
        return
    # On a device, in a graph and for fake tensors only an assertion is possible.
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
