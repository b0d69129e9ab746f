"""The ``dmjd`` operator namespace: Python owns schemas, references, fakes and gradients; native libraries add kernels.

Every op is defined by :func:`define` with a vectorised PyTorch reference registered as its CompositeExplicitAutograd
kernel, so it works on every device without a compiler. The dispatcher prefers a native kernel where one is registered.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._library.autograd import Info, make_autograd_impl
from torch.autograd import forward_ad

from dmjd.ops import _native

NAMESPACE = "dmjd"

# FRAGMENT, not DEF: DEF opens a namespace once per process, so a reload or a vendored copy would raise.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_references: dict[str, Callable[..., Any]] = {}
_in_triton: set[str] = set()
_for_hopper: set[str] = set()

# Found, not imported: the import is slow, and torch itself defers it until it compiles.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _is_native(name: str, device: str) -> bool:
    # Query the dispatcher: static registrations can run even if the import fails.
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", device)


def _on_card(arguments: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments)


def _until_loaded(name: str, reference: Callable[..., Any], library: str) -> Callable[..., Any]:
    """``reference``, which for CUDA tensors first tries to load the native kernel and dispatches to it.

    Once the CUDA library is loaded, the dispatcher calls its kernels directly.
    """

    @functools.wraps(reference)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _on_card((*args, *kwargs.values())):
            why = _native.why_missing(library)
            if why is not None:
                _native.warn_of_references(why)
            elif _is_native(name, "CUDA"):
                return getattr(torch.ops.dmjd, name).default(*args, **kwargs)
        return reference(*args, **kwargs)

    return kernel


def _transformed(arguments: tuple[Any, ...]) -> bool:
    """Whether a torch.func transform or forward-mode AD is active for a call."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    # A compiler traces dual levels without updating forward_ad._current_level.
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        isinstance(value, torch.Tensor) and torch._VF._unpack_dual(value, level=0)[1] is not None for value in arguments
    )


def _differentiable(
    name: str, reference: Callable[..., Any], autograd: tuple[Callable[..., None], Callable[..., Any]] | None
) -> Callable[..., Any]:
    """The Autograd kernel of an op: ``autograd`` in a plain backward pass, else torch's autograd of ``reference``."""
    setup_context, backward = autograd if autograd is not None else (None, None)
    below = make_autograd_impl(getattr(torch.ops.dmjd, name).default, Info(backward, setup_context))

    def kernel(keyset: Any, *args: Any) -> Any:
        if _transformed(args):
            return reference(*args)
        if (
            autograd is None
            and torch.is_grad_enabled()
            and any(getattr(value, "requires_grad", False) for value in args)
        ):
            return reference(*args)
        return below(keyset, *args)

    return kernel


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    autograd: tuple[Callable[..., None], Callable[..., Any]] | None = None,
    differentiable: bool = False,
    triton: Callable[..., Any] | None = None,
    library: str = "CUDA",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the reference of a new op.

    Under torch.func transforms and forward-mode AD a differentiable op runs its reference, which torch differentiates
    and vectorises.

    Args:
        schema: such as ``"name(Tensor x) -> Tensor"``.
        fake: shape and dtype function.
        autograd: ``(setup_context, backward)`` as for :func:`torch.library.register_autograd`.
        differentiable: without ``autograd``, whether torch differentiates the reference.
        triton: implementation for CUDA tensors in Triton, for an op without native CUDA kernels.
        library: library of the native CUDA kernels, "CUDA" or "HOPPER" (:mod:`dmjd.ops._native`).
    """

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.split("(", 1)[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        kernel = reference if triton is not None else _until_loaded(name, reference, library)
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
        if autograd is not None or differentiable:
            _library.impl(name, _differentiable(name, reference, autograd), "Autograd", with_keyset=True)
            _library.impl(name, reference, "FuncTorchBatched")
        if triton is not None:
            _in_triton.add(name)
            if not _native.disabled and _HAS_TRITON:
                _library.impl(name, triton, "CUDA")
        if library == "HOPPER":
            _for_hopper.add(name)
        _references[name] = reference
        return reference

    return register


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on ``device_type``; None if it is off, and for "meta", which has no autocast."""
    # torch.compile cannot trace torch.amp.is_autocast_available before torch 2.12.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """A context without autocast, in which a reference computes in the dtypes of its arguments."""
    return torch.autocast(device_type, enabled=False) if autocast_dtype(device_type) else nullcontext()


def reference(name: str) -> Callable[..., Any]:
    """The PyTorch reference of op ``name``, which defines its result.

    Raises:
        ValueError: if there is no such op.
    """
    if name not in _references:
        raise ValueError(f"reference: name must be one of {', '.join(sorted(_references))}, got {name!r}")
    return _references[name]


def status() -> dict[str, dict[str, str]]:
    """The kernel of every op on each device: ``{"op": {"CPU": "native", "CUDA": "reference: reason"}}``.

    Loads the CUDA library if it is not loaded yet, and so initialises CUDA if there is a device.
    """
    return {name: {device: _server(name, device) for device in _native.DEVICES} for name in sorted(_references)}


def _server(name: str, device: str) -> str:
    if name in _in_triton and device == "CUDA":
        why_not = _native.no_use(device) or (None if _HAS_TRITON else "the package triton is not installed")
        return "triton" if why_not is None else f"reference: {why_not}"
    why_no_library = _native.why_missing("HOPPER" if name in _for_hopper and device == "CUDA" else device)
    if _is_native(name, device):
        return "native"
    return f"reference: {why_no_library or 'no native kernel for this op'}"
