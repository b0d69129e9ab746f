"""Weights of a frozen tokenizer, from a file of this machine and from nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dmjd.errors import ConfigError
from dmjd.safe_load import load_torch


def weights_file(path: str | None, expected: str) -> Path:
    """The file ``path``.

    Args:
        expected: what it must hold and how to make it, for the error where it is missing.

    Raises:
        ConfigError: if no file is named, or there is none.
    """
    if path is None:
        raise ConfigError(f"target.weights must name a file: {expected}")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"target.weights={path} is not a file; expected is {expected}")
    return file


def read_state(file: Path, expected: str) -> dict[str, Tensor]:
    """The tensors in ``file``, at its top or under ``model`` or ``state_dict``. Nothing else is ever unpickled.

    Raises:
        ConfigError: if the file holds anything else, such as a whole module.
    """
    try:
        content = load_torch(file, None)
    except ValueError as error:
        raise ConfigError(
            f"target.weights={file} cannot be read as tensors alone ({error}); expected is {expected}"
        ) from error
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"target.weights={file} is not a dictionary of tensors; expected is {expected}")
    return content


def load_frozen(module: nn.Module, state: dict[str, Tensor], file: Path, expected: str) -> None:
    """Give ``module`` exactly these weights, freeze it and set it to evaluation.

    Raises:
        ConfigError: naming a tensor that is missing, too many or of another shape, or that holds no weights.
    """
    own = module.state_dict()
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shaped = sorted(name for name in own.keys() & state.keys() if own[name].shape != state[name].shape)
    for what, names in (("lacks", missing), ("has an unknown", unknown), ("has another shape of", shaped)):
        if names:
            raise ConfigError(f"target.weights={file} {what} {names[0]}; expected is {expected}")
    check_values(state, f"target.weights={file}")
    module.load_state_dict(state)
    module.requires_grad_(False).eval()


def check_values(state: Mapping[str, Tensor], source: str) -> None:
    """Raise ConfigError for a tensor of ``state`` that is not dense and floating, or not finite in float32: its target
    would be the same for every image."""
    for name, value in state.items():
        dense = value.layout is torch.strided and not value.is_meta
        if not dense or not value.is_floating_point() or value.dtype.itemsize < 2:  # 8 bits need a scale
            raise ConfigError(f"{source}: {name} is not a dense tensor of 16, 32 or 64-bit floats; store it as one")
        if not bool(value.float().isfinite().all()):
            raise ConfigError(f"{source}: NaN or infinity in {name}; download or convert the file again")
