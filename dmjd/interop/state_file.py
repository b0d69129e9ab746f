"""Files of named tensors: .safetensors, or torch's .pth. No code that a file names is ever run."""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.files import replace_file
from dmjd.interop.names import LEAVES, summary

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
        file: Any = load_file(path) if _is_safetensors(path) else _unpickle(path)
    except Exception as error:  # bytes that are no pickle do what they happen to mean, and fail as that fails
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {_reason(error)}") from error
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
    """The grid of tokens that :func:`write_state` was told of for a .safetensors file, None where there is none."""
    if not _is_safetensors(path):
        return None
    with safe_open(path, "pt") as file:
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", (file.metadata() or {}).get(GRID, ""))
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


def _reason(error: Exception) -> str:
    """The line that tells; torch's first one advises against weights_only, and others point to its documentation."""
    if isinstance(error, LookupError | TypeError | AttributeError):
        return "it is damaged"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Weights only", "Please file", "Check the doc"))]
    return [*telling, *lines, "it is cut off"][0]


def _unpickle(path: Path) -> Any:
    """``torch.load`` with weights_only, in which every other class becomes :class:`_Inert`.

    Files from before torch 1.6 do not tell their classes beforehand; those with others than tensors are refused.
    """
    with path.open("rb") as file:
        start = file.read(2)
    if start == _ZIP and not zipfile.is_zipfile(path):
        raise pickle.UnpicklingError("it is cut off")
    if start == _ZIP:
        with zipfile.ZipFile(path) as archive:
            parts = {name.rpartition("/")[2] for name in archive.namelist()}
        if "constants.pkl" in parts:
            raise pickle.UnpicklingError("it is a TorchScript archive; torch.save the state_dict() of what it holds")
        if "data.pkl" not in parts:
            raise pickle.UnpicklingError("torch.save did not write it")
    if start and start not in (_ZIP, _PICKLE):
        raise pickle.UnpicklingError("torch.save did not write it")
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except ValueError:
        foreign = []
    stand_ins: list[Any] = [(type("Inert", (_Inert,), {}), name) for name in foreign]
    with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of kinds of tensors that are passed over or refused here
        with path.open("rb") as file:  # of a path, newer versions of torch go by the suffix
            return torch.load(file, map_location="cpu", weights_only=True)
