"""Copies of a training's state in the host's memory, from which a checkpoint is written while the training goes on."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


def make_stager(device: torch.device) -> DefaultStager:
    """One whose memory is kept from copy to copy, and pinned for a CUDA device."""
    on_cuda = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=on_cuda,
            use_non_blocking_copy=on_cuda,
            use_shared_memory=False,
            use_async_staging=False,
        )
    )
