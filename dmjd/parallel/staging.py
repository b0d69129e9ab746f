"""Copies of the training state in host memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class HostCopies:
    """Host buffers that are reused by every copy, pinned for a CUDA device.

    Torch's own stager fails on a state that has other values than plain tensors (torch 2.11).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []

    def take(self, state: Any) -> Any:
        """A copy of ``state`` (dicts, lists, tuples) with every tensor on the CPU; valid until the next call.

        The host waits until the device has copied.
        """
        places = itertools.count()
        copied = tree_map(lambda leaf: self._copy(leaf, places), state, is_leaf=_is_size)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copied

    def _copy(self, leaf: Any, places: Iterator[int]) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        place = next(places)
        if place == len(self._buffers):
            self._buffers.append(torch.empty(0))
        buffer, pinned = self._buffers[place], self._device.type == "cuda"
        if buffer.shape != leaf.shape or buffer.dtype != leaf.dtype:
            buffer = self._buffers[place] = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=pinned)
        return buffer.copy_(leaf.detach(), non_blocking=pinned)


def _is_size(node: Any) -> bool:
    return isinstance(node, torch.Size)  # tree_map would return a tuple
