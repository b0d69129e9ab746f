"""Load the native kernel libraries, or report why one is unavailable.

``_C_cpu`` and ``_C_cuda`` are stable-ABI libraries (one binary for every torch >= 2.11 and every Python) that register
their kernels on import. ``DMJD_DISABLE_EXT=1`` disables them, to tell kernel bugs from model bugs.

``_C_hopper`` has kernels for compute capability 9.0 (H100, H200, GH200), also under the key CUDA.

``_C_cuda`` is loaded by the first CUDA call. Kernels built for other cards fail with "no kernel image is available", so
the compute capability is checked first; that initialises CUDA, after which a process can no longer fork data loading
workers. An import must therefore not do it.
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
"""Dispatch keys with native kernels."""

HOPPER = (9, 0)
"""Compute capability of ``_C_hopper``."""

disabled = os.environ.get("DMJD_DISABLE_EXT", "0") not in ("", "0")
"""Whether native kernels are disabled by DMJD_DISABLE_EXT."""


def covers(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a build for ``archs`` (as in TORCH_CUDA_ARCH_LIST: ``["8.0", "9.0+PTX"]``) runs on a card.

    Machine code runs on cards of the same major and an equal or higher minor version; with ``+PTX`` the driver compiles
    for newer cards. The suffix ``a`` restricts both to this exact capability, ``f`` PTX to the major version.
    """
    for arch in archs:
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        assert match, f"setup.py rejects such an architecture: {arch}"
        built, suffix, ptx = (int(match[1]), int(match[2])), match[3], match[4]
        same_major = built[0] == capability[0] and suffix != "a"
        if built == capability or (built < capability and (same_major or (ptx and not suffix))):
            return True
    return False


def build_info() -> BuildInfo | None:
    """Compiler, oldest torch, CUDA toolkit and architectures of the native build; None without ``dmjd._core``."""
    try:
        from dmjd import _core
    except ImportError:
        return None
    return _core.build_info()


def no_use(device: str) -> str | None:
    """The reason why no native or Triton kernel can run on ``device``; None if one can."""
    if disabled:
        return "DMJD_DISABLE_EXT is set"
    if device != "CUDA":
        return None
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return None if torch.cuda.device_count() else "no CUDA device"


def _obstacle(library: str) -> str | None:
    """The reason not to try to load ``library``, or None."""
    useless = no_use("CPU" if library == "CPU" else "CUDA")
    if useless is not None or library == "CPU":
        return useless
    if library == "HOPPER":
        capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
        return None if HOPPER in capabilities else "no card of compute capability 9.0"
    info = build_info()
    archs = info["cuda_archs"] if info else []
    # Without _core the architectures are unknown, and the library is loaded unchecked.
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
    """The reason why ``library`` ("CPU", "CUDA" or "HOPPER") is not loaded, or None. The first call loads it."""
    return _obstacle(library) or _import(_MODULES[library])


@cache
def warn_of_references(why: str) -> None:
    """Warn once per process that CUDA tensors use the references, unless DMJD_DISABLE_EXT requests that."""
    if not disabled:
        warnings.warn(
            f"dmjd.ops: CUDA tensors are served by the PyTorch references, which are right but slower: {why}. "
            "`dmjd ops status` lists every op.",
            UserWarning,
            stacklevel=2,
        )


# After the import of torch, whose libraries this one links.
why_missing("CPU")
