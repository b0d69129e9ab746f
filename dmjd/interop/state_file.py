"""Files of named tensors: .safetensors, or torch's .pth. No code that a file names is ever run."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.files import replace_file
from dmjd.interop.names import summary

SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".pth", ".pt", ".pyth")

CONTAINERS = ("model", "model_state", "state_dict", "module")
"""Where code bases keep the state among optimizer, epoch and arguments; DeepSpeed's is ``module``."""

_WRAPPERS = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before every name."""

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

    Raises:
        CheckpointError: if it cannot be read, or holds no state.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not there")
    try:
        file = load_file(path) if path.suffix == SAFETENSORS else _unpickle(path)
    except Exception as error:  # bytes that are no pickle do what they happen to mean, and fail as that fails
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {_reason(error)}") from error
    for key in CONTAINERS:
        if isinstance(file, Mapping) and isinstance(file.get(key), Mapping):
            file = file[key]
            break
    if not isinstance(file, Mapping):
        raise CheckpointError(f"{path} holds a {type(file).__name__}, not weights by name")
    state = {str(name): value for name, value in file.items() if isinstance(value, Tensor)}
    if not state:
        found = summary(map(str, file)) or "nothing by name; of a module that was saved whole, save the state_dict()"
        raise CheckpointError(f"{path} holds no tensors under {', '.join(CONTAINERS)} or at the top; it has {found}")
    return _unwrapped(state)


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
    if start and start not in (_ZIP, _PICKLE):
        raise pickle.UnpicklingError("torch.save did not write it")
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except ValueError:
        foreign = []
    stand_ins: list[Any] = [(type("Inert", (_Inert,), {}), name) for name in foreign]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, map_location="cpu", weights_only=True)
