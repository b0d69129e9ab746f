"""Initial weights of a model: from a checkpoint, a consolidated file, or a file of another code base."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor

from dmjd.config import DataConfig, PretrainConfig
from dmjd.errors import CheckpointError, ConfigError
from dmjd.interop.describe import describe
from dmjd.interop.layout import check_finite, needed_by_encoder
from dmjd.interop.layouts import LAYOUTS
from dmjd.interop.names import BIAS_TABLE, POSITIONS, REGISTERS, SHARED_TABLE, summary
from dmjd.interop.tables import with_bias_tables, with_positions, with_window_tables
from dmjd.interop.tensors import join_qv_bias, split_qv_bias
from dmjd.interop.weights_file import WeightsFile, read_weights, require_positions
from dmjd.models.classifier import Classification
from dmjd.models.dense.grid_attention import DECOMPOSED, resized
from dmjd.models.masked_image_model import Encoder
from dmjd.models.objective import Objective, Trainable
from dmjd.parallel import native_files, store
from dmjd.runs.classes import read_classes

logger = logging.getLogger("dmjd")

_ENCODER = "encoder."
_BLOCK_TABLE = f"encoder.blocks.0.{BIAS_TABLE}"
_CLASS_TOKEN, _NORM = "encoder.cls_token", "encoder.norm."
_PYRAMID = "pyramid."
"""Prefix of parameters that only a model of feature maps has; its encoder has no final norm."""
_BRANCHES = ("decoder.", "head.", "visible_branch.")
"""Prefixes of parameter names of the branches."""


_CLASSIFIER = {"encoder.fc_norm.": "fc_norm.", "classifier.": "head."}
"""Prefixes of a fine-tuned model's names in :mod:`dmjd.interop`, and those of a classifier of ours."""


def read_file(
    path: Path,
    weights: str = "trained",
    source: str = "auto",
    *,
    drop_unknown: bool = False,
    keep_nonfinite: bool = False,
) -> WeightsFile:
    """Read a file of weights: consolidated, or of another code base; arguments and errors as for
    :func:`~dmjd.interop.weights_file.read_weights`."""
    if native_files.is_consolidated(path):
        return _read_own(path, weights, keep_nonfinite)
    return read_weights(path, weights, source, drop_unknown=drop_unknown, keep_nonfinite=keep_nonfinite)


def _read(path: Path, weights: str) -> WeightsFile:
    return _read_own(path, weights) if path.is_dir() else read_file(path, weights)


def _read_own(path: Path, weights: str, keep_nonfinite: bool = False) -> WeightsFile:
    """Read a checkpoint folder or a consolidated file."""
    found = join_qv_bias(model_in(path, weights))
    if not keep_nonfinite:
        _check_finite(found, path)
    return WeightsFile(path, str(path), found, LAYOUTS["ours"])


def described_model(file: WeightsFile, given: Mapping[str, Any], data: DataConfig | None) -> PretrainConfig:
    """The configuration of a file that no other configuration describes: its encoder, image size and normalisation, as
    far as tensors, header and folder show them; logs it.

    Args:
        given: values by dotted key of ``backbone``, which rule.
        data: the images to read, whose normalisation is used if the file states none.

    Raises:
        CheckpointError: if the encoder is none of ours, or its number of attention heads is neither shown nor given,
            or a ViT's positions are missing.
    """
    file = _with_layer_scales(file)
    _check_parts(file)
    require_positions(file)
    try:
        described = describe(file.weights, file.noted, file.grid, has_qv_bias=file.has_qv_bias)
        config = PretrainConfig(backbone=described.backbone_config(given), data=described.data_config(data))
    except CheckpointError as error:
        raise CheckpointError(f"{file.description}: {error}") from error
    images = "{}x{}".format(*config.data.image_size)
    logger.info("%s: found %s, images of %s; experiment= or backbone= replace that", file.path, described.text, images)
    return config


def model_in(path: Path, weights: str) -> dict[str, Tensor]:
    """Weights of a checkpoint folder or a consolidated file under our names. Of an average in pre-training the encoder
    alone, since no other part has one. A classifier has the names of a fine-tuned file.

    Raises:
        ConfigError: if it does not have ``weights``.
    """
    found = {name.removeprefix("model."): value for name, value in _saved(path, weights).items()}
    if any(name.startswith("decoder.") or name == "encoder.mask_token" for name in found):  # of pre-training
        return found
    if any(name.startswith(_PYRAMID) for name in found):  # whose head is of maps
        return _renamed(found, {"head.": "decode_head.classes."})
    return _renamed(found, {ours: theirs for theirs, ours in _CLASSIFIER.items()})


def _saved(path: Path, weights: str) -> dict[str, Tensor]:
    """The parameters of a checkpoint folder or a consolidated file, or their average."""
    if weights == "student":
        raise ConfigError(f"weights=student, but {path} has no student beside a teacher; use weights=trained")
    found = store.read_average(path) if weights == "ema" else store.read_model(path)
    if not found:
        raise ConfigError(
            f"weights=ema, but {path} has no EMA weights; train with ema_decay=..., or use weights=trained"
        )
    return found


def _renamed(weights: Mapping[str, Tensor], prefixes: Mapping[str, str]) -> dict[str, Tensor]:
    for old, new in prefixes.items():
        weights = {
            new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in weights.items()
        }
    return dict(weights)


def load_weights(objective: Objective, path: Path, weights: str = "trained") -> str:
    """Load ``weights`` at ``path``, a checkpoint folder or a file, into ``objective``; all or nothing.

    A checkpoint of ours must be of the same model; its average is of the encoder alone. A file must hold the encoder
    (:func:`load_encoder_weights`); a branch that is missing in it, or has other shapes, keeps its initial values.

    Returns:
        A description of the weights that were loaded and of those that were not.

    Raises:
        CheckpointError: naming what is missing, unexpected or of another shape, or the layouts that are known.
    """
    if weights == "trained" and (path.is_dir() or native_files.is_consolidated(path)):
        parameters = store.read_model(path)
        _check_finite(parameters, path)
        store.load_strictly(objective, parameters, path)
        return str(path)
    model = objective.model
    file = _fitted(_read(path, weights), model.encoder)
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


def load_encoder_weights(encoder: Encoder, file: WeightsFile) -> str:
    """Load the weights of ``file`` into ``encoder``; all or nothing.

    The file must hold every parameter that features of whole images depend on, and no other of that kind; a mask token
    may be missing. Biases of q and v and tables of positions are converted to the form that the encoder has.

    Returns, Raises:
        As :func:`load_weights`.
    """
    taken, _ = _of_encoder(encoder, _fitted(file, encoder))
    encoder.load_state_dict({name.removeprefix(_ENCODER): value for name, value in taken.items()}, strict=False)
    return file.description


def load_classifier(
    objective: Classification,
    path: Path,
    weights: str = "trained",
    classes: Sequence[str] | None = None,
    file: WeightsFile | None = None,
) -> str:
    """Load ``weights`` at ``path``, a checkpoint folder or a file, into a classifier; all or nothing.

    The encoder must be there, as for :func:`load_encoder_weights`; its tables are interpolated to the classifier's
    image size. Of a fine-tuned model ``fc_norm`` is loaded too, and the head if it has the same classes and reads
    features of the same norm; of pre-training neither, nor a final norm that the classifier does not have.

    Args:
        classes: names of the data's classes, compared with those of a checkpoint folder. None: only their number is.
        file: what :func:`read_file` has read of ``path``. None: it is read here.

    Returns:
        A description of the weights that were loaded and of those that keep their initial values.

    Raises:
        CheckpointError: as :func:`load_weights`. ConfigError: if it does not have ``weights``.
    """
    model = objective.model
    file = file or _read(path, weights)
    kept = {name: value for name, value in file.weights.items() if name.startswith((_ENCODER, "classifier."))}
    of_maps = any(name.startswith(_PYRAMID) for name in file.weights)
    file = _fitted_to_images(file._replace(weights=_renamed(kept, _CLASSIFIER)), model.encoder)
    notes = list[str]()
    if of_maps:
        file, notes = _with_parts_of_maps(file, model.encoder)
    own = {name: value.shape for name, value in model.state_dict().items()}
    taken, left = _of_encoder(model.encoder, file)
    known, reason = read_classes(path) if path.is_dir() else [], ""
    if classes is not None and known and list(classes) != known:
        reason = ", since the data has other classes"
    elif ("fc_norm.weight" in own) != ("fc_norm.weight" in file.weights):
        reason = ", since it read another norm"
    for part in ("fc_norm", "head"):
        names = [f"{part}.{leaf}" for leaf in ("weight", "bias") if f"{part}.{leaf}" in own]
        found = all(name in file.weights and file.weights[name].shape == own[name] for name in names)
        if found and (part == "fc_norm" or not reason):
            taken |= {name: file.weights[name] for name in names}
        else:
            left.append(part)
    model.load_state_dict(taken, strict=False)
    notes += [] if "head" in left else ["with its head"]
    if left:
        because = reason if "head.weight" in file.weights else ""
        notes.append(f"{', '.join(left)} as initialised{because}")
    return "; ".join((file.description, *notes))


def load_encoder_part(objective: Trainable, path: Path, weights: str = "trained") -> str:
    """Load the encoder of ``weights`` at ``path``, a checkpoint folder or a file, into a model of feature maps; all or
    nothing.

    As for :func:`load_classifier`. A class token or a final norm that the model does not have is left out. Decomposed
    relative positions of another size are interpolated, and begin at 0 if they are missing.

    Returns:
        A description of the weights that were loaded and of those that were not.

    Raises:
        CheckpointError: as :func:`load_weights`. ConfigError: if it does not have ``weights``.
    """
    encoder = objective.model.encoder
    file = _read(path, weights)
    kept = {name: value for name, value in file.weights.items() if name.startswith(_ENCODER)}
    file = _fitted_to_images(file._replace(weights=_renamed(kept, _CLASSIFIER)), encoder)
    file, notes = _with_parts_of_maps(file, encoder)
    taken, _ = _of_encoder(encoder, file)
    encoder.load_state_dict({name.removeprefix(_ENCODER): value for name, value in taken.items()}, strict=False)
    return "; ".join((file.description, *notes))


def _with_parts_of_maps(file: WeightsFile, encoder: Encoder) -> tuple[WeightsFile, list[str]]:
    """``file`` with the class token and the decomposed relative positions that ``encoder`` has, and notes on both."""
    own = {_ENCODER + name: value for name, value in encoder.state_dict().items()}
    weights, notes = dict(file.weights), []
    if _CLASS_TOKEN not in own:
        weights.pop(_CLASS_TOKEN, None)
    elif _CLASS_TOKEN not in weights:
        weights[_CLASS_TOKEN] = own[_CLASS_TOKEN].clone()
        notes.append("cls_token as initialised")
    norm = {name: value.clone() for name, value in own.items() if name.startswith(_NORM) and name not in weights}
    if norm:
        weights |= norm
        notes.append("norm as initialised")
    tables = {name: value for name, value in own.items() if name.endswith(DECOMPOSED)}
    known = {name for name in weights if name.endswith(DECOMPOSED)}
    if known and not tables:
        notes.append("without its decomposed relative positions")
    for name in known - tables.keys():
        del weights[name]
    for name, table in tables.items():
        found = weights.get(name)
        if found is None:
            weights[name] = torch.zeros_like(table)
        elif found.ndim == 2 and len(found) != len(table):
            weights[name] = resized(found.float(), len(table))
    return file._replace(weights=weights), notes


def _check_finite(parameters: Mapping[str, Tensor], path: Path) -> None:
    try:
        check_finite(parameters)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _fitted(file: WeightsFile, encoder: Encoder, *, geometric: bool = False) -> WeightsFile:
    """``file`` with biases of q and v, positions and bias tables as those of ``encoder``; tables of another grid are
    interpolated as fine-tuning does if ``geometric``."""
    own = {_ENCODER + name: value.shape for name, value in encoder.state_dict().items()}
    file = _with_layer_scales(file)
    weights = file.weights
    if POSITIONS in own:
        require_positions(file)
    try:
        if any(name.endswith(".q_bias") for name in own):
            weights, _ = split_qv_bias(weights, "encoder.blocks.")
        # Fixed positions of a file are left out only for a model that computes them.
        stored = {POSITIONS} & (own.keys() if encoder.positions is not None else own.keys() | weights.keys())
        weights = with_positions(weights, stored, file.grid, encoder.grid, "this model")
        kind = "shared" if SHARED_TABLE in own else "per_block" if _BLOCK_TABLE in own else "keep"
        weights = with_bias_tables(weights, kind, file.grid, encoder.grid, geometric=geometric)
        if POSITIONS in own:  # biases beside learned positions begin at 0, as in CAE's fine-tuning: features stay equal
            tables = {name: shape for name, shape in own.items() if name == SHARED_TABLE or name.endswith(BIAS_TABLE)}
            weights = {name: torch.zeros(shape) for name, shape in tables.items()} | weights
        weights = with_window_tables(weights, own)
    except CheckpointError as error:
        hint = (
            "; dmjd convert takes this argument, and its .safetensors stores it" if "source_grid=" in str(error) else ""
        )
        text = str(error).replace("set bias_tables=", "set backbone.bias_tables=")
        raise CheckpointError(f"{file.description}: {text}{hint}") from error
    return file._replace(weights=weights)


def _fitted_to_images(file: WeightsFile, encoder: Encoder) -> WeightsFile:
    """``file`` with tables interpolated for the image size of ``encoder``, and without a final norm that it lacks."""
    file = _fitted(file, encoder, geometric=True)
    if "norm.weight" in encoder.state_dict():
        return file
    kept = {name: value for name, value in file.weights.items() if not name.startswith("encoder.norm.")}
    return file._replace(weights=kept)


def _of_encoder(encoder: Encoder, file: WeightsFile) -> tuple[dict[str, Tensor], list[str]]:
    """The encoder's weights in ``file``, and the names that it lacks."""
    _check_parts(file)
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
            f"{_described(file, encoder)}"
        )
    _compare_heads(encoder, file)
    return {name: file.weights[name] for name in ours if name in theirs}, [name for name in ours if name not in theirs]


def _compare_heads(encoder: Encoder, file: WeightsFile) -> None:
    """Log a warning if ``encoder`` has another number of attention heads than models like that of ``file``. The shapes
    of plain blocks do not depend on it: MoCo v3's ViT-S has 12 heads, others of its width have 6."""
    try:
        usual = describe(file.weights, file.noted, file.grid).backbone.get("num_heads")
    except CheckpointError:
        return
    heads = next((part.num_heads for part in encoder.modules() if isinstance(part, Attention)), None)
    if None not in (usual, heads) and usual != heads:
        logger.warning(
            "%s: backbone.num_heads=%d, but models of its width and positions have %d heads, which tensors do not show "
            "and features depend on; remove backbone=, or set backbone.num_heads=%d",
            *(file.path, heads, usual, usual),
        )


def _with_layer_scales(file: WeightsFile) -> WeightsFile:
    """``file`` with the layer scales of timm's and DINOv2's ViTs as BEiT's, whose blocks compute the same: they have no
    bias of keys, to which softmax is invariant."""
    return file._replace(weights={_SCALE.sub(r".gamma_\1", name): value for name, value in file.weights.items()})


_SCALE = re.compile(r"\.ls([12])\.gamma$")


def _check_parts(file: WeightsFile) -> None:
    found = [name for name in file.weights if name == REGISTERS or _NORMS.search(name)]
    if found:
        parts = f"registers ({REGISTERS})" if REGISTERS in found else summary(found)
        raise CheckpointError(
            f"{file.description}: it has {parts}, on which features depend and which the encoders of dmjd do not have; "
            "use the model's own code"
        )


_NORMS = re.compile(r"\.(q_norm|k_norm|norm_pre)\.")
"""Of queries, of keys, and in front of the blocks."""


def _described(file: WeightsFile, encoder: Encoder) -> str:
    """The end of an error: the keys that describe the encoder of ``file`` and have other values for ``encoder``."""
    try:
        theirs = describe(file.weights, file.noted)
        ours = describe({_ENCODER + name: value for name, value in encoder.state_dict().items()})
    except CheckpointError:
        return ""
    differing = theirs.differing(ours).text
    return f"; set {differing}" if differing else ""


def _shapes(state: Mapping[str, Tensor], part: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if name.startswith(part)}
