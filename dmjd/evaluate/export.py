"""``dmjd export``: the encoder of a checkpoint as a file for timm, verified against timm's features."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
from safetensors.torch import save

import dmjd
import dmjd.models.convit  # registers ConvViT with timm
from dmjd.config import EvaluationConfig, ExportConfig
from dmjd.errors import ConfigError, UserError
from dmjd.evaluate.encoder import load_encoder
from dmjd.files import obstacle, printable, standing_place
from dmjd.interop.timm import TimmCall, timm_call, timm_state
from dmjd.models.masked_image_model import Encoder

logger = logging.getLogger("dmjd")

FOLDER = "export"
SUFFIX = ".safetensors"  # timm reads the format from it
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

TOLERANCE = 1e-5
"""Largest difference of two features, relative to the largest feature."""


def export(config: ExportConfig) -> Path:
    """Write the encoder of ``config.checkpoint`` for timm, and a JSON file beside it with the call that loads it.

    :func:`sidecar` holds ``architecture`` and ``arguments`` of
    ``timm.create_model(architecture, checkpoint_path=file, **arguments)``; so does the file's header under ``dmjd``.
    An existing file is replaced atomically.

    Returns:
        The file: ``config.output``, or ``RUN/export/encoder-WEIGHTS-step########-DTYPE.safetensors``.

    Raises:
        CheckpointError, ConfigError: as :func:`~dmjd.evaluate.encoder.load_encoder`.
        ConfigError: if ``config.output`` cannot be written.
        UserError: if timm's features from the file differ from the encoder's, or are not finite; no file is written.
    """
    if config.output is not None:
        _check_output(config.output)
    frozen = load_encoder(
        EvaluationConfig(checkpoint=config.checkpoint, model=config.model, weights=config.weights, device="cpu")
    )
    trained = frozen.trained
    encoder = frozen.encoder.to(DTYPES[config.dtype])
    weights, call = encoder.state_dict(), timm_call(trained.backbone, trained.data)
    state = timm_state(weights, encoder.positions)
    left_out = sorted(weights.keys() - state.keys())
    card = {
        "architecture": call.architecture,
        "arguments": call.arguments,
        "token_grid": "x".join(map(str, encoder.grid)),
        "mean": trained.data.mean,
        "std": trained.data.std,
        "dtype": config.dtype,
        "weights": config.weights,
        "step": frozen.step,
        "left_out": left_out,
        "config_sha256": hashlib.sha256(frozen.text.encode()).hexdigest(),
        "dmjd": dmjd.__version__,
        "timm": timm.__version__,
    }
    name = f"encoder-{config.weights}-step{frozen.step:08d}-{config.dtype}{SUFFIX}"
    path = frozen.run.path / FOLDER / name if config.output is None else Path(config.output)
    if path.exists() and path.samefile(frozen.path):
        raise ConfigError(f"output={path} is the checkpoint, which would be overwritten; set another")
    for place, is_folder in ((path.parent, True), (path, False), (sidecar(path), False)):
        if what := obstacle(place, folder=is_folder):
            raise ConfigError(f"{place} is {what}; move it away, or set another file with output=FILE{SUFFIX}")
    standing = standing_place(frozen.run.path if config.output is None else path.parent)
    if not standing.is_dir() or not os.access(standing, os.W_OK):
        raise ConfigError(f"{standing} is not writable; set another file with output=FILE{SUFFIX}")
    if printable(str(standing)) != str(standing):
        raise ConfigError(
            f"{printable(str(standing))} is not UTF-8, and safetensors takes no other names; set another file with "
            f"output=FILE{SUFFIX}"
        )
    with TemporaryDirectory(prefix=f".{FOLDER}-", dir=standing) as scratch:
        draft = Path(scratch) / path.name
        # One entry, so that the order is fixed; not save_file, whose file only its owner can read.
        draft.write_bytes(save(state, metadata={"dmjd": json.dumps(card)}))
        sidecar(draft).write_text(json.dumps(card, indent=1))
        # In float32: the comparison is of the rounded weights, not of half-precision arithmetic.
        _verify(draft, call, encoder.float())
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process killed here leaves weights without a sidecar, never with the sidecar of other weights.
        sidecar(path).unlink(missing_ok=True)
        draft.replace(path)
        sidecar(draft).replace(sidecar(path))
    if left_out:
        logger.info("left out: %s, which timm's model does not have", ", ".join(left_out))
    return path


def sidecar(path: Path) -> Path:
    """The JSON file beside an export: ``NAME.safetensors`` -> ``NAME.safetensors.json``."""
    return path.with_name(f"{path.name}.json")


def _check_output(output: str) -> None:
    path = Path(output)
    if path.suffix != SUFFIX:
        raise ConfigError(f"output={output} must end in {SUFFIX}, from which timm reads the format")
    if not path.parent.is_dir():
        raise ConfigError(f"output={output}: {path.parent} is not a folder; create it, or set another")
    if path.is_dir():
        raise ConfigError(f"output={output} is a folder; set a file")


def _verify(path: Path, call: TimmCall, encoder: Encoder) -> None:
    """Build timm's model from the file and compare its features of a fixed batch with the encoder's."""
    arguments: dict[str, Any] = call.arguments
    model: Any = timm.create_model(call.architecture, checkpoint_path=str(path), **arguments).eval()
    shape = (2, arguments["in_chans"], *arguments["img_size"])
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = encoder(images), model.forward_features(images)
    if not bool(expected.isfinite().all()):
        raise UserError(
            "the encoder's features hold NaN or infinity: export an earlier checkpoint, or with dtype=fp32 or bf16"
        )
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:  # true for NaN
        raise UserError(
            f"timm {timm.__version__} computes other features from the export than the encoder (relative difference "
            f"{difference:.1e}, at most {TOLERANCE:.0e} is allowed), so no file was written"
        )
