"""Whole tensors from the partitions that DeepSpeed's processes wrote, read one at a time.

A process of stages 1 and 2 has a slice of each group of parameters, which are flattened one after the other; its file
lists where in its slice a parameter's part begins. A process of stage 3 has a part of each parameter, all of one size.
Moments lie as parameters do. The layout is that of DeepSpeed 0.19; tests compare with DeepSpeed's own conversions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmjd.parallel.native_files import MOMENTS, PARAMETER
from dmjd.safe_load import TensorInFile


class _Piece(NamedTuple):
    """``size`` elements of ``flat`` from ``start`` on, the next ones of a parameter or its moment."""

    flat: TensorInFile
    start: int
    size: int


class Partitions:
    """The parameters, moments and step counts of one checkpoint, by the names of :mod:`dmjd.parallel.native_files`.

    Args:
        folder: with the files of all processes.
        shapes: of the parameters by name.
        load: reads a file, with a :class:`TensorInFile` in place of each tensor.

    Raises:
        LookupError, TypeError, AttributeError, ValueError, OSError: if a file is missing or has another layout.
    """

    def __init__(
        self, folder: Path, stage: int, processes: int, shapes: Mapping[str, Sequence[int]], load: Callable[[Path], Any]
    ) -> None:
        def files(kind: str) -> list[Any]:
            return [load(folder / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt") for rank in range(processes)]

        states = [file["optimizer_state_dict"] for file in files("optim")]
        models = files("model") if stage == 3 else [load(folder / "mp_rank_00_model_states.pt")]
        self._shapes, self._pieces = shapes, dict[str, list[_Piece]]()
        own = _of_stage_3(states, models[0]["param_shapes"]) if stage == 3 else _of_slices(states)
        for name, parts in own:
            for kind, piece in parts.items():
                self._pieces.setdefault(f"{kind}/{name}", []).append(piece)
        for name in shapes.keys() - {name.partition("/")[2] for name in self._pieces}:  # frozen
            fragments = [model["frozen_param_fragments" if stage == 3 else "module"][name] for model in models]
            self._pieces[f"{PARAMETER}/{name}"] = [_Piece(each, 0, math.prod(each.shape)) for each in fragments]
        held = sum(file.stat().st_size for file in folder.glob("*.pt"))
        for name, shape in shapes.items():
            if math.prod(shape) * torch.float32.itemsize > held:
                raise ValueError(f"{name} is larger than the {held} bytes of the files")
        self.like = {name: torch.empty(self._shape(name), device="meta") for name in self._pieces}

    def _shape(self, full_name: str) -> Sequence[int]:
        kind, _, name = full_name.partition("/")
        return () if kind == "step" else self._shapes[name]

    def read(self, full_name: str) -> Tensor:
        """Raises ValueError if a file is damaged."""
        shape, pieces = self._shape(full_name), self._pieces[full_name]
        missing = math.prod(shape)
        found = []
        for piece in pieces:
            count = min(piece.size, missing)  # the last part of stage 3 is padded
            found.append(piece.flat.read(piece.start, count))
            missing -= count
            if full_name.startswith("step/"):  # of all processes alike
                break
        if missing:
            raise ValueError(f"{full_name} has {missing} elements too few")
        return torch.cat(found).reshape(shape).float()


def _parts(flats: Mapping[str, TensorInFile], step: TensorInFile, start: int, count: int) -> dict[str, _Piece]:
    return {kind: _Piece(flat, start, count) for kind, flat in flats.items()} | {"step": _Piece(step, 0, 1)}


def _of_slices(states: Sequence[Any]) -> Iterator[tuple[str, dict[str, _Piece]]]:
    """Parts of the parameters under stages 1 and 2, process by process."""
    for state in states:
        groups = state["param_slice_mappings"]
        for group, (flat, names) in enumerate(zip(state["single_partition_of_fp32_groups"], groups, strict=True)):
            moments = state["base_optimizer_state"]["state"][group]
            flats = {PARAMETER: flat, **{kind: moments[kind] for kind in MOMENTS if kind != "step"}}
            for name, place in names.items():
                yield name, _parts(flats, moments["step"], place.start, place.numel)


def _of_stage_3(states: Sequence[Any], shapes: Sequence[Any]) -> Iterator[tuple[str, dict[str, _Piece]]]:
    """Parts of the parameters under stage 3, process by process."""
    for state in states:
        for group, (flat, names) in enumerate(zip(state["fp32_flat_groups"], shapes, strict=True)):
            moments = state["optimizer_state_dict"]["state"][group]
            flats = {PARAMETER: flat, **{kind: moments[kind] for kind in MOMENTS if kind != "step"}}
            start = 0
            for name, shape in names.items():
                count = -(-math.prod(shape) // len(states))
                yield name, _parts(flats, moments["step"], start, count)
                start += count
