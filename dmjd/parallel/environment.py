"""The process around a run: environment variables that torch reads once, garbage collection and imports of its start,
and inductor's compile workers.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dmjd.errors import StorageError
from dmjd.files import private_folder, standing_place

if TYPE_CHECKING:
    import torch

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


_thresholds: tuple[int, int, int] | None = None


def prepare_imports() -> None:
    """To be called before torch is imported. Until :func:`collect_as_usual`, garbage is collected less often: imports
    and torch.compile's trace make millions of objects that stay, and collections take a sixth of the time of both."""
    global _thresholds
    _thresholds = _thresholds or gc.get_threshold()
    gc.set_threshold(200_000)
    _keep_bytecode()


def _keep_bytecode() -> None:
    """If torch was installed without bytecode and Python cannot write it there, as in many containers, keep bytecode in
    a private folder, one for each set of installed packages: to compile torch's modules takes 8 s of every start."""
    spec = find_spec("torch")
    if sys.pycache_prefix is not None or spec is None or spec.cached is None or Path(spec.cached).is_file():
        return
    if not sys.dont_write_bytecode and os.access(standing_place(Path(spec.cached)), os.W_OK):
        return
    with suppress(StorageError, OSError):
        # Python compares the time and the size of a source, which two images of one path may have in common.
        packages = "\n".join(sorted(os.listdir(Path(spec.cached).parents[2])))
        key = hashlib.sha256(os.fsencode(packages)).hexdigest()[:16]
        sys.pycache_prefix = str(private_folder("dmjd") / "python" / key)
        sys.dont_write_bytecode = False


def collect_as_usual() -> None:
    """After the start of a run: later collections do not look at what is there now."""
    global _thresholds
    if _thresholds is not None:
        gc.freeze()
        gc.set_threshold(*_thresholds)
        _thresholds = None


@contextmanager
def prepared_meanwhile(device: torch.device, compiles: bool, blocked: Collection[signal.Signals]) -> Iterator[None]:
    """Initialise ``device`` and import what torch.compile needs in a thread, which takes as long as to draw the initial
    weights: drawing leaves Python to other threads. No process is forked before both are done.

    Args:
        blocked: signals that compile workers do not receive, if the imports start any; see dmjd.train.signals.
    """

    def act() -> None:
        import torch

        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        with suppress(Exception):  # raised again in the other thread, which needs both
            if device.index is not None:
                torch.cuda.set_device(device)  # of this thread; otherwise the first device gets a context too
            torch.empty(1, device=device)
            if compiles:
                import_module("torch._dynamo.repro.after_dynamo")
                import_module("torch._inductor.compile_fx")

    thread = threading.Thread(target=act, name="imports", daemon=False)  # as in HostCopies.prepare
    thread.start()
    try:
        yield
    finally:
        thread.join()


def dismiss_compile_workers() -> None:
    """Stop inductor's idle compile workers, if there are any; inductor starts new ones when it needs them.

    Otherwise the process waits ten seconds at its end: workers inherit the run's blocked signals, also TERM.
    """
    compilation = sys.modules.get("torch._inductor.async_compile")
    if compilation is not None and compilation.AsyncCompile.process_pool.cache_info().currsize:
        with suppress(AttributeError, OSError, RuntimeError):  # a pool of another kind, or one that is closed
            compilation.AsyncCompile.process_pool().quiesce()
