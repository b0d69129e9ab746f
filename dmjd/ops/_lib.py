"""The ``dmjd`` operator namespace: Python owns schemas, references, fakes and gradients; native libraries add kernels.

Every op is defined by :func:`define` with a vectorised PyTorch reference registered as its CompositeExplicitAutograd
kernel, so it works on every device without a compiler. ``_C_cpu`` and ``_C_cuda`` are stable-ABI libraries (one binary
for every torch >= 2.11 and every Python) that register ``CPU`` and ``CUDA`` kernels when they are imported; the
dispatcher prefers those. ``DMJD_DISABLE_EXT=1`` leaves them out, which is how a kernel bug is told from a model bug.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

NAMESPACE = "dmjd"

# FRAGMENT, not DEF: a namespace can be opened as DEF only once per process, so a reload or a vendored copy would raise.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_references: dict[str, Callable[..., Any]] = {}


def define(
    schema: str, *, fake: Callable[..., Any], autograd: tuple[Callable[..., None], Callable[..., Any]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the reference of a new op.

    Args:
        schema: reads ``"name(Tensor x) -> Tensor"``.
        fake: makes the result's shapes and dtypes from the arguments'.
        autograd: ``(setup_context, backward)`` as :func:`torch.library.register_autograd` takes them, or None for an op
            without a gradient.
    """

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.split("(", 1)[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        if autograd is not None:
            setup_context, backward = autograd
            torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_library)
        _references[name] = reference
        return reference

    return register


def reference(name: str) -> Callable[..., Any]:
    """The PyTorch reference of op ``name``: the definition that every kernel must equal."""
    return _references[name]


@dataclass(frozen=True)
class KernelLibrary:
    """One native library: which dispatch key it serves, and why it is absent if it is."""

    module: str
    device: str
    missing: str | None


def _load(module: str, device: str) -> KernelLibrary:
    if os.environ.get("DMJD_DISABLE_EXT", "0") not in ("", "0"):
        return KernelLibrary(module, device, "DMJD_DISABLE_EXT is set")
    if device == "CUDA" and torch.version.cuda is None:
        return KernelLibrary(module, device, "this torch was built without CUDA")
    try:
        importlib.import_module(f"dmjd.{module}")
    except ModuleNotFoundError:
        return KernelLibrary(
            module, device, "not built: reinstall with `pip install --no-build-isolation .` and a compiler"
        )
    except ImportError as error:
        return KernelLibrary(module, device, f"built, but does not load on torch {torch.__version__}: {error}")
    return KernelLibrary(module, device, None)


# torch is imported above, so its libraries are in the process before ours look for them.
libraries = (_load("_C_cpu", "CPU"), _load("_C_cuda", "CUDA"))


def status() -> dict[str, dict[str, str]]:
    """For every op, which kernel serves it on each device: ``{"op": {"CPU": "native", "CUDA": "reference: why"}}``."""
    table: dict[str, dict[str, str]] = {}
    for name in sorted(_references):
        table[name] = {}
        for library in libraries:
            # Ask the dispatcher, not a flag: static registrations can run even when the import itself fails.
            native = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", library.device)
            why = library.missing or "no native kernel for this op yet"
            table[name][library.device] = "native" if native else f"reference: {why}"
    return table
