"""Memory of a training step, measured on fake tensors, which have shapes and no bytes.

The step is the real one, forward and backward through autograd, under torch's FakeTensorMode; every storage counts from
its allocation until it is freed. So activation checkpointing, autocast's copies of weights, views that share a storage
and temporaries of the backward pass count as on a device. Not counted: allocations inside kernels and libraries (cuBLAS
and NCCL workspaces), fragmentation, and the savings of fused kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmjd.ops.short_attention import MOST_TOKENS

_BLOCK = 512
"""torch's CUDA allocator rounds every request up to this many bytes."""


_ALIGNED = 16
"""Columns of a bias that memory-efficient attention reads at a time."""


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that are allocated under this mode, until they are freed.

    Args:
        block: the size of each storage is rounded up to a multiple of this many bytes.

    Attributes:
        live: current bytes, without those set aside.
        peak: maximum of ``live``.
        aside: current bytes of the storages passed to :meth:`set_aside`.
        peak_total: maximum of ``live + aside``.
    """

    def __init__(self, block: int = 1) -> None:
        super().__init__()
        self._block = block
        self._storages: dict[int, tuple[int, bool]] = {}
        self.live = self.peak = self.aside = self.peak_total = 0

    def size(self, tensor: Tensor) -> int:
        """Rounded bytes of the storage of ``tensor``."""
        return -(-tensor.untyped_storage().nbytes() // self._block) * self._block

    def set_aside(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` in ``aside``, whether or not it was allocated under this mode."""
        self._enter(tensor, aside=True)

    def _enter(self, tensor: Tensor, aside: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = self.size(tensor)
        known = self._storages.get(key)
        if known is None:
            weakref.finalize(storage, self._leave, key).atexit = False
        elif known == (size, aside) or known[1]:
            return
        else:  # moved aside, or resized in place
            self._count(known[0], known[1], -1)
        self._storages[key] = size, aside
        self._count(size, aside, 1)

    def _leave(self, key: int) -> None:
        self._count(*self._storages.pop(key), -1)

    def _count(self, size: int, aside: bool, sign: int) -> None:
        if aside:
            self.aside += sign * size
        else:
            self.live += sign * size
        self.peak = max(self.peak, self.live)
        self.peak_total = max(self.peak_total, self.live + self.aside)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._enter(leaf, aside=False)
        return result


@contextmanager
def _layer_norm_as_on_cuda() -> Iterator[None]:
    """Autocast of the CPU leaves LayerNorm in the dtype of its input; that of CUDA computes it in float32.

    Not a mode of torch, which would be off while activation checkpointing recomputes in the backward pass.
    """
    plain = F.layer_norm

    def layer_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain(input.float(), *args, **kwargs)

    F.layer_norm = layer_norm
    try:
        yield
    finally:
        F.layer_norm = plain


@contextmanager
def _attention_as_on_cuda() -> Iterator[None]:
    """On the CPU attention with a bias that has a gradient keeps the scores of all pairs; on CUDA it does not.

    Not a mode of torch, for the reason of :func:`_layer_norm_as_on_cuda`.
    """
    plain = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if attn_mask is None or not attn_mask.requires_grad:
            return plain(query, key, value, attn_mask, *args, **kwargs)
        inputs = [query, key, value, attn_mask]
        if torch.is_autocast_enabled("cpu"):
            inputs = [each.to(torch.get_autocast_dtype("cpu")) for each in inputs]
        columns = attn_mask.shape[-1]
        if inputs[0].dtype == torch.bfloat16 and columns <= MOST_TOKENS.get(query.shape[-1], 0):
            inputs[3] = inputs[3][:1].clone().expand_as(inputs[3])  # short_attention reads one bias for all images
        elif columns % _ALIGNED:  # torch aligns rows of a bias, which copies one that is shared by the images
            inputs[3] = F.pad(inputs[3], (0, -columns % _ALIGNED))[..., :columns]
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out: Tensor = efficient(*inputs, compute_log_sumexp=True, scale=kwargs.get("scale"))[0]
        return out

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


class StepMemory(NamedTuple):
    """Bytes of one forward and backward pass, without parameters, optimizer state and inputs.

    saved: at the end of the forward pass: activations for the backward pass, and autocast's copies of weights.
    transient: the peak without gradients; at least ``saved``.
    with_gradients: the peak with gradients, each from the moment it is computed.
    """

    saved: int
    transient: int
    with_gradients: int


def trace_step(
    objective: nn.Module,
    inputs: tuple[Any, ...],
    *,
    precision: torch.dtype = torch.float32,
    as_on_cuda: bool = False,
) -> StepMemory:
    """Run one forward and backward pass of ``objective(*inputs).total`` and count its bytes.

    Args:
        objective: transformed by :func:`dmjd.parallel.apply.apply`, without gradients; they are dropped afterwards.
            It and ``inputs`` are fake tensors on "cpu" of the active FakeTensorMode, or real tensors, which compute.
        as_on_cuda: cast and round up as CUDA does; and keep of attention with a learned bias what CUDA does, which
            needs fake tensors. Otherwise bytes are those of the CPU: exact in float32; in bfloat16 torch's fake
            LayerNorm counts its statistics at half their size.
    """
    count = LiveBytes(_BLOCK if as_on_cuda else 1)
    for held in (*objective.parameters(), *objective.buffers(), *_tensors(inputs)):
        count.set_aside(held)
    held_before = count.aside
    with _gradients_aside(objective, count), count, _autocast(precision, as_on_cuda):
        total = objective(*inputs).total
        saved = count.live - count.size(total)
        total.backward()
        del total
    for parameter in objective.parameters():
        parameter.grad = None
    return StepMemory(saved, count.peak, count.peak_total - held_before)


def _tensors(inputs: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))


@contextmanager
def _gradients_aside(module: nn.Module, count: LiveBytes) -> Iterator[None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        count.set_aside(parameter.grad)

    hooks = [p.register_post_accumulate_grad_hook(hook) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@contextmanager
def _autocast(precision: torch.dtype, as_on_cuda: bool) -> Iterator[None]:
    lowered = precision != torch.float32
    with torch.autocast("cpu", precision, enabled=lowered), ExitStack() as stack:
        if as_on_cuda:
            stack.enter_context(_attention_as_on_cuda())
            if lowered:
                stack.enter_context(_layer_norm_as_on_cuda())
        yield
