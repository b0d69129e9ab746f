"""Tensors of a checkpoint, whichever engine wrote it, named as in :mod:`dmjd.parallel.native_files`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from dmjd.parallel import native_files
from dmjd.parallel.deepspeed import files as zero_files
from dmjd.parallel.native_files import AVERAGE, PARAMETER, Tensors, check_same_model, of_kind


def read(path: Path, *kinds: str) -> dict[str, Tensor]:
    """The tensors of ``kinds``, or all, whole and on the CPU. Needs no process group.

    Args:
        path: a checkpoint folder, or a consolidated file.
    """
    return (zero_files if zero_files.is_zero(path) else native_files).read(path, *kinds)


def open_tensors(path: Path) -> Tensors:
    """As :func:`read`, one tensor at a time."""
    return (zero_files if zero_files.is_zero(path) else native_files).open_tensors(path)


def shapes(path: Path) -> dict[str, torch.Size]:
    """Shapes of the parameters in a checkpoint folder, by their own names."""
    return zero_files.shapes(path) if zero_files.is_zero(path) else native_files.shapes(path, PARAMETER)


def read_model(path: Path) -> dict[str, Tensor]:
    """The parameters in a checkpoint folder or a consolidated file, by their own names."""
    return of_kind(read(path, PARAMETER), PARAMETER)


def read_average(path: Path) -> dict[str, Tensor]:
    """The averaged parameters, by the same names; empty if the run keeps no average."""
    return of_kind(read(path, AVERAGE), AVERAGE)


def load_strictly(module: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load ``state``, which must have the names and shapes of ``module``.

    Raises:
        CheckpointError: on missing, unknown or differently shaped parameters; ``module`` is then unchanged.
    """
    own = {name: value.shape for name, value in module.state_dict().items()}
    check_same_model(own, {name: value.shape for name, value in state.items()}, path)
    module.load_state_dict(state)
