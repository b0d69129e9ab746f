"""Copies of the training state in host memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

import copy
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

logger = logging.getLogger("dmjd")

_Kind = tuple[torch.Size, torch.dtype]


class HostCopies:
    """Host buffers that are reused by every copy, pinned for a CUDA device.

    On CUDA a copy is made on a stream of its own while the device computes: :meth:`wait` before it is read, and
    :meth:`before_change` before the state changes. Torch's own stager fails on a state that has other values than
    plain tensors (torch 2.11).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = defaultdict[_Kind, list[Tensor]](list)
        self._pins = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pins else None
        self._copied: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def prepare(self, state: Any) -> None:
        """Allocate the buffers of :meth:`take` for such a ``state`` in a thread; tensors may be on "meta".

        Pinning takes a second for 2 GiB. If it fails, one warning is logged and the buffers are not pinned.
        """
        kinds = [(leaf.shape, leaf.dtype) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        # A daemon would be inside torch when Python ends, which aborts the process.
        self._thread = threading.Thread(target=self._allocate, args=(kinds,), name="checkpoint memory", daemon=False)
        self._thread.start()

    def _allocate(self, kinds: Iterable[_Kind]) -> None:
        # Calls of CUDA in a thread take memory of the first device otherwise.
        with nullcontext() if self._stream is None else torch.cuda.device(self._device):
            for kind in kinds:
                if self._stop.is_set() or not threading.main_thread().is_alive():
                    return
                self._buffers[kind].append(self._buffer(kind))

    def _buffer(self, kind: _Kind) -> Tensor:
        shape, dtype = kind
        if self._pins:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                reason = str(error).partition("\n")[0]
                logger.warning("host memory cannot be pinned, so saves stop training for longer: %s", reason)
        return torch.empty(shape, dtype=dtype)

    def take(self, state: Any) -> Any:
        """A copy of ``state`` (dicts, lists, tuples) with every tensor on the CPU; valid until the next call.

        A leaf may be a ``functools.partial`` that returns a tensor, or None on a rank that does not copy it, so that
        one such tensor exists at a time. They are called in their order.
        """
        self._join()
        free = {kind: list(buffers) for kind, buffers in self._buffers.items()}
        if self._stream is None:
            return tree_map(lambda leaf: self._copy(leaf, free), state, is_leaf=_is_size)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copied = tree_map(lambda leaf: self._copy(leaf, free), state, is_leaf=_is_size)
            self._copied = self._stream.record_event()
        return copied

    def _copy(self, leaf: Any, free: dict[_Kind, list[Tensor]]) -> Any:
        if isinstance(leaf, partial):
            leaf = leaf()
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        kind = leaf.shape, leaf.dtype
        if free.get(kind):
            buffer = free[kind].pop(0)
        else:
            buffer = self._buffer(kind)
            self._buffers[kind].append(buffer)
        if self._stream is not None and leaf.is_cuda:
            leaf.record_stream(self._stream)  # it may be freed before it is copied
        return buffer.copy_(leaf.detach(), non_blocking=True)

    def wait(self) -> None:
        """Wait until the newest copy is complete; on any thread."""
        if self._copied is not None:
            with torch.cuda.device(self._device):
                self._copied.synchronize()

    def before_change(self) -> None:
        """Have what is launched from now on run after the newest copy; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def close(self) -> None:
        """End the thread of :meth:`prepare`, which may have a buffer to finish."""
        self._stop.set()
        self._join()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()


def _is_size(node: Any) -> bool:
    return isinstance(node, torch.Size)  # tree_map would return a tuple


def divide(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """The names, in lists of about equal size: each, from the largest on, joins the smallest list."""
    lists, totals = [list[str]() for _ in range(parts)], [0] * parts
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        least = totals.index(min(totals))
        lists[least].append(name)
        totals[least] += size
    return lists
