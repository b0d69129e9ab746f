"""Layer-wise decay of the learning rate, frozen layers, and the table of the optimizer's parameter groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from dmjd.builders.average import ENCODER
from dmjd.config import OptimConfig
from dmjd.errors import ConfigError
from dmjd.models.objective import Trainable
from dmjd.parallel.single import decays


class Group(NamedTuple):
    """Parameters of a classifier with one learning rate and weight decay.

    layers: of :meth:`dmjd.models.masked_image_model.Encoder.layer_of`: "3", or "0-13" for a range.
    lr_scale: factor of the learning rate; 0 for frozen layers.
    weight_decay: AdamW's, before its multiplication with the learning rate.
    """

    name: str
    layers: str
    lr_scale: float
    weight_decay: float
    tensors: int
    parameters: int


def set_layers(objective: Trainable, decay: float, freeze: int = 0) -> None:
    """Set the factor of every parameter's learning rate to ``decay ** (depth + 1 - layer)``, and freeze the first
    layers. Frozen ones leave the factors of the others as they are.

    Raises:
        ConfigError: if ``freeze`` leaves no block to train, or for a parameter that belongs to no layer.
    """
    depth = objective.model.encoder.layers_of_blocks
    if freeze > depth + 1:
        raise ConfigError(
            f"freeze={freeze} must be at most {depth + 1}, the layers of this encoder (embeddings and {depth} blocks)"
        )
    scales = {}
    for name, parameter, layer in _layers(objective):
        scales[name] = decay ** (depth + 1 - layer)
        parameter.requires_grad_(layer >= freeze)
    objective.lr_scales = scales


def group_table(objective: Trainable, optim: OptimConfig) -> list[Group]:
    """The groups that an engine's optimizer has for ``objective``, from the embeddings to the head."""
    members = defaultdict[tuple[bool, float, float], list[tuple[int, nn.Parameter]]](list)
    for name, parameter, layer in _layers(objective):
        trained = parameter.requires_grad
        scale = objective.lr_scales.get(name, 1.0) if trained else 0.0
        decay = optim.weight_decay if trained and decays(name, parameter, optim) else 0.0
        members[trained, scale, -decay].append((layer, parameter))
    rows = []
    for (trained, scale, decay), found in sorted(members.items(), key=lambda item: item[0]):
        layers = sorted({layer for layer, _ in found})
        span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])
        kind = "frozen" if not trained else "decay" if decay else "no_decay"
        count = sum(parameter.numel() for _, parameter in found)
        rows.append(Group(f"layer_{span}_{kind}", span, scale, -decay, len(found), count))
    return rows


def _layers(objective: Trainable) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Name, parameter and layer of every parameter."""
    encoder = objective.model.encoder
    for name, parameter in objective.named_parameters():
        layer: int | None = encoder.layers_of_blocks + 1
        if name.startswith(ENCODER):
            layer = encoder.layer_of(name.removeprefix(ENCODER))
        if layer is None:
            raise ConfigError(
                f"{name} belongs to no layer, so its learning rate is not defined; name it in layer_of of "
                f"{type(encoder).__name__}"
            )
        yield name, parameter, layer
