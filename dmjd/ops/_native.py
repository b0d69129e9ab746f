"""The native kernel libraries: which one serves a dispatch key, and why not.

``_C_cpu`` and ``_C_cuda`` are stable-ABI libraries (one binary for every torch >= 2.11 and every Python) that register
their kernels when they are imported. ``DMJD_DISABLE_EXT=1`` leaves them out, which is how a kernel bug is told from a
model bug.

``_C_hopper`` has kernels that an H100, H200 or GH200 alone can run, under the key CUDA too.

``_C_cuda`` waits for the first CUDA call. Kernels built for other cards would fail with "no kernel image is available",
so the cards are asked before it is loaded; but asking initialises CUDA, and a process that has done so can no longer
fork its data loading workers. An import must not do that.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dmjd._core import BuildInfo

_MODULES = {"CPU": "_C_cpu", "CUDA": "_C_cuda", "HOPPER": "_C_hopper"}
_INSTALL = "pip install --no-build-isolation ."

DEVICES = ("CPU", "CUDA")
"""Dispatch keys that native kernels exist for."""

HOPPER = (9, 0)
"""The compute capability of the only cards that run what is in ``_C_hopper``."""

disabled = os.environ.get("DMJD_DISABLE_EXT", "0") not in ("", "0")
"""Whether the user asked for the references."""


def covers(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a build for ``archs`` (as in TORCH_CUDA_ARCH_LIST: ``["8.0", "9.0+PTX"]``) runs on a card.

    Machine code serves the cards of its major version from its minor version on; with ``+PTX`` the driver compiles for
    newer ones. The suffix ``a`` ties both to the very card, ``f`` ties PTX to the major version.
    """
    for arch in archs:
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        assert match, f"setup.py lets no such architecture through: {arch}"
        built, suffix, ptx = (int(match[1]), int(match[2])), match[3], match[4]
        same_major = built[0] == capability[0] and suffix != "a"
        if built == capability or (built < capability and (same_major or (ptx and not suffix))):
            return True
    return False


def build_info() -> BuildInfo | None:
    """Compiler, oldest torch, CUDA toolkit and architectures of the native build. None without ``dmjd._core``."""
    try:
        from dmjd import _core
    except ImportError:
        return None
    return _core.build_info()


def no_use(device: str) -> str | None:
    """Why kernels of any kind would serve nobody on ``device``, or None."""
    if disabled:
        return "DMJD_DISABLE_EXT is set"
    if device != "CUDA":
        return None
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return None if torch.cuda.device_count() else "no CUDA device"


def _obstacle(library: str) -> str | None:
    """What speaks against loading the library, without having tried."""
    useless = no_use("CPU" if library == "CPU" else "CUDA")
    if useless is not None or library == "CPU":
        return useless
    if library == "HOPPER":
        capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        return None if HOPPER in capabilities else "no card of compute capability 9.0"
    info = build_info()
    archs = info["cuda_archs"] if info else []
    # Nothing tells, as where the libraries came without _core: trust whoever brought them.
    for card in range(torch.cuda.device_count() if archs else 0):
        capability = torch.cuda.get_device_capability(card)
        if not covers(archs, capability):
            number = ".".join(map(str, capability))
            return (
                f"built for {';'.join(archs)}, which does not cover cuda:{card} "
                f"({torch.cuda.get_device_name(card)}, {number}): rebuild with TORCH_CUDA_ARCH_LIST={number}"
            )
    return None


def _import(module: str) -> str | None:
    try:
        importlib.import_module(f"dmjd.{module}")
    except ModuleNotFoundError:
        return f"not built: `{_INSTALL}` in an environment with a compiler{'' if module == '_C_cpu' else ' and nvcc'}"
    except ImportError as error:
        return f"built, but does not load on torch {torch.__version__}: {error}"
    return None


@cache
def why_missing(library: str) -> str | None:
    """Why ``library`` ("CPU", "CUDA" or "HOPPER") serves nobody, or None once it does. The first question loads it."""
    return _obstacle(library) or _import(_MODULES[library])


@cache
def warn_of_references(why: str) -> None:
    """Say, once in a process, that CUDA tensors go through the references. Not to somebody who asked for it."""
    if not disabled:
        warnings.warn(
            f"dmjd.ops: CUDA tensors are served by the PyTorch references, which are right but slower: {why}. "
            "`dmjd ops status` lists every op.",
            UserWarning,
            stacklevel=2,
        )


# torch is imported above, so its libraries are in the process before ours look for them.
why_missing("CPU")
