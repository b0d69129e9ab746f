"""Files of named tensors: .safetensors, or torch's .pth. No code that a file names is ever run."""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.files import replace_file
from dmjd.interop.names import LEAVES, summary
from dmjd.safe_load import load_torch, one_line, parse_json

SAFETENSORS = ".safetensors"
GRID = "dmjd.token_grid"
"""Of the header of .safetensors: the grid of tables of positions, which their rows do not tell, as ``7x28``."""
SUFFIXES = (SAFETENSORS, ".pth", ".pt", ".pyth")

CONTAINERS = ("model", "model_state", "state_dict", "module")
"""Where code bases keep the state among optimizer, epoch and arguments; DeepSpeed's is ``module``."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of weights. Narrower ones have a scale elsewhere, without which they are other numbers."""

_WRAPPERS = ("module.", "_orig_mod.", "model.")
"""What DDP, torch.compile and modules of Lightning put before every name."""

_ZIP, _PICKLE = b"PK", b"\x80\x02"
"""How torch's files begin, from 1.6 on and before."""


class _Deaf(dict[str, Any]):
    """The attributes of what stands in for an object: it is told them as a dict, or as a tuple of any length."""

    def update(self, *state: Any, **attributes: Any) -> None:
        pass


def _inert(name: str) -> type:
    """A class in the place of the one called ``name``: torch tells them apart."""
    return type("Inert", (_Inert,), {})


class _Inert:
    """Stands in for any class that a file names: training files hold options of argparse or yacs, numpy's scalars and
    the like beside weights.

    Making one gives an empty OrderedDict, the one type that torch lets be filled like a dict and like an object.
    """

    def __new__(cls, *arguments: Any) -> Any:
        stand_in: OrderedDict[Any, Any] = OrderedDict()
        stand_in.__dict__ = _Deaf()
        return stand_in


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, on the CPU, without a container's key and without the prefixes of wrappers.

    What is not called as a weight is does not hinder, tensor or not: many files hold options and counters too.

    Raises:
        CheckpointError: if it cannot be read, or holds no state; naming what is called as a weight and cannot be one.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not there")
    try:
        file: Any = load_file(path) if _is_safetensors(path) else load_torch(path, None, _inert)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {one_line(error)}") from error
    if not isinstance(file, Mapping):
        raise CheckpointError(f"{path} holds a {type(file).__name__}, not weights by name")
    contained = [file[key] for key in CONTAINERS if isinstance(file.get(key), Mapping)]
    entries: Mapping[Any, Any] = next((part for part in contained if _tensors(part)), file)
    state = _tensors(entries)
    if not state:
        found = summary(map(str, file)) or "nothing by name; of a module that was saved whole, save the state_dict()"
        raise CheckpointError(f"{path} holds no tensors under {', '.join(CONTAINERS)} or at the top; it has {found}")
    _check_weights(path, entries)
    return _unwrapped(state)


def grid_noted(path: Path) -> tuple[int, int] | None:
    """The token grid in the header of a .safetensors file, of ``dmjd convert`` or ``dmjd export``; None without one."""
    if not _is_safetensors(path):
        return None
    with safe_open(path, "pt") as file:
        header = file.metadata() or {}
    noted = header.get(GRID, "")
    with suppress(ValueError, LookupError, TypeError):
        noted = noted or str(parse_json(header["dmjd"])["token_grid"])
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", noted)
    return (int(found[1]), int(found[2])) if found else None


def write_state(path: Path, state: Mapping[str, Tensor], container: str | None, metadata: Mapping[str, str]) -> None:
    """Put ``state`` at ``path``, whole or not at all.

    Args:
        container: the key of the state in a .pth file, None for a bare one; .safetensors are always bare.
        metadata: for the header of .safetensors, which .pth has not.
    """
    # Copies: a file gets no more than what is named, of a view too, and safetensors refuses what shares memory.
    state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    if path.suffix == SAFETENSORS:
        replace_file(path, save(state, metadata=dict(metadata)))
        return
    buffer = io.BytesIO()
    torch.save(state if container is None else {container: state}, buffer)
    replace_file(path, buffer.getvalue())


def _is_safetensors(path: Path) -> bool:
    """By its first bytes, the size of a JSON object and the object, for files are renamed; else by its suffix."""
    with path.open("rb") as file:
        start = file.read(9)
    if start[:2] in (_ZIP, _PICKLE) and start[8:] != b"{":
        return False
    return start[8:] == b"{" or path.suffix == SAFETENSORS


def _tensors(entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(name): value for name, value in entries.items() if isinstance(value, Tensor)}


def _check_weights(path: Path, entries: Mapping[Any, Any]) -> None:
    """Raise CheckpointError, naming the entries with the first fault that one called as a weight has."""
    faults: dict[str, list[str]] = {}
    for name, value in entries.items():
        if str(name).rpartition(".")[2] in LEAVES and (fault := _fault(value)):
            faults.setdefault(fault, []).append(str(name))
    for fault, names in faults.items():
        raise CheckpointError(f"{path}: {summary(names)} {'is' if len(names) == 1 else 'are'} {fault}")


def _fault(value: Any) -> str | None:
    """Why ``value`` is no weight, as the rest of a sentence that begins "X is"."""
    if not isinstance(value, Tensor):
        return "not stored as torch's tensors"
    if value.is_quantized:
        return "quantised; store what dequantize() gives"
    if value.layout is not torch.strided:
        return "sparse; store what to_dense() gives"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes() and not value.is_meta:
        return "larger than what the file holds of it; store what contiguous() gives"
    if value.is_meta:
        return "without values, for the model was on torch's meta device"
    if value.dtype not in FLOATS:
        return f"of {value.dtype}, as after quantisation; weights are read in {', '.join(map(str, FLOATS))}"
    if not value.ndim:
        return "a single number, which no weight is"
    if not value.numel():
        return "empty, as where each process of a sharded model stores its own part; gather them first"
    return None


def _unwrapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without wrappers' prefixes, in whatever order they lie around each other."""
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in state):
            return _unwrapped({name.removeprefix(prefix): value for name, value in state.items()})
    return state
