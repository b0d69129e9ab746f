"""The model of a file of weights, from the shapes of its tensors, its header and the configuration beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from dmjd.config import BackboneConfig, DataConfig
from dmjd.errors import CheckpointError
from dmjd.files import read_file
from dmjd.interop.file_content import is_safetensors
from dmjd.interop.names import BIAS_TABLE, POSITIONS, SHARED_TABLE
from dmjd.interop.state_file import MODEL_CONFIG, is_of_hugging_face
from dmjd.interop.tables import is_fixed
from dmjd.interop.tensors import Grid, bias_rows, depth_of, grid_of_bias_table, grids_of
from dmjd.safe_load import parse_json

HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}
"""Width of a ViT -> its attention heads, which no tensor of plain blocks shows."""
_HEADS_OF_MOCO = HEADS | {192: 12, 384: 12}
"""MoCo v3's ViT-S, and CAE's Tiny and Small, whose positions are MoCo v3's, have 12 heads."""

_LAYER_SCALE = 0.1
"""Initial value of a layer scale, which trained weights do not show and evaluations do not depend on."""
_MOST_PIXELS = 4096
_LEAST_STD = 1e-3
_MOST_EPS = 1e-5
"""Up to here features differ by less than half precision does; transformers' ViTs have 1e-12."""
_STAGES = 4
_PREPROCESSOR = "preprocessor_config.json"
"""The normalisation in a folder of Hugging Face."""


class Noted(NamedTuple):
    """Values that a file's header or the configuration beside it states; None for those that it does not."""

    num_heads: int | None = None
    image_size: Grid | None = None
    mean: list[float] | None = None
    std: list[float] | None = None


NOTHING = Noted()


@dataclass(frozen=True)
class Described:
    """The encoder of a file. backbone: keys of :class:`~dmjd.config.BackboneConfig` and their values; num_heads may be
    missing. image_size: (height, width) in pixels; None without positions, and if they fit no square grid.
    """

    backbone: dict[str, Any]
    channels: int
    image_size: Grid | None
    noted: Noted = NOTHING

    @property
    def text(self) -> str:
        """The values as arguments of a command line."""
        shown = dict(self.backbone)
        for section in ("windows", "conv_stages"):
            shown |= {f"{section}.{key}": value for key, value in shown.pop(section, {}).items()}
        return " ".join(f"backbone.{key}={_typed(value)}" for key, value in shown.items())

    def differing(self, other: Described) -> Described:
        """The values that ``other`` does not have. Attention heads that it does not show may be the same."""
        known = {"num_heads": self.backbone.get("num_heads")} | other.backbone
        kept = {key: value for key, value in self.backbone.items() if known.get(key) != value}
        return replace(self, backbone=kept)

    def backbone_config(self, given: Mapping[str, Any]) -> BackboneConfig:
        """The configuration, with the values of dotted keys that are ``given``.

        Raises:
            CheckpointError: if the number of attention heads is neither given nor known.
        """
        values = dict(self.backbone)
        if not {"num_heads", "windows"} & {*values, *given}:
            known = ", ".join(f"{width}: {heads}" for width, heads in HEADS.items())
            raise CheckpointError(
                f"tensors do not show the number of attention heads, and none is known for backbone.embed_dim="
                f"{values['embed_dim']} (known are {known}); set backbone.num_heads=N"
            )
        config = BackboneConfig()
        for key, value in values.items():
            part = getattr(config, key)
            setattr(config, key, replace(part, **value) if isinstance(value, dict) else value)
        for key, value in given.items():
            *sections, name = key.split(".")
            setattr(reduce(getattr, sections, config), name, value)
        return config

    def _of_channels(self, values: list[float] | None) -> list[float]:
        return list(values) if values is not None and len(values) == self.channels else []

    def data_config(self, other: DataConfig | None) -> DataConfig:
        """Image size, channels and normalisation: as shown, else those of ``other``, of ImageNet by default: the size
        rounded to whole patches, and the normalisation of as many channels, or .5 for each."""
        base = DataConfig() if other is None else other
        patch = self.backbone.get("patch_size", BackboneConfig.patch_size)
        size = self.image_size or [max(1, round(side / patch)) * patch for side in base.image_size]
        fitting = len(base.mean) == len(base.std) == self.channels
        plain = [0.5] * self.channels
        return DataConfig(
            image_size=list(size),
            channels=self.channels,
            mean=self._of_channels(self.noted.mean) or list(base.mean if fitting else plain),
            std=self._of_channels(self.noted.std) or list(base.std if fitting else plain),
        )


def describe(
    weights: Mapping[str, Tensor], noted: Noted = NOTHING, grid: Grid | None = None, *, has_qv_bias: bool = False
) -> Described:
    """The encoder whose ``weights``, under our names, these are.

    Args:
        noted: values from elsewhere, which rule.
        grid: of the positions, if it is known.
        has_qv_bias: whether the file has separate biases of q and v, as BEiT's blocks.

    Raises:
        CheckpointError: if the shapes are of none of our encoders.
    """
    if "encoder.patch_embed1.proj.weight" in weights:
        return _convvit(weights, noted)
    if any(name.startswith("encoder.layers.") for name in weights):
        return _swin(weights, noted)
    return _vit(weights, noted, grid, has_qv_bias)


def noted_at(path: Path) -> Noted:
    """Values in the header of a .safetensors file of ``dmjd export``, or in the configuration of Hugging Face beside
    the file ``path``. Values of other types and sizes than a model's are left out."""
    config, processor = path.parent / MODEL_CONFIG, path.parent / _PREPROCESSOR
    if is_safetensors(path):
        with safe_open(path, "pt") as file:
            card = _json((file.metadata() or {}).get("dmjd", ""))
        if card:
            arguments = card.get("arguments")
            found = arguments if isinstance(arguments, dict) else {}
            return _noted(found.get("num_heads"), found.get("img_size"), card.get("mean"), card.get("std"))
    if not is_of_hugging_face(path):
        return NOTHING
    model, images = _json_file(config), _json_file(processor)
    if (activation := model.get("hidden_act", "gelu")) != "gelu":
        raise CheckpointError(
            f"{config}: hidden_act={str(activation)[:40]!r}, and dmjd's encoders have gelu; use the model's own code"
        )
    eps = model.get("layer_norm_eps", 0)
    if type(eps) in (int, float) and eps > _MOST_EPS:
        raise CheckpointError(
            f"{config}: layer_norm_eps={eps:g}, and dmjd's encoders have 1e-06; use the model's own code"
        )
    return _noted(model.get("num_attention_heads"), model.get("image_size"), *_statistics(images))


def _noted(heads: Any, size: Any, mean: Any, std: Any) -> Noted:
    sides = [size, size] if type(size) is int else size
    is_size = isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
    return Noted(
        heads if type(heads) is int and heads > 0 else None,
        (sides[0], sides[1]) if is_size and max(sides) <= _MOST_PIXELS else None,
        *((mean, std) if _are_within(mean, -1) and _are_within(std, _LEAST_STD) else (None, None)),
    )


def _statistics(processor: Mapping[str, Any]) -> tuple[list[float] | None, list[float] | None]:
    """Mean and std of pixels in 0..1, of a preprocessor that computes ``(pixel * rescale_factor - mean) / std``."""
    mean, std = _numbers(processor.get("image_mean")), _numbers(processor.get("image_std"))
    factor = 1.0 if processor.get("do_rescale") is False else processor.get("rescale_factor", 1 / 255)
    if mean is None or std is None or type(factor) is not float or not 0 < factor <= 1:
        return None, None
    if processor.get("do_normalize") is False:
        mean, std = [0.0] * len(mean), [1.0] * len(mean)
    scale = 1.0 if factor == 1 / 255 else 255 * factor
    return [value / scale for value in mean], [value / scale for value in std]


def _numbers(values: Any) -> list[float] | None:
    fits = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    return values if fits else None


def _are_within(values: Any, least: float) -> bool:
    return _numbers(values) is not None and all(least <= value <= 1 for value in values)


def _json(text: str | bytes) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _json_file(path: Path) -> dict[str, Any]:
    try:
        return _json(read_file(path))
    except OSError:
        return {}


def _vit(weights: Mapping[str, Tensor], noted: Noted, grid: Grid | None, has_qv_bias: bool) -> Described:
    width, channels, patch = _embedding(weights, "encoder.patch_embed.proj.weight")
    shared = weights.get(SHARED_TABLE)
    table = shared if shared is not None else weights.get(f"encoder.blocks.0.{BIAS_TABLE}")
    rows = weights.get(POSITIONS)
    prefix = int("encoder.cls_token" in weights)
    scaled = "encoder.blocks.0.gamma_1" in weights
    _check_blocks(weights, "encoder.blocks", width)
    if table is not None and table.ndim != 2:
        raise CheckpointError(f"its relative biases are of shape {list(table.shape)}, not [rows, heads]")
    if grid is not None:
        _check_grid(grid, patch, rows, table)
    if table is not None:
        grid = grid or _noted_grid(noted, patch, lambda size: table.shape[0] == bias_rows(size))
        grid = grid or grid_of_bias_table(table)
    elif rows is not None and rows.ndim == 3:
        grid = grid or _noted_grid(noted, patch, lambda size: rows.shape[1] - math.prod(size) in (0, 1))
        grid = grid or next(iter(grids_of(rows.shape[1], prefix, None)), None)
    kinds = ["relative"] * (table is not None)
    if rows is not None and (kinds or not _is_fixed(rows, grid)):  # fixed ones have no name beside relative ones
        kinds.insert(0, "learned")
    heads = noted.num_heads
    if heads is None and table is not None:
        heads = table.shape[1]
    if heads is None:
        heads = (_HEADS_OF_MOCO if rows is not None and _is_of_moco(rows, grid) else HEADS).get(width)
    backbone: dict[str, Any] = {
        "name": "vit",
        "patch_size": patch,
        "embed_dim": width,
        "depth": depth_of(weights),
        **({} if heads is None else {"num_heads": heads}),
        "mlp_ratio": _mlp_ratio(weights, "encoder.blocks.0"),
        "class_token": bool(prefix),
        "masked_tokens": "mask_token" if table is not None or "encoder.mask_token" in weights else "drop",
        "positions": "_".join(kinds) or "sincos",
        "block": "beit" if table is not None or scaled or has_qv_bias else "plain",
    }
    if table is not None:
        backbone["bias_tables"] = "per_block" if shared is None else "shared"
    if scaled:
        backbone["layer_scale"] = _LAYER_SCALE
    size = None if grid is None else (grid[0] * patch, grid[1] * patch)
    return Described(backbone, channels, size, noted)


def _check_grid(grid: Grid, patch: int, rows: Tensor | None, table: Tensor | None) -> None:
    """Raise CheckpointError for a grid that the tables do not have, or without them for one of huge images."""
    fits = [max(grid) * patch <= _MOST_PIXELS] if rows is None and table is None else []
    fits += [] if rows is None or rows.ndim != 3 else [rows.shape[1] - math.prod(grid) in (0, 1)]
    fits += [] if table is None else [table.shape[0] == bias_rows(grid)]
    if not all(fits):
        raise CheckpointError(
            f"its header states a token grid of {grid[0]}x{grid[1]}, which its positions do not have; remove it from "
            "the header"
        )


def _noted_grid(noted: Noted, patch: int, fits: Callable[[Grid], bool]) -> Grid | None:
    """The grid of the image size that is noted, if tables of the file are of that grid."""
    if noted.image_size is None or any(side % patch for side in noted.image_size):
        return None
    grid = noted.image_size[0] // patch, noted.image_size[1] // patch
    return grid if fits(grid) else None


def _convvit(weights: Mapping[str, Tensor], noted: Noted) -> Described:
    first, channels, _ = _embedding(weights, "encoder.patch_embed1.proj.weight")
    second, _, _ = _embedding(weights, "encoder.patch_embed2.proj.weight")
    width, _, _ = _embedding(weights, "encoder.patch_embed3.proj.weight")
    heads = noted.num_heads or HEADS.get(width)
    stages = ["encoder.blocks1", "encoder.blocks2", "encoder.blocks3"]
    depths = [_count(weights, stage) for stage in stages]
    for stage, dim in zip(stages, (first, second, width), strict=True):
        _check_blocks(weights, stage, dim)
    ratios = [_mlp_ratio(weights, f"{stage}.0") for stage in stages]
    backbone = {
        "name": "convvit",
        "embed_dim": width,
        "depth": depths[2],
        **({} if heads is None else {"num_heads": heads}),
        "mlp_ratio": ratios[2],
        "class_token": False,
        "conv_stages": {"embed_dims": [first, second], "depths": depths[:2], "mlp_ratios": ratios[:2]},
        "multi_scale": "encoder.stage1_output_decode.weight" in weights,
    }
    rows = weights.get(POSITIONS)
    patch = BackboneConfig.patch_size
    grids = grids_of(rows.shape[1], 0, None) if rows is not None and rows.ndim == 3 else []
    size = noted.image_size or ((grids[0][0] * patch, grids[0][1] * patch) if grids else None)
    return Described(backbone, channels, size, noted)


def _swin(weights: Mapping[str, Tensor], noted: Noted) -> Described:
    first, channels, _ = _embedding(weights, "encoder.patch_embed.proj.weight")
    stages = _count(weights, "encoder.layers")
    found = [weights.get(f"encoder.layers.{stage}.blocks.0.{BIAS_TABLE}") for stage in range(min(stages, _STAGES))]
    tables = [table for table in found if table is not None and table.ndim == 2]
    # A stage with fewer tokens than a window has a smaller table, which need not be square.
    sides = [window[0] for table in tables if (window := grid_of_bias_table(table, 0)) is not None]
    if stages != _STAGES or len(tables) != _STAGES or not sides:
        raise CheckpointError(
            f"its Swin has {stages} stages, {len(tables)} with a table of relative biases, and dmjd's has {_STAGES}; "
            "use its own code"
        )
    for stage in range(_STAGES):
        _check_blocks(weights, f"encoder.layers.{stage}.blocks", first << stage)
    backbone = {
        "name": "swin",
        "patch_size": 32,
        "embed_dim": 8 * first,
        "mlp_ratio": _mlp_ratio(weights, "encoder.layers.0.blocks.0"),
        "class_token": False,
        "masked_tokens": "mask_token",
        "windows": {
            "depths": [_count(weights, f"encoder.layers.{stage}.blocks") for stage in range(stages)],
            "num_heads": [table.shape[1] for table in tables],
            "size": max(sides),
        },
    }
    side = 32 * max(sides)
    return Described(backbone, channels, noted.image_size or (side, side), noted)


def _check_blocks(weights: Mapping[str, Tensor], stem: str, width: int) -> None:
    """Raise CheckpointError for blocks that are not of ``width``: the model would be larger than the file."""
    hidden = weights.get(f"{stem}.0.mlp.fc1.weight")
    known = {
        "attn.qkv.weight": (3 * width, width),
        "conv1.weight": (width, width),
        "mlp.fc1.weight": (0 if hidden is None else hidden.shape[0], width),
    }
    for name, value in weights.items():
        found = re.match(rf"{re.escape(stem)}\.\d+\.(.+)", name)
        expected = known.get(found[1]) if found else None
        if expected is not None and tuple(value.shape[:2]) != expected:
            raise CheckpointError(
                f"{name} is of shape {list(value.shape)}, and blocks of one width have {list(expected)} there; use the "
                "model's own code"
            )


def _embedding(weights: Mapping[str, Tensor], name: str) -> tuple[int, int, int]:
    """Width, channels and side of a patch embedding."""
    shape = list(weights[name].shape) if name in weights else []
    if len(shape) != 4 or shape[2] != shape[3]:
        raise CheckpointError(f"{name} is of shape {shape}, not [width, channels, p, p]; use the model's own code")
    return shape[0], shape[1], shape[2]


def _count(weights: Mapping[str, Tensor], stem: str) -> int:
    numbers = [re.match(rf"{re.escape(stem)}\.(\d{{1,9}})\.", name) for name in weights]
    return 1 + max((int(found[1]) for found in numbers if found), default=-1)


def _mlp_ratio(weights: Mapping[str, Tensor], block: str) -> float:
    """Hidden width / width of the block's MLP; its product with the width rounds down to the hidden width."""
    weight = weights.get(f"{block}.mlp.fc1.weight")
    if weight is None or weight.ndim < 2:
        raise CheckpointError(f"{block}.mlp.fc1.weight is not a matrix; use the model's own code")
    hidden, width = weight.shape[0], weight.shape[1]
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def _is_fixed(rows: Tensor, grid: Grid | None) -> bool:
    """Whether positions are sine-cosine ones of ``grid``."""
    if rows.ndim != 3 or grid is None or rows.shape[1] - math.prod(grid) not in (0, 1):
        return False
    return is_fixed(rows, grid, rows.shape[1] - math.prod(grid))


def _is_of_moco(rows: Tensor, grid: Grid | None) -> bool:
    """Whether positions are MoCo v3's: sine-cosine ones with the row in the first half of the channels."""
    return _is_fixed(rows.roll(rows.shape[-1] // 2, -1), grid)


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
