"""Initial weights of a model: from a checkpoint, a consolidated file, or a file of another code base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmjd.builders import build_objective, target_dim
from dmjd.builders.average import ENCODER
from dmjd.builders.model import BACKBONES
from dmjd.config import PretrainConfig
from dmjd.errors import CheckpointError, ConfigError
from dmjd.interop.layouts import check_finite, detect, needed_by_encoder, peel
from dmjd.interop.names import POSITIONS, REGISTERS, SHARED_TABLE, summary
from dmjd.interop.state_file import grid_noted, read_state
from dmjd.interop.tables import with_bias_tables, with_positions
from dmjd.interop.tensors import split_qv_bias
from dmjd.models.masked_image_model import Encoder
from dmjd.models.objective import Objective
from dmjd.parallel import native_files, store
from dmjd.runs.paths import CONFIG
from dmjd.safe_load import one_line

_ENCODER = "encoder."
_BRANCHES = ("decoder.", "head.", "visible_branch.")
"""Prefixes of parameter names of the branches."""


class _File(NamedTuple):
    """Weights of a file under our names. description: path and layout, for messages."""

    description: str
    weights: dict[str, Tensor]


def check_described(folder: Path, trained: PretrainConfig) -> None:
    """Raise CheckpointError unless the configuration in ``folder`` describes the tensors beside it.

    The model is built on the meta device, so a configuration from outside cannot allocate memory.
    """
    saved, backbone, decoder = store.shapes(folder), trained.backbone, trained.method.decoder
    blocks = BACKBONES[backbone.name].blocks(backbone)
    blocks += decoder.depth if decoder.name == "mae" else 0
    if blocks > len(saved):
        raise CheckpointError(f"{folder / CONFIG} has {blocks} blocks, but there are {len(saved)} tensors beside it")
    try:
        with torch.device("meta"):
            bare = build_objective(trained, target_dim(trained))
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{folder / CONFIG} does not describe a model: {one_line(error)}") from error
    native_files.check_same_model({name: value.shape for name, value in bare.state_dict().items()}, saved, folder)


def load_weights(objective: Objective, path: Path) -> str:
    """Load the weights at ``path``, a checkpoint folder or a file, into ``objective``; all or nothing.

    A checkpoint of ours must be of the same model. A file of weights must hold the encoder
    (:func:`load_encoder_weights`); a branch that is missing in it, or has other shapes, keeps its initial values.

    Returns:
        A description of the weights that were loaded and of those that were not.

    Raises:
        CheckpointError: naming what is missing, unexpected or of another shape, or the layouts that are known.
    """
    if path.is_dir() or native_files.is_consolidated(path):
        parameters = store.read_model(path)
        _check_finite(parameters, path)
        store.load_strictly(objective, parameters, path)
        return str(path)
    model = objective.model
    file = _read(path, model.encoder)
    taken, left = _of_encoder(model.encoder, file)
    own = model.state_dict()
    for branch in _BRANCHES:
        ours, theirs = _shapes(own, branch), _shapes(file.weights, branch)
        if ours and ours == theirs:
            taken |= {name: file.weights[name] for name in ours}
        elif ours:
            left.append(branch.removesuffix("."))
    model.load_state_dict(taken, strict=False)
    return f"{file.description}; {summary(left)} as initialised" if left else file.description


def load_encoder_weights(encoder: Encoder, path: Path, average: bool = False) -> str:
    """Load the weights in the file ``path``, or their average, into ``encoder``; all or nothing.

    The file must hold every parameter that features of whole images depend on, and no other of that kind; a mask token
    may be missing. Biases of q and v and tables of positions are converted to the form that the encoder has.

    Returns, Raises:
        As :func:`load_weights`; ConfigError if ``average`` and the file has none.
    """
    if native_files.is_consolidated(path):
        parameters = store.read_average(path) if average else store.read_model(path)
        if not parameters:
            raise ConfigError(f"weights=ema, but {path} has no average; use weights=trained")
        own = {name.removeprefix(ENCODER): value for name, value in parameters.items() if name.startswith(ENCODER)}
        _check_finite(own, path)
        store.load_strictly(encoder, own, path)
        return str(path)
    file = _read(path, encoder, average)
    taken, _ = _of_encoder(encoder, file)
    encoder.load_state_dict({name.removeprefix(_ENCODER): value for name, value in taken.items()}, strict=False)
    return file.description


def _check_finite(parameters: Mapping[str, Tensor], path: Path) -> None:
    try:
        check_finite(parameters)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read(path: Path, encoder: Encoder, average: bool = False) -> _File:
    """Read a file; biases of q and v, positions and bias tables become those of ``encoder``."""
    held = read_state(path, average)
    try:
        state, beside = peel(held.tensors)
        layout, fitting = detect(state)
    except CheckpointError as error:
        hint = "; dmjd convert takes these arguments, and its output is read here" * ("unknown=drop" in str(error))
        raise CheckpointError(f"{path}: {error}{hint}") from error
    own, description = (
        {_ENCODER + name for name in encoder.state_dict()},
        f"{path} in the layout of {' / '.join(fitting)}{held.note}",
    )
    if beside:
        description += f", without {summary(beside)}"
    try:
        weights = layout.read(state)
        if any(name.endswith(".q_bias") for name in own):
            weights, _ = split_qv_bias(weights, "encoder.blocks.")
        weights = with_positions(weights, {POSITIONS} & own, grid_noted(path), encoder.grid, "this model")
        weights = with_bias_tables(weights, "shared" if SHARED_TABLE in own else "keep", grid_noted(path), encoder.grid)
    except CheckpointError as error:
        hint = (
            "; dmjd convert takes this argument, and its .safetensors stores it" if "source_grid=" in str(error) else ""
        )
        raise CheckpointError(f"{description}: {error}{hint}") from error
    return _File(description, weights)


def _of_encoder(encoder: Encoder, file: _File) -> tuple[dict[str, Tensor], list[str]]:
    """The encoder's weights in ``file``, and the names that it lacks."""
    if REGISTERS in file.weights:
        raise CheckpointError(
            f"{file.description}: it has registers ({REGISTERS}), on which features depend and which the "
            "encoders of dmjd do not have; use the model's own code"
        )
    ours = _shapes({_ENCODER + name: value for name, value in encoder.state_dict().items()}, _ENCODER)
    theirs = _shapes(file.weights, _ENCODER)
    faults = [
        f"{problem} {summary(names)}"
        for problem, names in (
            ("lacks", [name for name in ours.keys() - theirs.keys() if needed_by_encoder(name)]),
            ("has unexpected", [name for name in theirs.keys() - ours.keys() if needed_by_encoder(name)]),
        )
        if names
    ]
    differing = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
    if differing:
        first = differing[0]
        faults.append(f"has {first} of shape {theirs[first]}, here {ours[first]}")
    if faults:
        raise CheckpointError(
            f"{file.description} is of another encoder than the configuration: it {', '.join(faults)}"
        )
    return {name: file.weights[name] for name in ours if name in theirs}, [name for name in ours if name not in theirs]


def _shapes(state: Mapping[str, Tensor], part: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if name.startswith(part)}
