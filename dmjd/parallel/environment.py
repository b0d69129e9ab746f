"""Environment variables that many ranks on a cluster need and that torch reads once. What a user has set stands."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

FLIGHT = "flight"
"""The folder, inside a run's, of what ranks remember of their last collectives when a step's time-out ends them."""


def prepare_environment(run: Path) -> None:
    """Compiler caches on the node's own disk, and the flight recorder of collectives on from the start."""
    # Ranks of many nodes that compile on one shared home wait for its locks, or meet half-written kernels.
    cache = Path(tempfile.gettempdir()) / f"dmjd-{os.getuid()}"
    recorded = str((run / FLIGHT / "rank_").absolute())
    for name, value in {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": recorded,
    }.items():
        os.environ.setdefault(name, value)
