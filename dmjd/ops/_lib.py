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

# FRAGMENT, not DEF: a namespace can be opened as DEF only once per process, so a reload or a vendored copy would raise.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_references: dict[str, Callable[..., Any]] = {}
_in_triton: set[str] = set()
_for_hopper: set[str] = set()

# Asked and not imported: that takes a while, and torch itself does so only when it compiles.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _is_native(name: str, device: str) -> bool:
    # Ask the dispatcher, not a flag: static registrations can run even when the import itself fails.
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", device)


def _on_card(arguments: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments)


def _until_loaded(name: str, reference: Callable[..., Any], library: str) -> Callable[..., Any]:
    """``reference``, which on a CUDA tensor first sees whether a native kernel can take the call.

    Once the CUDA library is loaded the dispatcher goes to its kernels by itself and never comes here again.
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
    """Whether a transform of torch.func, or forward-mode AD, is at work on a call."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    # A compiler traces a dual level without Python's count of them.
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        isinstance(value, torch.Tensor) and torch._VF._unpack_dual(value, level=0)[1] is not None for value in arguments
    )


def _differentiable(
    name: str, reference: Callable[..., Any], autograd: tuple[Callable[..., None], Callable[..., Any]] | None
) -> Callable[..., Any]:
    """The op's Autograd kernel: ``autograd`` in a plain backward pass, else what torch makes of ``reference``."""
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

    Under a transform of torch.func and under forward-mode AD a differentiable op runs its reference, which torch
    differentiates and vectorises by its own rules.

    Args:
        schema: reads ``"name(Tensor x) -> Tensor"``.
        fake: makes the result's shapes and dtypes from the arguments'.
        autograd: ``(setup_context, backward)`` as :func:`torch.library.register_autograd` takes them.
        differentiable: without ``autograd``, whether torch differentiates the reference where a gradient is asked for.
        triton: the op on CUDA tensors by kernels in Triton, for an op that no native library serves.
        library: of the op's CUDA kernels, "CUDA" or "HOPPER" (:mod:`dmjd.ops._native`).
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
    """The dtype that autocast casts to on such a device; None where it is off, and on "meta", which has no autocast."""
    # torch.amp.is_autocast_available would tell of every type, and torch.compile cannot trace it before torch 2.12.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """The context in which a reference computes in the dtypes that it was given."""
    return torch.autocast(device_type, enabled=False) if autocast_dtype(device_type) else nullcontext()


def reference(name: str) -> Callable[..., Any]:
    """The PyTorch reference of op ``name``: the definition that every kernel must equal."""
    return _references[name]


def status() -> dict[str, dict[str, str]]:
    """For every op, which kernel serves it on each device: ``{"op": {"CPU": "native", "CUDA": "reference: why"}}``.

    Loads the CUDA library if nothing has yet, and so initialises CUDA where there is a device.
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
