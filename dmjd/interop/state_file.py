"""Files of named tensors: .safetensors, or torch's .pth. No code that a file names is ever run."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dmjd.errors import CheckpointError
from dmjd.files import replace_file

SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".pth", ".pt", ".pyth")

CONTAINERS = ("model", "model_state", "state_dict", "module")
"""Where code bases keep the state among optimizer, epoch and arguments; DeepSpeed's is ``module``."""

_WRAPPERS = ("module.", "_orig_mod.")
"""What DDP and torch.compile put before every name."""


class _Inert:
    """Stands in for any class that a file names: training files hold options of argparse or yacs beside weights.

    Making one gives an empty OrderedDict, the one type that torch lets be filled like a dict and like an object.
    """

    def __new__(cls, *arguments: Any) -> Any:
        return OrderedDict()


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, on the CPU, without a container's key and without the prefixes of wrappers.

    Raises:
        CheckpointError: if it cannot be read, or holds no state.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is not there")
    try:
        file = load_file(path) if path.suffix == SAFETENSORS else _unpickle(path)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {_reason(error)}") from error
    for key in CONTAINERS:
        if isinstance(file, Mapping) and isinstance(file.get(key), Mapping):
            file = file[key]
            break
    if not isinstance(file, Mapping):
        raise CheckpointError(f"{path} holds a {type(file).__name__}, not weights by name")
    state = {str(name): value for name, value in file.items() if isinstance(value, Tensor)}
    if not state:
        raise CheckpointError(
            f"{path} holds no tensors under {', '.join(CONTAINERS)} or at the top; it has {', '.join(map(str, file))}"
        )
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def write_state(path: Path, state: Mapping[str, Tensor], container: str | None, metadata: Mapping[str, str]) -> None:
    """Put ``state`` at ``path``, whole or not at all.

    Args:
        container: the key of the state in a .pth file, None for a bare one; .safetensors are always bare.
        metadata: for the header of .safetensors, which .pth has not.
    """
    state = {name: value.contiguous() for name, value in state.items()}
    if path.suffix == SAFETENSORS:
        replace_file(path, save(state, metadata=dict(metadata)))
        return
    buffer = io.BytesIO()
    torch.save(state if container is None else {container: state}, buffer)
    replace_file(path, buffer.getvalue())


def _reason(error: Exception) -> str:
    """The line that tells; torch's first one advises against weights_only, and others point to its documentation."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Weights only", "Please file", "Check the doc"))]
    return [*telling, *lines, "it is cut off"][0]


def _unpickle(path: Path) -> Any:
    """``torch.load`` with weights_only, in which every other class becomes :class:`_Inert`.

    Files from before torch 1.6 do not tell their classes beforehand; those with others than tensors are refused.
    """
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except ValueError:
        foreign = []
    stand_ins: list[Any] = [(type("Inert", (_Inert,), {}), name) for name in foreign]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(path, map_location="cpu", weights_only=True)
