"""Files of named tensors: .safetensors, or torch's .pth. No code from a file is run."""

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
"""Key in the header of .safetensors: the token grid of position tables, as ``7x28``; rows do not determine it."""
SUFFIXES = (SAFETENSORS, ".pth", ".pt", ".pyth")

CONTAINERS = ("model", "model_state", "state_dict", "module")
"""Keys of the state in training files; DeepSpeed's is ``module``."""

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of weights. Narrower types are quantised and need a scale that is stored elsewhere."""

_WRAPPERS = ("module.", "_orig_mod.", "model.")
"""Prefixes of every name from DDP, torch.compile and Lightning."""

_ZIP, _PICKLE = b"PK", b"\x80\x02"
"""First bytes of torch's files, since version 1.6 and before."""


class _Discarded(dict[str, Any]):
    """Attributes of a stand-in object, which are discarded: pickle sets them from a dict or a tuple of any length."""

    def update(self, *state: Any, **attributes: Any) -> None:
        pass


def _inert(name: str) -> type:
    """A new class in place of the class ``name``: torch needs a distinct one for each."""
    return type("Inert", (_Inert,), {})


class _Inert:
    """Stand-in for any class in a file: training files hold argparse or yacs options, numpy scalars and the like.

    Construction gives an empty OrderedDict, the one type that torch fills like a dict and like an object.
    """

    def __new__(cls, *arguments: Any) -> Any:
        stand_in: OrderedDict[Any, Any] = OrderedDict()
        stand_in.__dict__ = _Discarded()
        return stand_in


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, on the CPU, without a container's key and without the prefixes of wrappers.

    Entries without a weight's name are ignored: many files hold options and counters too.

    Raises:
        CheckpointError: if the file cannot be read or holds no state, or an entry with a weight's name is not a weight.
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
    """The token grid in the header of a .safetensors file of ``dmjd convert`` or ``dmjd export``; None without one."""
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
    """Write ``state`` to ``path`` atomically.

    Args:
        container: the key of the state in a .pth file, None for a bare state; .safetensors are always bare.
        metadata: header of .safetensors; ignored for .pth.
    """
    # Copies: a view would write its whole storage, and safetensors rejects tensors that share memory.
    state = {name: value.clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    if path.suffix == SAFETENSORS:
        replace_file(path, save(state, metadata=dict(metadata)))
        return
    buffer = io.BytesIO()
    torch.save(state if container is None else {container: state}, buffer)
    replace_file(path, buffer.getvalue())


def _is_safetensors(path: Path) -> bool:
    """Whether the file is .safetensors, by its first bytes (a size and a JSON object), else by its suffix."""
    with path.open("rb") as file:
        start = file.read(9)
    if start[:2] in (_ZIP, _PICKLE) and start[8:] != b"{":
        return False
    return start[8:] == b"{" or path.suffix == SAFETENSORS


def _tensors(entries: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {str(name): value for name, value in entries.items() if isinstance(value, Tensor)}


def _check_weights(path: Path, entries: Mapping[Any, Any]) -> None:
    """Raise CheckpointError with the entries that have a weight's name and the first fault found."""
    faults: dict[str, list[str]] = {}
    for name, value in entries.items():
        if str(name).rpartition(".")[2] in LEAVES and (fault := _fault(value)):
            faults.setdefault(fault, []).append(str(name))
    for fault, names in faults.items():
        raise CheckpointError(f"{path}: {summary(names)} {'is' if len(names) == 1 else 'are'} {fault}")


def _fault(value: Any) -> str | None:
    """Why ``value`` is not a weight, to follow "NAME is"; None if it is one."""
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
    """Without wrappers' prefixes, in any nesting."""
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in state):
            return _unwrapped({name.removeprefix(prefix): value for name, value in state.items()})
    return state
