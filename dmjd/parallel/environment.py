"""The process around a run: environment variables that torch reads once, and inductor's compile workers."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from dmjd.files import private_folder

FLIGHT = "flight"
"""The folder in a run's of the flight records, which ranks write at a step's time-out."""

COMPILER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variable -> folder below the private one."""


def prepare_environment(run: Path) -> None:
    """Compiler caches on the node's own disk, and the flight recorder of collectives on from the start. Variables that
    are set already stay as they are.

    Raises:
        StorageError: if the caches need a folder below TMPDIR and none can be made.
    """
    # A cache in a shared home is locked by other nodes and may hold half-written kernels. The folder is private, since
    # code is loaded from it.
    missing = [name for name in COMPILER_CACHES if name not in os.environ]
    if missing:
        cache = private_folder("dmjd")
        os.environ.update({name: str(cache / COMPILER_CACHES[name]) for name in missing})
    recorded = str((run / FLIGHT / "rank_").absolute())
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": recorded,
    }.items():
        os.environ.setdefault(name, value)


def dismiss_compile_workers() -> None:
    """Stop inductor's idle compile workers, if there are any; inductor starts new ones when it needs them.

    Otherwise the process waits ten seconds at its end: workers inherit the run's blocked signals, also TERM.
    """
    compilation = sys.modules.get("torch._inductor.async_compile")
    if compilation is not None and compilation.AsyncCompile.process_pool.cache_info().currsize:
        with suppress(AttributeError, OSError, RuntimeError):  # a pool of another kind, or one that is closed
            compilation.AsyncCompile.process_pool().quiesce()
